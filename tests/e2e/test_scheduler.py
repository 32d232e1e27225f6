"""A scheduler process, a NATS server and workers that announce themselves: discovery, load, faults."""

from __future__ import annotations

import asyncio
import re
import signal
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from shoal.kv_cache.v1 import events_pb2
from shoal.kv_cache.v1 import kv_cache_service_pb2 as kv_pb
from shoal.scheduler.v1 import scheduler_service_pb2 as pb
from shoal.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from shoal_common import subjects
from shoal_common.announcer import Announcer
from shoal_common.bus import Bus
from shoal_common.load import LoadReport
from shoal_common.load_reporter import LoadReporter
from shoal_common.presence import Presence
from support.gateway_stream import GatewayStream
from support.nats_server import NatsServer
from support.service_process import ServiceProcess, service_process
from support.waiting import until

MODULE = "shoal_scheduler"
CALL_S = 10.0
STALE_S = 2.5
MAX_RESIDENT_MIB = 120


async def eventually(condition: Callable[[], Awaitable[bool]], *, what: str, timeout_s: float = 20.0) -> None:
    """Return once the condition holds. Raises AssertionError after `timeout_s`."""
    give_up = asyncio.get_running_loop().time() + timeout_s
    while not await condition():
        assert asyncio.get_running_loop().time() < give_up, f"{what} did not come true within {timeout_s} s"
        await asyncio.sleep(0.05)


class Worker:
    """A worker as far as the bus can tell: presence every second, and reports of a load that the test sets."""

    def __init__(self, nats_url: str, instance_id: str, role: str = "decode_worker", **fields: Any) -> None:
        values: dict[str, Any] = {
            "address": "x:1",
            "model": "tiny",
            "kv_id": "kv",
            "numerics_id": "n1",
            "capacity": {"blocks": 100, "slots": 4, "max_context": 8192},
            **fields,
        }
        presence = Presence(instance_id=instance_id, role=role, **values)
        self.load = LoadReport(free_blocks=100, total_blocks=100, free_slots=4, total_slots=4)
        self._announcer = Announcer(nats_url=nats_url, mesh="local", presence=presence)
        self._announcer.start()
        self._bus = Bus(nats_url, name=instance_id)
        self._reporter = LoadReporter(self._bus, mesh="local", role=role, instance_id=instance_id)
        self._reporting = asyncio.create_task(self._report())

    def drain(self) -> None:
        """Announce that it leaves."""
        self._announcer.update(is_draining=True)

    async def fall_silent(self) -> None:
        """Report no more; presence goes on."""
        self._reporting.cancel()
        await asyncio.gather(self._reporting, return_exceptions=True)

    async def stop(self) -> None:
        """Say goodbye."""
        await self.fall_silent()
        await asyncio.to_thread(self._announcer.stop)
        await self._bus.close()

    async def _report(self) -> None:
        await self._bus.start()
        while True:
            await self._reporter.publish(self.load)
            await asyncio.sleep(0.3)


