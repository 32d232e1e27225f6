"""A service as its own process, from its ready line to its end."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shoal_common.huge_pages import with_huge_pages


@dataclass(frozen=True, slots=True)
class ServiceProcess:
    """A running service: its gRPC address, its admin address, and all that its ready line said."""

    popen: subprocess.Popen[str]
    address: str
    admin: str
    ready: Mapping[str, object]


@contextmanager
def service_process(
    module: str,
    *,
    log: Path,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 90.0,
    wrapper: Sequence[str] = (),
) -> Iterator[ServiceProcess]:
    """Run `python -m module` and wait for its ready line; ended at the end. Its log goes to the file `log`.

    wrapper    a command that takes the rest as its arguments and becomes it by exec

    SHOAL_ variables of the test's own environment do not reach it; SHOAL_NATS_URL is "off" unless given, and decode
    workers verify all drafts: a planner may find that none pays here, and nothing of drafts would be tested. Its memory
    is set up as the images and `shoal run` do it.
    """
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("SHOAL_")}
    env = {**inherited, "SHOAL_NATS_URL": "off", "OMP_NUM_THREADS": "1"}
    if module == "shoal_decode_worker":
        env["SHOAL_DECODE_WORKER_VERIFY"] = "fixed"
    env = with_huge_pages(env | dict(environment or {}))
    with log.open("w") as errors:
        popen = subprocess.Popen(
            [*wrapper, sys.executable, "-m", module], env=env, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    assert popen.stdout is not None
    try:
        ready = _ready_line(popen, log, time.monotonic() + timeout_s)
        yield ServiceProcess(popen, str(ready["address"]), str(ready["admin"]), ready)
    finally:
        # Politely first: a killed process leaves its shared memory behind until the next one starts.
        popen.terminate()
        try:
            popen.wait(5)
        except subprocess.TimeoutExpired:
            popen.kill()
            popen.wait()
        popen.stdout.close()


def _ready_line(popen: subprocess.Popen[str], log: Path, give_up: float) -> dict[str, object]:
    assert popen.stdout is not None
    readable, _, _ = select.select([popen.stdout], [], [], max(0.0, give_up - time.monotonic()))
    line = popen.stdout.readline() if readable else ""
    if not line:
        raise AssertionError(f"no ready line; the log ends with: {log.read_text()[-2000:]}")
    ready: dict[str, object] = json.loads(line)
    return ready
