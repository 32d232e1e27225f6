"""NATS, mock ranks, schedulers and a gateway as real processes; or one scheduler of the test's own."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.scheduler.v1 import scheduler_service_pb2 as pb
from shoal_common.announcer import Announcer
from shoal_common.presence import Presence
from support.fake_scheduler import FakeScheduler, placed, serving
from support.nats_server import NatsServer
from support.service_process import ServiceProcess, service_process

MODEL_DIR = Path(__file__).parents[1] / "golden" / "data" / "tiny"


@dataclass(frozen=True, slots=True)
class GatewayMesh:
    """Where everything is."""

    http: str
    grpc: str
    gateway: ServiceProcess
    ranks: tuple[ServiceProcess, ...]
    scheduler: FakeScheduler
    """Knows nothing where real schedulers run."""
    schedulers: tuple[ServiceProcess, ...]
    nats: NatsServer

    @property
    def url(self) -> str:
        """Base of the OpenAI client."""
        return f"http://{self.http}/v1"


@contextlib.contextmanager
def gateway_mesh(
    folder: Path,
    *,
    rank: Mapping[str, str] | None = None,
    gateway: Mapping[str, str] | None = None,
    rank_count: int = 1,
    scheduler_count: int = 0,
) -> Iterator[GatewayMesh]:
    """Up and ready inside the block; ended after it. Without real schedulers one of the test's own places requests."""
    nats = NatsServer(folder / "nats")
    nats.start()
    shared = {"SHOAL_NATS_URL": nats.url, "SHOAL_MESH": "test"}
    rank_env = {
        "SHOAL_MOCK_RANK_VOCAB_SIZE": "512",
        "SHOAL_MOCK_RANK_LOWEST_TOKEN_ID": "10",
        "SHOAL_MOCK_RANK_MAX_CONTEXT": "4096",
        **shared,
        **(rank or {}),
    }
    gateway_env = {
        "SHOAL_GATEWAY_HTTP_ADDRESS": "127.0.0.1:0",
        "SHOAL_GATEWAY_LISTEN_ADDRESS": "127.0.0.1:0",
        "SHOAL_GATEWAY_MODEL": str(MODEL_DIR),
        **shared,
        **(gateway or {}),
    }
    with contextlib.ExitStack() as stack:
        stack.callback(nats.stop)
        ranks = [
            stack.enter_context(
                service_process("shoal_decode_worker.mock_rank", log=folder / f"rank{index}.log", environment=rank_env)
            )
            for index in range(rank_count)
        ]
        schedulers = [
            stack.enter_context(
                service_process("shoal_scheduler", log=folder / f"scheduler{index}.log", environment=shared)
            )
            for index in range(scheduler_count)
        ]
        scheduler = FakeScheduler(lambda *_: None)
        if not schedulers:
            scheduler = stack.enter_context(_scheduler(nats.url, [rank.address for rank in ranks]))
        served = stack.enter_context(
            service_process("shoal_gateway", log=folder / "gateway.log", environment=gateway_env)
        )
        http = str(served.ready["http"])
        _wait_ready(http, folder / "gateway.log")
        yield GatewayMesh(http, served.address, served, tuple(ranks), scheduler, tuple(schedulers), nats)


@contextlib.contextmanager
def _scheduler(nats_url: str, addresses_of_ranks: Sequence[str]) -> Iterator[FakeScheduler]:
    """A scheduler on a thread of its own, announced like a real one. Attempt k of a request goes to rank k."""
    turns: dict[str, int] = {}

    def place(request_id: str, message: pb.ReserveRequest) -> pb.ReserveResponse:
        turn = turns[request_id] = turns.get(request_id, -1) + 1
        return placed(request_id, f"rank{turn}", addresses_of_ranks[turn % len(addresses_of_ranks)])

    scheduler = FakeScheduler(place)
    addresses: queue.Queue[str] = queue.Queue()
    loop = asyncio.new_event_loop()
    stopped = asyncio.Event()

    async def run() -> None:
        async with serving(scheduler) as address:
            addresses.put(address)
            await stopped.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),), daemon=True)
    thread.start()
    presence = Presence(instance_id="scheduler-test", role="scheduler", address=addresses.get(timeout=10))
    announcer = Announcer(nats_url=nats_url, mesh="test", presence=presence)
    announcer.start()
    try:
        yield scheduler
    finally:
        announcer.stop()
        loop.call_soon_threadsafe(stopped.set)
        thread.join(10)
        loop.close()


def _wait_ready(http: str, log: Path, timeout_s: float = 20.0) -> None:
    give_up = time.monotonic() + timeout_s
    while True:
        try:
            urllib.request.urlopen(f"http://{http}/readyz", timeout=2).close()
            return
        except OSError as error:
            if time.monotonic() > give_up:
                raise AssertionError(f"gateway not ready: {error}; log: {log.read_text()[-2000:]}") from error
            time.sleep(0.02)
