"""The servicer behind a real server and stub, around a core with a settled fleet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from shoal.scheduler.v1 import scheduler_service_pb2 as pb
from shoal.scheduler.v1 import scheduler_service_pb2_grpc as pb_grpc
from shoal_common.errors import MeshError
from shoal_common.rpc import Readiness, RpcServer, Service, from_rpc_error
from shoal_common.telemetry import Metrics
from shoal_scheduler.desk import Desk
from shoal_scheduler.metrics import SchedulerMetrics
from shoal_scheduler.servicer import SchedulerServicer
from support.scheduler_world import EMPTY, MODEL, World, books, spec
from support.seldom import seldom
from support.waiting import until

TIMEOUT_S = 20.0


@dataclass
class Served:
    """A served core and a stub to call it."""

    world: World
    desk: Desk
    stub: Any
    metrics: Metrics
    servicer: SchedulerServicer


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    world = World(stream_grace_s=0.01)
    metrics = Metrics()
    desk = Desk(world.core, SchedulerMetrics(metrics, world.core), max_streams=3, max_outbox=100)
    servicer = SchedulerServicer(desk, world.core, default_remaining_s=60, view_age_s=lambda now_s: 1.5)
    service = Service("shoal.scheduler.v1.SchedulerService", pb_grpc.add_SchedulerServiceServicer_to_server, servicer)
    server = RpcServer([service], listen_address="127.0.0.1:0", readiness=Readiness(), metrics=metrics)
    address = await server.start()
    running = asyncio.create_task(desk.run())
    async with grpc.aio.insecure_channel(address) as channel:
        yield Served(world, desk, pb_grpc.SchedulerServiceStub(channel), metrics, servicer)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await server.stop(0)


def submit(request_id: str, **fields: Any) -> pb.ReserveRequest:
    values = {"prompt_tokens": 100, "max_tokens": 10, "choice_count": 1, "model": MODEL, **fields}
    return pb.ReserveRequest(request_id=request_id, submit=pb.Submit(**values))


async def opened(stub: Any, gateway_id: str = "g") -> Any:
    call = stub.Reserve(timeout=TIMEOUT_S)
    await call.write(pb.ReserveRequest(opened=pb.Opened(gateway_id=gateway_id)))
    return call


async def test_a_request_is_placed_and_followed_to_its_end(served: Served) -> None:
    worker = served.world.up("a")
    call = await opened(served.stub)
    await call.write(submit("r"))
    answer = await call.read()
    assert (answer.request_id, answer.placement.decode.instance_id) == ("r", "a")
    assert (answer.placement.decode.address, answer.placement.numerics_id) == ("a:1", "n1")
    await call.write(pb.ReserveRequest(request_id="r", admitted=pb.Admitted(attempt=1)))
    await call.write(pb.ReserveRequest(request_id="r", finished=pb.Finished()))
    await until(lambda: len(worker.bookings) == 0 and len(served.world.core.leases) == 0)


async def test_the_first_message_must_name_the_gateway(served: Served) -> None:
    call = served.stub.Reserve(timeout=TIMEOUT_S)
    await call.write(submit("r"))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call.read()
    assert from_rpc_error(raised.value).code == "INVALID_ARGUMENT"


async def test_more_gateways_than_allowed_are_refused(served: Served) -> None:
    calls = [await opened(served.stub, f"g{index}") for index in range(3)]
    await until(lambda: len(served.desk._outboxes) == 3)
    extra = await opened(served.stub, "one too many")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await extra.read()
    assert from_rpc_error(raised.value).reason == "TOO_MANY_STREAMS"
    for call in calls:
        call.cancel()


async def test_a_replica_that_leaves_sends_its_gateways_away(served: Served) -> None:
    call = await opened(served.stub)
    await until(lambda: len(served.desk._outboxes) == 1)
    served.servicer.close()
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call.read()
    assert from_rpc_error(raised.value).reason == "DRAINING"
    await until(lambda: not served.desk._outboxes)


async def test_a_malformed_hash_chain_costs_the_hit_and_nothing_else(served: Served) -> None:
    served.world.up("a")
    call = await opened(served.stub)
    chain = pb.HashChain(kv_id="kv", numerics_id="n1", block_hashes=[b"short"])
    await call.write(submit("r", chains=[chain]))
    assert (await call.read()).placement.decode.instance_id == "a"
    call.cancel()


@pytest.mark.parametrize("count", [100, *seldom(1000)])
async def test_after_many_aborted_streams_nothing_is_counted_any_more(served: Served, count: int) -> None:
    worker = served.world.up("a", capacity={"blocks": 10**6, "slots": 10, "max_context": 8192})
    prefill = served.world.prefill_up("p")

    async def abort_streams(lane: int) -> None:
        for index in range(count // 2):
            call = await opened(served.stub, f"g{lane}")
            for part in range(8):
                await call.write(submit(f"r{lane}.{index}.{part}", prompt_tokens=2000))
            if index % 2:
                await call.read()
            call.cancel()

    await asyncio.gather(abort_streams(0), abort_streams(1))
    core = served.world.core
    await until(lambda: not core.leases and not len(core.queue), what="forgetting the aborted streams")
    assert (books(worker), books(prefill)) == (EMPTY, EMPTY)
    assert not served.desk._outboxes
    assert core.fleet.in_flight() == {}
    call = await opened(served.stub)
    await call.write(submit("after"))
    assert (await call.read()).placement.decode.instance_id == "a"
    call.cancel()


async def test_a_gateway_that_does_not_read_costs_a_constant_and_its_stream(served: Served) -> None:
    outbox = served.desk.open_stream("g")
    for index in range(1000):
        served.desk.act(
            lambda scheduler, now_s, name=f"r{index}": scheduler.submit(  # type: ignore[misc]
                outbox.stream_id, name, spec(), waited_s=0, remaining_s=60, now_s=now_s
            )
        )
    core = served.world.core
    await until(lambda: not core.leases, what="forgetting the stream")
    assert not served.desk._outboxes
    with pytest.raises(MeshError) as raised:
        await outbox.get()
    assert raised.value.reason == "SLOW_READER"


async def test_the_fleet_is_shown_with_its_load(served: Served) -> None:
    served.world.now_s = asyncio.get_running_loop().time()
    served.world.up("a")
    served.world.report("a", running=2, free_slots=2, step_time_us=1500)
    fleet = await served.stub.GetFleet(pb.GetFleetRequest(), timeout=TIMEOUT_S)
    shown = fleet.instances[0]
    assert (shown.instance_id, shown.role, shown.model) == ("a", "decode_worker", MODEL)
    assert (shown.running_count, shown.free_slot_count, shown.block_count) == (2, 2, 1000)
    assert shown.step_time.ToMicroseconds() == 1500
    assert fleet.view_age.ToMilliseconds() == 1500


async def test_metrics_follow_what_happens(served: Served) -> None:
    served.world.up("a")
    call = await opened(served.stub)
    await call.write(submit("r"))
    await call.write(submit("unknown", model="other"))
    await call.read()
    await call.read()
    denied = b'shoal_scheduler_denials_total{reason="UNKNOWN_MODEL"} 1.0'
    await until(lambda: denied in served.metrics.render())
    shown = served.metrics.render().decode()
    assert "shoal_scheduler_placements_total 1.0" in shown
    assert "shoal_scheduler_prompt_tokens_total 100.0" in shown
    assert "shoal_scheduler_placed_requests 1.0" in shown
    call.cancel()


async def test_messages_of_a_batch_are_taken_in_order_as_if_each_came_by_itself(served: Served) -> None:
    served.world.up("a")
    call = await opened(served.stub)
    ended = pb.ReserveRequest(request_id="r", finished=pb.Finished())
    await call.write(pb.ReserveRequest(batch=pb.Batch(requests=[submit("r"), ended, submit("s")])))
    assert [(await call.read()).request_id for _ in range(2)] == ["r", "s"]
    leases = served.world.core.leases
    await until(lambda: leases.get("r") is None and leases.get("s") is not None)
