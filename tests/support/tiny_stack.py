"""The supervisor of `shoal run` over tiny services instead of the real five. Run with -m RUN_DIR HTTP GRPC [BAD]."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from shoal_cli.errors import CliError
from shoal_cli.run import supervise
from shoal_cli.stack_spec import ProcessSpec, StackOptions


def main(run_dir: str, http_address: str, grpc_address: str, bad: str = "") -> int:
    def specs(nats_url: str) -> Sequence[ProcessSpec]:
        environment = {**os.environ, "SHOAL_NATS_URL": nats_url}
        command = (sys.executable, "-m", "support.tiny_service")
        wrong = ("--admin-address", bad) if bad else ()
        return (
            ProcessSpec(name="worker", command=(*command, *wrong), environment=environment),
            ProcessSpec(name="gateway", command=(*command, "--listen-address", grpc_address), environment=environment),
        )

    options = StackOptions(http_address=http_address, grpc_address=grpc_address, ready_timeout_s=30.0)
    try:
        return supervise(options, run_dir=Path(run_dir), specs=specs, question=None, once=False)
    except CliError as error:
        print(f"shoal: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