class Mesh:
    """The process under test and what surrounds it."""

    def __init__(self, nats: NatsServer, scheduler: ServiceProcess, channel: grpc.aio.Channel) -> None:
        self.nats, self.scheduler, self.channel = nats, scheduler, channel
        self.stack = AsyncExitStack()

    def worker(self, instance_id: str, role: str = "decode_worker", **fields: Any) -> Worker:
        """Start a worker; stopped at the test's end."""
        started = Worker(self.nats.url, instance_id, role, **fields)
        self.stack.push_async_callback(started.stop)
        return started

    async def stream(self, gateway_id: str = "gateway") -> GatewayStream:
        """Open a Reserve stream; closed at the test's end."""
        opened = await GatewayStream(self.channel, gateway_id).open()
        self.stack.push_async_callback(opened.close)
        return opened

    async def fleet(self) -> pb.GetFleetResponse:
        """The fleet as the scheduler sees it."""
        return await SchedulerServiceStub(self.channel).GetFleet(pb.GetFleetRequest(), timeout=CALL_S)

    async def instance(self, instance_id: str) -> pb.FleetInstance:
        """One instance of the fleet; an empty message if it is not there."""
        found = [one for one in (await self.fleet()).instances if one.instance_id == instance_id]
        return found[0] if found else pb.FleetInstance()

    async def sees(self, *instance_ids: str) -> None:
        """Wait until exactly these are in the scheduler's view, each with a load report."""

        async def is_so() -> bool:
            others = [one for one in (await self.fleet()).instances if one.role != "scheduler"]
            return {one.instance_id for one in others if one.HasField("step_time")} == set(instance_ids)

        await eventually(is_so, what=f"seeing {instance_ids}")

    def resident_mib(self) -> float:
        """Memory of the process."""
        status = Path(f"/proc/{self.scheduler.popen.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    def metric(self, name: str) -> float:
        """One number of /metrics."""
        with urllib.request.urlopen(f"http://{self.scheduler.admin}/metrics", timeout=CALL_S) as response:
            found = re.search(rf"^{re.escape(name)} (\S+)$", response.read().decode(), re.MULTILINE)
        assert found is not None, name
        return float(found[1])


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[tuple[NatsServer, ServiceProcess]]:
    nats = NatsServer(tmp_path / "nats")
    nats.start()
    with ExitStack() as stack:
        stack.callback(nats.stop)
        environment = {
            "SHOAL_NATS_URL": nats.url,
            "SHOAL_SCHEDULER_HOMELESS_WAIT_S": "30",
            "SHOAL_SCHEDULER_STALE_S": str(STALE_S),
        }
        scheduler = stack.enter_context(service_process(MODULE, log=tmp_path / "log", environment=environment))
        yield nats, scheduler


@pytest.fixture
async def mesh(processes: tuple[NatsServer, ServiceProcess]) -> AsyncIterator[Mesh]:
    nats, scheduler = processes
    async with grpc.aio.insecure_channel(scheduler.address) as channel:
        made = Mesh(nats, scheduler, channel)
        async with made.stack:
            yield made


async def test_a_refused_request_goes_to_the_other_worker_and_a_drained_one_gets_none(mesh: Mesh) -> None:
    first = mesh.worker("a")
    mesh.worker("b")
    await mesh.sees("a", "b")
    stream = await mesh.stream()
    await stream.submit("r")
    placed = await stream.worker("r")
    await stream.refused("r")
    other = await stream.worker("r", 2)
    assert {placed, other} == {"a", "b"}
    await stream.finished("r")

    first.drain()

    async def drain_is_seen() -> bool:
        return (await mesh.instance("a")).is_draining

    await eventually(drain_is_seen, what="the drain")
    for index in range(4):
        await stream.submit(f"after{index}")
        assert await stream.worker(f"after{index}") == "b"


async def test_service_resumes_when_all_workers_vanish_and_one_appears(mesh: Mesh) -> None:
    gone = [mesh.worker(name) for name in ("a", "b")]
    await mesh.sees("a", "b")
    stream = await mesh.stream()
    await stream.submit("running")
    lost_on = await stream.worker("running")
    await stream.admitted("running")
    for worker in gone:
        await worker.stop()
    await mesh.sees()
    await stream.lost("running", pb.LOST_CAUSE_BROKEN)
    await stream.submit("waiting")
    mesh.worker("c")
    assert await stream.worker("running", 2) == "c"
    assert await stream.worker("waiting") == "c"
    assert lost_on in ("a", "b")


async def test_a_worker_whose_reports_stop_is_passed_by_but_does_not_read_as_full(mesh: Mesh) -> None:
    silent = mesh.worker("silent")
    silent.load = LoadReport(running=4, free_blocks=0, total_blocks=100, free_slots=0, total_slots=4)
    mesh.worker("b")
    await mesh.sees("silent", "b")

    async def is_full() -> bool:
        return (await mesh.instance("silent")).running_count == 4

    async def is_old() -> bool:
        return (await mesh.instance("silent")).seen_age.ToMilliseconds() > 1000 * (STALE_S + 0.5)

    await eventually(is_full, what="the report of a full worker")
    await silent.fall_silent()
    await eventually(is_old, what="the age of the report")
    stream = await mesh.stream()
    for index in range(4):
        await stream.submit(f"r{index}")
        assert await stream.worker(f"r{index}") == "b"
    await stream.submit("r4")
    assert await stream.worker("r4") == "silent"


async def test_after_a_restart_of_nats_new_workers_are_found_and_old_ones_kept(mesh: Mesh) -> None:
    mesh.worker("a")
    await mesh.sees("a")
    stream = await mesh.stream()
    mesh.nats.stop()

    async def view_ages() -> bool:
        return (await mesh.fleet()).view_age.ToMilliseconds() > 4000

    await eventually(view_ages, what="the age of the view")
    await stream.submit("meanwhile")
    assert await stream.worker("meanwhile") == "a"
    mesh.nats.start()
    mesh.worker("b")
    await mesh.sees("a", "b")
    assert (await mesh.fleet()).view_age.ToMilliseconds() == 0


async def test_unknown_models_and_requests_too_large_are_denied_for_good(mesh: Mesh) -> None:
    mesh.worker("a")
    await mesh.sees("a")
    stream = await mesh.stream()
    await stream.submit("unknown", model="other")
    await stream.submit("large", model="tiny", prompt_tokens=100 * 128 + 1)
    for name, reason in (("unknown", "UNKNOWN_MODEL"), ("large", "EXCEEDS_CAPACITY")):
        verdict = await stream.verdict(name)
        assert verdict.denied.reason == reason
        assert not verdict.denied.HasField("retry_after")


async def test_books_of_a_broken_stream_are_dropped_and_the_process_stays_small(mesh: Mesh) -> None:
    worker = mesh.worker("a", capacity={"blocks": 100_000, "slots": 2000, "max_context": 8192})
    worker.load = LoadReport(free_blocks=100_000, total_blocks=100_000, free_slots=2000, total_slots=2000)
    await mesh.sees("a")
    stream = await mesh.stream("short-lived")
    for index in range(500):
        await stream.submit(f"r{index}")
    assert await stream.worker("r0") == "a"
    await until(lambda: mesh.metric("shoal_scheduler_placed_requests") == 500, what="the books' filling")
    await stream.close()
    await until(lambda: mesh.metric("shoal_scheduler_placed_requests") == 0, timeout_s=15, what="the books' end")
    assert mesh.resident_mib() <= MAX_RESIDENT_MIB


class KvNode:
    """A KV cache node as far as the scheduler can tell: a list, and a count of how often it was asked for."""

    def __init__(self, instance_id: str) -> None:
        self.instance_id = instance_id
        self.number = 0
        self.blocks: list[bytes] = []
        self.list_count = 0

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """The one method that a scheduler calls."""
        method = grpc.unary_stream_rpc_method_handler(
            self.list_held,
            request_deserializer=kv_pb.ListHeldRequest.FromString,
            response_serializer=kv_pb.ListHeldResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler("shoal.kv_cache.v1.KvCacheService", {"ListHeld": method})

    async def list_held(self, request: kv_pb.ListHeldRequest, context: Any) -> AsyncIterator[kv_pb.ListHeldResponse]:
        """As the real node answers."""
        self.list_count += 1
        header = kv_pb.HeldHeader(instance_id=self.instance_id, sequence_number=self.number)
        yield kv_pb.ListHeldResponse(header=header)
        page = kv_pb.HeldPage(block_hashes=self.blocks, snapshot_hashes=self.blocks)
        yield kv_pb.ListHeldResponse(page=page)


async def test_the_index_is_whole_again_after_a_lost_event_and_after_a_restart_of_nats(mesh: Mesh) -> None:
    node = KvNode("kv-1")
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((node.handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    mesh.stack.push_async_callback(server.stop, 0)
    mesh.worker("kv-1", "kv_cache", address=f"127.0.0.1:{port}")
    mesh.worker("a")
    bus = Bus(mesh.nats.url, name="node")
    await bus.start()
    mesh.stack.push_async_callback(bus.close)
    assert await bus.wait_connected(10)
    await mesh.sees("kv-1", "a")
    await until(lambda: node.list_count == 1, what="the first list")
    stream = await mesh.stream()
    chain = [bytes([index]) * 32 for index in range(1, 5)]
    asked = 0

    async def expected_hit() -> int:
        nonlocal asked
        asked += 1
        hashes = pb.HashChain(kv_id="kv", numerics_id="n1", block_hashes=chain)
        await stream.submit(f"r{asked}", prompt_tokens=1000, chains=[hashes])
        placement = (await stream.verdict(f"r{asked}")).placement
        await stream.finished(f"r{asked}")
        return placement.expected_hit_tokens

    async def store(block: bytes, *, is_published: bool) -> None:
        node.number += 1
        node.blocks.append(block)
        event = events_pb2.KvEvent(
            instance_id="kv-1", sequence_number=node.number, stored_blocks=[block], stored_snapshots=[block]
        )
        if is_published:
            assert await bus.publish(subjects.kv_events("local", "kv-1"), event.SerializeToString())

    async def hits(tokens: int) -> None:
        async def is_so() -> bool:
            return await expected_hit() == tokens

        await eventually(is_so, what=f"a hit of {tokens} tokens")

    await store(chain[0], is_published=True)
    await hits(128)
    assert node.list_count == 1
    await store(chain[1], is_published=False)
    await store(chain[2], is_published=True)
    await hits(384)
    assert node.list_count == 2

    mesh.nats.stop()
    await store(chain[3], is_published=False)
    mesh.nats.start()
    await hits(512)


async def test_a_scheduler_told_to_stop_sends_its_gateways_away_and_exits(mesh: Mesh) -> None:
    mesh.worker("a")
    await mesh.sees("a")
    stream = await mesh.stream()
    await stream.submit("r")
    assert await stream.worker("r") == "a"
    mesh.scheduler.popen.send_signal(signal.SIGTERM)
    await until(lambda: stream.ended_by == "DRAINING", what="the end of the stream")
    assert await asyncio.to_thread(mesh.scheduler.popen.wait, 10) == 0


async def test_without_nats_the_process_lives_and_joins_when_it_comes(tmp_path: Path) -> None:
    nats = NatsServer(tmp_path / "nats")
    with service_process(MODULE, log=tmp_path / "log", environment={"SHOAL_NATS_URL": nats.url}) as scheduler:
        assert _ready_status(scheduler) == 503
        nats.start()
        try:
            await until(lambda: _ready_status(scheduler) == 200, what="readiness")
        finally:
            nats.stop()
        assert _ready_status(scheduler) == 200


def _ready_status(scheduler: ServiceProcess) -> int:
    try:
        with urllib.request.urlopen(f"http://{scheduler.admin}/readyz", timeout=CALL_S) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
