"""Which processes make up the local mesh. Pure: options and environment in, process descriptions out."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal_common.huge_pages import with_huge_pages

SERVICES = ("scheduler", "kv_cache", "prefill_worker", "decode_worker", "gateway")
MODEL_READERS = ("prefill_worker", "decode_worker", "gateway")
_DRAIN_GRACE_S = "3"


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOptions:
    """What the user may choose. `model` is a checkpoint folder; None leaves it to the workers' own default."""

    mesh: str = "local"
    http_address: str = "127.0.0.1:8000"
    grpc_address: str = "127.0.0.1:8001"
    model: Path | None = None
    ready_timeout_s: float = 300.0
    stop_timeout_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process: how to start it. It prints a ready line on standard output when it serves."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]


def service_specs(options: StackOptions, environ: Mapping[str, str], *, nats_url: str) -> tuple[ProcessSpec, ...]:
    """The five services. What the user's environment sets stands, but for mesh and NATS, which all must share."""
    return tuple(_spec(name, options, environ, nats_url) for name in SERVICES)


def _spec(name: str, options: StackOptions, environ: Mapping[str, str], nats_url: str) -> ProcessSpec:
    prefix = f"SHOAL_{name.upper()}_"
    wanted = {
        prefix + "LISTEN_ADDRESS": options.grpc_address if name == "gateway" else "127.0.0.1:0",
        prefix + "ADMIN_ADDRESS": "127.0.0.1:0",
        prefix + "DRAIN_GRACE_S": _DRAIN_GRACE_S,
    }
    if name == "gateway":
        wanted[prefix + "HTTP_ADDRESS"] = options.http_address
    if options.model is not None and name in MODEL_READERS:
        wanted[prefix + "MODEL"] = str(options.model)
    # -P: the folder the command happens to run in must not shadow our packages.
    command = (sys.executable, "-P", "-m", f"shoal_{name}")
    environment = {**wanted, **with_huge_pages(environ), "SHOAL_MESH": options.mesh, "SHOAL_NATS_URL": nats_url}
    return ProcessSpec(name=name, command=command, environment=environment)
