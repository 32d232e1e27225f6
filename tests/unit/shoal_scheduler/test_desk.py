"""What the desk does when no message comes."""

from __future__ import annotations

import asyncio
import time

from shoal.scheduler.v1 import scheduler_service_pb2 as pb
from shoal_common.telemetry import Metrics
from shoal_scheduler.desk import Desk, Outbox
from shoal_scheduler.metrics import SchedulerMetrics
from support.scheduler_world import World, presence, spec

TIMEOUT_S = 20.0


async def test_a_request_that_a_worker_refused_is_placed_again_without_a_message_or_a_tick() -> None:
    world = World(refusal_hold_s=0.1, refusal_backoff_s=0.05)
    # Nobody lets the desk's own time pass: only what it looks at again can place the request.
    desk = Desk(world.core, SchedulerMetrics(Metrics(), world.core), max_streams=1, max_outbox=10)
    outbox = desk.open_stream("g")
    world.now_s = time.monotonic()
    desk.act(lambda scheduler, now_s: scheduler.instance_up(presence("a"), now_s))
    desk.act(
        lambda scheduler, now_s: scheduler.submit(
            outbox.stream_id, "r", spec(), waited_s=0.0, remaining_s=60.0, now_s=now_s
        )
    )
    async with asyncio.timeout(TIMEOUT_S):
        await placement(outbox)
        desk.act(lambda scheduler, now_s: scheduler.refused("r", 1, "OUT_OF_BLOCKS", now_s))
        assert (await placement(outbox)).decode.instance_id == "a"


async def placement(outbox: Outbox) -> pb.Placement:
    """The next one, whatever else is said before it."""
    while True:
        answer = await outbox.get()
        assert answer is not None
        if answer.HasField("placement"):
            return answer.placement
