"""A whole mesh of real processes on the tiny golden model: NATS and the five services, all on free ports."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from shoal.admin.v1 import admin_service_pb2 as admin
from shoal.admin.v1 import admin_service_pb2_grpc as admin_rpc
from shoal.scheduler.v1 import scheduler_service_pb2 as scheduler_pb
from shoal.scheduler.v1 import scheduler_service_pb2_grpc as scheduler_rpc
from shoal_cli.status import observe
from support.checkpoints import TINY
from support.nats_server import NatsServer
from support.service_process import ServiceProcess, service_process

MESH = "e2e"
Settings = Mapping[str, Mapping[str, str]]
"""Per process its settings without their prefix: {"scheduler": {"REMOTE_PREFILL_TOKENS": "32"}}."""
NANO: Settings = {"prefill_worker": {"MODEL": "nano"}, "decode_worker": {"MODEL": "nano"}, "gateway": {"MODEL": ""}}
"""A mesh that serves the model that comes with Shoal."""
_START_S = 120.0
_HELD = {"open_requests", "open_exports", "running", "waiting", "queued", "leases"}
_POOLS = {"decode_worker": {"blocks": 1024, "slots": 32}, "prefill_worker": {"blocks": 512, "slots": 16}}


@dataclass(slots=True)
class Mesh:
    """Running processes by name. A second decode worker is `decode_worker_2`, and so on."""

    nats: NatsServer
    folder: Path
    processes: dict[str, ServiceProcess]
    _stack: contextlib.ExitStack = field(repr=False)

    def __getitem__(self, name: str) -> ServiceProcess:
        return self.processes[name]

    @property
    def http(self) -> str:
        """Base of HTTP requests."""
        return f"http://{self['gateway'].ready['http']}"

    @property
    def grpc(self) -> str:
        """Address of the gateway's gRPC."""
        return self["gateway"].address

    def log(self, name: str) -> list[dict[str, Any]]:
        """The log records of a process."""
        lines = (self.folder / f"{name}.log").read_text(errors="replace").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def start(self, name: str, settings: Mapping[str, str] | None = None) -> ServiceProcess:
        """Start one more process, or one again that is gone."""
        context = _service(name, self.nats.url, self.folder, settings or {})
        self.processes[name] = self._stack.enter_context(context)
        return self.processes[name]

    def kill(self, name: str) -> None:
        """kill -9."""
        popen = self.processes.pop(name).popen
        popen.kill()
        popen.wait()

    def numbers(self, name: str) -> dict[str, float]:
        """The figures of GetStatus."""
        with grpc.insecure_channel(self[name].address) as channel:
            status = admin_rpc.AdminServiceStub(channel).GetStatus(admin.GetStatusRequest(), timeout=5)
            return dict(status.numbers)

    def in_use(self) -> dict[str, float]:
        """What is held anywhere, by process and figure; empty when all pools are at their baseline."""
        held: dict[str, float] = {}
        for name in self.processes:
            numbers = self.numbers(name)
            for pool, total in _POOLS.get(role_of(name), {}).items():
                held[f"{name} {pool}"] = total - numbers[f"free_{pool}"]
            for figure in _HELD & numbers.keys():
                held[f"{name} {figure}"] = numbers[figure]
        return {name: count for name, count in held.items() if count}

    def fleet(self) -> set[str]:
        """Addresses of all that the scheduler knows."""
        with grpc.insecure_channel(self["scheduler"].address) as channel:
            stub = scheduler_rpc.SchedulerServiceStub(channel)
            return {one.address for one in stub.GetFleet(scheduler_pb.GetFleetRequest(), timeout=5).instances}

    def on_bus(self) -> set[str]:
        """Addresses of all that announce themselves."""
        return {presence.address for presence, _ in asyncio.run(observe(self.nats.url, MESH))}

    def addresses(self) -> set[str]:
        """Addresses of all processes."""
        return {process.address for process in self.processes.values()}

    def wait_idle(self, timeout_s: float = 10.0) -> None:
        """Wait until nothing is held anywhere."""
        wait_for(
            lambda: not self.in_use(), what=lambda: f"idle pools, still held: {self.in_use()}", timeout_s=timeout_s
        )

    def wait_ready(self, *names: str, timeout_s: float = _START_S) -> None:
        """Wait for /readyz of these processes, all if none is named."""
        for name in names or tuple(self.processes):
            process = self[name]
            wait_for(partial(is_ready, process), what=partial("{} ready".format, name), timeout_s=timeout_s)


@contextlib.contextmanager
def mesh(
    folder: Path, settings: Settings | None = None, *, decode_workers: int = 1, has_nats: bool = True
) -> Iterator[Mesh]:
    """Up and ready inside the block; nothing of it lives after it. Without NATS, only started."""
    names = ["scheduler", "kv_cache", "prefill_worker", "gateway", "decode_worker"]
    names += [f"decode_worker_{number}" for number in range(2, decode_workers + 1)]
    nats = NatsServer(folder / "nats")
    if has_nats:
        nats.start()
    with contextlib.ExitStack() as stack:
        stack.callback(nats.stop)
        contexts = [_service(name, nats.url, folder, (settings or {}).get(name, {})) for name in names]
        # Side by side: imports are most of a start.
        with ThreadPoolExecutor(len(names)) as pool:
            entered = [pool.submit(stack.enter_context, context) for context in contexts]
        started = Mesh(nats, folder, {name: one.result() for name, one in zip(names, entered, strict=True)}, stack)
        if has_nats:
            started.wait_ready()
        yield started


def role_of(name: str) -> str:
    """`decode_worker` of `decode_worker_2`."""
    return name.rstrip("_0123456789")


def is_ready(process: ServiceProcess) -> bool:
    """What /readyz says. Raises AssertionError if the process has ended."""
    assert process.popen.poll() is None, f"ended with {process.popen.returncode}"
    try:
        urllib.request.urlopen(f"http://{process.admin}/readyz", timeout=5).close()
    except urllib.error.HTTPError:
        return False
    return True


def wait_for(condition: Callable[[], bool], *, what: Callable[[], str], timeout_s: float = 10.0) -> None:
    """Return once the condition is true. Raises AssertionError with `what()` after `timeout_s`."""
    give_up = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > give_up:
            raise AssertionError(f"not within {timeout_s} s: {what()}")
        time.sleep(0.02)


def _service(
    name: str, nats_url: str, folder: Path, settings: Mapping[str, str]
) -> contextlib.AbstractContextManager[ServiceProcess]:
    role = role_of(name)
    prefix = f"SHOAL_{role.upper()}_"
    environment = {prefix + key: value for key, value in settings.items() if not key.startswith(("SHOAL_", "OTEL_"))}
    environment |= {key: value for key, value in settings.items() if key.startswith(("SHOAL_", "OTEL_"))}
    environment |= {"SHOAL_NATS_URL": nats_url, "SHOAL_MESH": MESH}
    if role == "gateway":
        environment |= {prefix + "HTTP_ADDRESS": "127.0.0.1:0", prefix + "LISTEN_ADDRESS": "127.0.0.1:0"}
    if role in ("gateway", "decode_worker", "prefill_worker"):
        environment.setdefault(prefix + "MODEL", str(TINY))
    return service_process(f"shoal_{role}", log=folder / f"{name}.log", environment=environment, timeout_s=_START_S)
