"""The bus against a real nats-server, restarts included."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from shoal_common.bus import Bus, Message
from shoal_common.errors import DeadlineExceeded, Unavailable
from support.nats_server import NatsServer
from support.waiting import until


@asynccontextmanager
async def connected(server: NatsServer) -> AsyncIterator[Bus]:
    bus = Bus(server.url, name="test")
    await bus.start()
    try:
        assert await bus.wait_connected(10)
        yield bus
    finally:
        await bus.close()


class Inbox:
    def __init__(self) -> None:
        self.payloads: list[bytes] = []

    async def __call__(self, message: Message) -> None:
        self.payloads.append(message.payload)


async def test_a_message_reaches_every_subscriber_of_its_subject(nats_server: NatsServer) -> None:
    inbox = Inbox()
    async with connected(nats_server) as sender, connected(nats_server) as reader:
        await reader.subscribe("shoal.t.>", inbox)
        assert await reader.ping(timeout_s=5)
        assert await sender.publish("shoal.t.a", b"1")
        await until(lambda: inbox.payloads == [b"1"])


async def test_events_flow_again_after_the_server_was_restarted(nats_server: NatsServer) -> None:
    inbox, connects = Inbox(), []

    async def count() -> None:
        connects.append(1)

    async with connected(nats_server) as bus:
        bus.on_connect(count)
        await bus.subscribe("shoal.t.a", inbox)
        nats_server.stop()
        await until(lambda: not bus.is_connected)
        assert not await bus.publish("shoal.t.a", b"lost")
        assert bus.has_connected
        nats_server.start()
        await until(lambda: bus.is_connected and len(connects) == 1)
        assert await bus.ping(timeout_s=5)
        assert await bus.publish("shoal.t.a", b"after")
        await until(lambda: bool(inbox.payloads))
    assert inbox.payloads == [b"after"]
    assert bus.counters.dropped == 1


async def test_a_server_that_stood_still_is_heard_again_at_once(nats_server: NatsServer) -> None:
    inbox = Inbox()
    async with connected(nats_server) as bus:
        await bus.subscribe("shoal.t.a", inbox)
        assert await bus.ping(timeout_s=5)
        nats_server.signal(signal.SIGSTOP)
        while await bus.ping(timeout_s=0.1):
            pass  # the threads of the server do not stop all at once
        assert not await bus.ping(timeout_s=0.1)
        nats_server.signal(signal.SIGCONT)
        assert await bus.ping(timeout_s=5)
        assert await bus.publish("shoal.t.a", b"after")
        await until(lambda: bool(inbox.payloads))
        assert bus.counters.connects == 1


async def test_a_bus_connects_when_its_server_comes_late(nats_server: NatsServer) -> None:
    nats_server.stop()
    inbox = Inbox()
    bus = Bus(nats_server.url, name="test")
    await bus.start()
    await bus.subscribe("shoal.t.a", inbox)
    assert not bus.has_connected
    nats_server.start()
    assert await bus.wait_connected(10)
    assert await bus.ping(timeout_s=5)
    await bus.publish("shoal.t.a", b"1")
    await until(lambda: inbox.payloads == [b"1"])
    await bus.close()


async def test_closing_a_bus_that_never_connected_ends_its_tries(nats_server: NatsServer) -> None:
    nats_server.stop()
    before = asyncio.all_tasks()
    bus = Bus(nats_server.url, name="test")
    await bus.start()
    await bus.close()
    await until(lambda: asyncio.all_tasks() <= before)


async def test_a_request_is_answered_by_the_subscriber(nats_server: NatsServer) -> None:
    async def twice(message: Message) -> None:
        await message.respond(message.payload * 2)

    async with connected(nats_server) as bus:
        await bus.subscribe("shoal.t.q", twice)
        assert await bus.request("shoal.t.q", b"ab", timeout_s=5) == b"abab"


async def test_a_request_to_nobody_is_unavailable_and_one_to_a_mute_exceeds_its_deadline(
    nats_server: NatsServer,
) -> None:
    async with connected(nats_server) as bus:
        with pytest.raises(Unavailable):
            await bus.request("shoal.t.nobody", b"", timeout_s=5)
        await bus.subscribe("shoal.t.mute", Inbox())
        with pytest.raises(DeadlineExceeded):
            await bus.request("shoal.t.mute", b"", timeout_s=0.1)


async def test_a_failing_handler_is_counted_and_the_next_message_still_comes(nats_server: NatsServer) -> None:
    seen: list[bytes] = []

    async def fail_first(message: Message) -> None:
        seen.append(message.payload)
        if len(seen) == 1:
            raise RuntimeError("no")

    async with connected(nats_server) as bus:
        await bus.subscribe("shoal.t.a", fail_first)
        await bus.publish("shoal.t.a", b"1")
        await bus.publish("shoal.t.a", b"2")
        await until(lambda: seen == [b"1", b"2"])
        assert bus.counters.handler_errors == 1


async def test_messages_beyond_the_bound_of_a_stuck_consumer_are_dropped_and_counted(nats_server: NatsServer) -> None:
    stuck = asyncio.Event()

    async def wait(message: Message) -> None:
        await stuck.wait()

    async with connected(nats_server) as reader, connected(nats_server) as sender:
        await reader.subscribe("shoal.t.a", wait)
        await reader.ping(timeout_s=5)
        for _ in range(5000):
            await sender.publish("shoal.t.a", b"x")
        await sender.ping(timeout_s=5)
        await until(lambda: reader.counters.slow_consumer > 0)
        stuck.set()


async def test_a_bus_that_is_off_is_ready_delivers_nothing_and_refuses_requests() -> None:
    bus = Bus.off()
    await bus.start()
    assert bus.has_connected
    assert not await bus.publish("shoal.t.a", b"1")
    with pytest.raises(Unavailable):
        await bus.request("shoal.t.a", b"", timeout_s=1)
    await bus.close()
