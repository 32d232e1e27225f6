"""Scheduler replicas come and go; requests keep exactly one of them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest
from shoal.scheduler.v1 import scheduler_service_pb2 as pb
from shoal_common.rpc import Channels
from shoal_gateway.reserve_client import ReserveClient
from support.fake_scheduler import FakeScheduler, placed, serving
from support.waiting import until


class Request:
    """Waits for a placement, or runs."""

    def __init__(self, request_id: str, *, waits: bool = True) -> None:
        self.request_id, self.waits, self.has_output = request_id, waits, False
        self.placements: list[pb.Placement] = []
        self.positions: list[int] = []
        self.denials: list[tuple[str, float | None]] = []

    def introduction(self) -> pb.ReserveRequest:
        if self.waits:
            return pb.ReserveRequest(request_id=self.request_id, submit=pb.Submit(prompt_tokens=1))
        return pb.ReserveRequest(request_id=self.request_id, adopt=pb.Adopt(attempt=1, worker_id="w"))

    def on_queued(self, position: int) -> None:
        self.positions.append(position)

    def on_placement(self, placement: pb.Placement) -> None:
        self.placements.append(placement)
        self.waits = False

    def on_denied(self, reason: str, retry_after_s: float | None) -> None:
        self.denials.append((reason, retry_after_s))


def places(request_id: str, message: pb.ReserveRequest) -> pb.ReserveResponse:
    return placed(request_id, "w", "127.0.0.1:1")


def says_nothing(request_id: str, message: pb.ReserveRequest) -> None:
    return None


@pytest.fixture
async def client() -> AsyncIterator[ReserveClient]:
    channels = Channels()
    made = ReserveClient(gateway_id="g", channels=channels)
    made.start()
    yield made
    await made.close()
    await channels.close()


async def test_a_request_waits_for_the_first_replica_and_is_placed(client: ReserveClient) -> None:
    request = Request("r")
    client.submit(request)
    assert not client.is_connected
    scheduler = FakeScheduler(places)
    async with serving(scheduler) as address:
        client.announced("s", address)
        await until(lambda: bool(request.placements))
        assert scheduler.heard[0].opened.gateway_id == "g"
        assert len(scheduler.told("submit")) == 1


async def test_when_a_replica_dies_what_waits_is_submitted_and_what_runs_adopted_elsewhere(
    client: ReserveClient,
) -> None:
    first, second = FakeScheduler(says_nothing), FakeScheduler(says_nothing)
    waiting, running = Request("waits"), Request("runs", waits=False)
    async with contextlib.AsyncExitStack() as stack:
        second_address = await stack.enter_async_context(serving(second))
        async with serving(first) as address:
            client.announced("first", address)
            client.submit(waiting)
            client.submit(running)
            await until(lambda: len(first.heard) == 3)
            client.announced("second", second_address)
            await until(lambda: bool(second.heard))
        await until(lambda: len(second.heard) == 3)
    assert [one.request_id for one in second.told("submit")] == ["waits"]
    assert [one.request_id for one in second.told("adopt")] == ["runs"]


async def test_a_replica_that_says_nothing_is_passed_over(client: ReserveClient) -> None:
    dumb, good = FakeScheduler(says_nothing), FakeScheduler(places)
    async with serving(dumb) as dumb_address, serving(good) as good_address:
        client.announced("dumb", dumb_address)
        await until(lambda: client.is_connected)
        request = Request("r")
        client.submit(request)
        client.announced("good", good_address)
        await until(lambda: bool(request.placements), timeout_s=8)
        await until(lambda: bool(dumb.told("cancelled")))


async def test_the_last_word_goes_to_the_replica_with_the_books_and_nothing_crosses_it(client: ReserveClient) -> None:
    scheduler = FakeScheduler(places)
    async with serving(scheduler) as address:
        client.announced("s", address)
        request = Request("r")
        client.submit(request)
        await until(lambda: bool(request.placements))
        last_word = pb.ReserveRequest(request_id="r", finished=pb.Finished())
        client.forget("r", last_word)
        client.forget("r", last_word)
        client.tell(pb.ReserveRequest(request_id="r", lost=pb.Lost(attempt=1)))
        await until(lambda: bool(scheduler.told("finished")))
        assert len(scheduler.told("finished")) == 1
        assert not scheduler.told("lost")


async def test_a_denial_says_when_to_come_back(client: ReserveClient) -> None:
    def deny(request_id: str, message: pb.ReserveRequest) -> pb.ReserveResponse:
        denied = pb.Denied(reason="QUEUE_FULL")
        denied.retry_after.FromMilliseconds(2500)
        return pb.ReserveResponse(request_id=request_id, denied=denied)

    async with serving(FakeScheduler(deny)) as address:
        client.announced("s", address)
        request = Request("r")
        client.submit(request)
        await until(lambda: bool(request.denials))
        assert request.denials == [("QUEUE_FULL", 2.5)]


async def test_a_replica_that_lapsed_is_closed_once_it_is_down(client: ReserveClient) -> None:
    scheduler = FakeScheduler(says_nothing)
    async with serving(scheduler) as address:
        client.announced("s", address)
        await until(lambda: client.is_connected)
        client.lapsed("s")
        assert client.is_connected, "a stream that works is used on"
    await until(lambda: not client.is_connected)
    assert not client._replicas


async def test_without_a_scheduler_a_new_request_is_denied_and_one_that_has_begun_waits_on() -> None:
    channels = Channels()
    client = ReserveClient(gateway_id="g", channels=channels, scheduler_wait_s=0.1)
    client.start()
    new, begun = Request("new"), Request("begun")
    begun.has_output = True
    client.submit(new)
    client.submit(begun)
    await until(lambda: bool(new.denials))
    assert new.denials[0] == ("NO_SCHEDULER", 0.1)
    assert begun.denials == []
    await client.close()
    await channels.close()


async def test_what_can_wait_leaves_with_the_next_question_and_in_order(client: ReserveClient) -> None:
    scheduler = FakeScheduler(places)
    first, second = Request("first"), Request("second")
    async with serving(scheduler) as address:
        client.announced("s", address)
        client.submit(first)
        await until(lambda: bool(first.placements))
        client.tell(pb.ReserveRequest(request_id="first", admitted=pb.Admitted(attempt=1)), can_wait=True)
        client.forget("first", pb.ReserveRequest(request_id="first", finished=pb.Finished()))
        client.submit(second)
        await until(lambda: bool(second.placements))
    said = [(one.request_id, one.WhichOneof("message")) for one in scheduler.heard[2:]]
    assert said == [("first", "admitted"), ("first", "finished"), ("second", "submit")]
    assert scheduler.message_count == 3


async def test_what_can_wait_leaves_by_itself_when_nothing_else_does(client: ReserveClient) -> None:
    scheduler = FakeScheduler(places)
    request = Request("r")
    async with serving(scheduler) as address:
        client.announced("s", address)
        client.submit(request)
        await until(lambda: bool(request.placements))
        client.forget("r", pb.ReserveRequest(request_id="r", finished=pb.Finished()))
        await until(lambda: bool(scheduler.told("finished")))


async def test_whoever_asks_is_told_when_the_last_replica_goes_and_the_first_comes() -> None:
    told: list[bool] = []
    channels = Channels()
    client = ReserveClient(gateway_id="g", channels=channels, on_change=told.append)
    try:
        async with serving(FakeScheduler(says_nothing)) as address:
            client.announced("s", address)
            await until(lambda: told == [True])
        await until(lambda: told[-1:] == [False])
        assert not client.is_connected
    finally:
        await client.close()
        await channels.close()


async def test_closing_ends_every_stream_also_of_replicas_that_presence_lists_no_longer() -> None:
    told: list[bool] = []
    channels = Channels()
    client = ReserveClient(gateway_id="g", channels=channels, on_change=told.append)
    async with serving(FakeScheduler(says_nothing)) as first, serving(FakeScheduler(says_nothing)) as second:
        client.announced("a", first)
        client.announced("b", second)
        await until(lambda: told == [True, True])
        client.lapsed("a")
        await client.close()
        assert told[2:] == [True, False]
    await channels.close()
