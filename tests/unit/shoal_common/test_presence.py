"""The pure table of a reader, and announcer and watcher against a real nats-server."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal_common import subjects
from shoal_common.announcer import Announcer
from shoal_common.bus import Bus, Message
from shoal_common.load import LoadReport, LoadTable, NumberedLoad
from shoal_common.presence import LAPSE_S, Presence, PresenceTable
from shoal_common.presence_bucket import PresenceBucket
from shoal_common.process import new_instance_id
from shoal_common.watcher import Watcher
from support.nats_server import NatsServer
from support.waiting import until


def worker(instance_id: str = "decode_worker-1") -> Presence:
    return Presence(instance_id=instance_id, role="decode_worker", address="127.0.0.1:1", capacity={"blocks": 8})


@asynccontextmanager
async def watching(server: NatsServer) -> AsyncIterator[tuple[Watcher, Bus, list[str]]]:
    downs: list[str] = []
    bus = Bus(server.url, name="reader")
    await bus.start()
    watcher = Watcher(bus, mesh="t", on_down=downs.append, has_loads=True)
    await watcher.start()
    try:
        yield watcher, bus, downs
    finally:
        await watcher.stop()
        await bus.close()


class Way:
    """A way to a server that can be cut: who was connected has to connect anew."""

    def __init__(self, port: int) -> None:
        self._to_port = port
        self._writers: list[asyncio.StreamWriter] = []
        self.url = ""

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._to_port)
        self._writers += [writer, back]
        await asyncio.gather(pump(reader, back), pump(there, writer))

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
    writer.close()


@asynccontextmanager
async def way_to(server: NatsServer) -> AsyncIterator[Way]:
    way = Way(server.port)
    async with await asyncio.start_server(way.connected, "127.0.0.1", 0) as listener:
        way.url = f"nats://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        yield way
        way.cut()


@asynccontextmanager
async def announcing(url: str, load: LoadReport | None = None) -> AsyncIterator[Announcer]:
    announcer = Announcer(
        nats_url=url,
        mesh="t",
        presence=worker(new_instance_id("decode_worker")),
        sample_load=None if load is None else lambda: load,
    )
    announcer.start()
    try:
        yield announcer
    finally:
        await asyncio.to_thread(announcer.stop)


def test_a_presence_survives_its_encoding_and_ignores_fields_it_does_not_know() -> None:
    raw = worker().to_json()
    assert Presence.from_json(raw) == worker()
    assert Presence.from_json(raw[:-1] + b', "newer": 1}') == worker()


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"instance_id": 1, "role": "r", "address": "a"}', b"\xff"])
def test_what_is_no_presence_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - json's own and ours alike
        Presence.from_json(raw)


def test_an_entry_lapses_only_after_three_seconds_in_touch() -> None:
    table = PresenceTable()
    table.seen(worker(), now_s=100.0)
    assert table.in_touch(100.5) == []
    assert table.in_touch(103.4) == []
    assert table.in_touch(103.6) == ["decode_worker-1"]


def test_nothing_lapses_while_the_reader_is_cut_off_nor_right_after() -> None:
    table = PresenceTable()
    table.seen(worker(), now_s=100.0)
    table.in_touch(100.0)
    table.cut()
    assert table.in_touch(200.0) == []
    assert len(table) == 1
    assert table.in_touch(200.0 + LAPSE_S + 0.1) == ["decode_worker-1"]


@given(st.lists(st.tuples(st.sampled_from(["seen", "cut", "touch"]), st.floats(0.01, 5.0)), max_size=40))
def test_an_entry_never_lapses_within_three_seconds_of_being_seen(steps: list[tuple[str, float]]) -> None:
    table, now_s, seen_at_s = PresenceTable(), 0.0, float("-inf")
    for action, elapsed_s in steps:
        now_s += elapsed_s
        if action == "seen":
            table.seen(worker(), now_s)
            seen_at_s = now_s
        elif action == "cut":
            table.cut()
        elif table.in_touch(now_s):
            assert now_s - seen_at_s > LAPSE_S


def test_an_older_load_report_does_not_replace_a_newer_one() -> None:
    table = LoadTable()

    def report(number: int, running: int) -> NumberedLoad:
        numbered = NumberedLoad(role="r", instance_id="i", sequence_number=number, report=LoadReport(running=running))
        return NumberedLoad.from_json(numbered.to_json())

    assert table.take(report(2, running=5))
    assert not table.take(report(1, running=9))
    assert table.get("i") == LoadReport(running=5)


def test_no_two_process_starts_share_an_instance_id() -> None:
    assert len({new_instance_id("gateway") for _ in range(100)}) == 100


async def test_an_instance_appears_with_its_load_changes_and_says_goodbye(nats_server: NatsServer) -> None:
    async with watching(nats_server) as (watcher, _, downs):
        async with announcing(nats_server.url, LoadReport(running=3)) as announcer:
            me = announcer.presence.instance_id
            await until(lambda: watcher.get(me) == announcer.presence)
            await until(lambda: watcher.load(me) == LoadReport(running=3))
            announcer.update(is_draining=True)
            await until(lambda: (found := watcher.get(me)) is not None and found.is_draining)
        await until(lambda: downs == [me])
        assert watcher.snapshot() == ()


async def test_a_late_reader_sees_the_fleet_from_the_bucket_before_any_heartbeat(nats_server: NatsServer) -> None:
    bus = Bus(nats_server.url, name="writer")
    await bus.start()
    assert await bus.wait_connected(10)
    await PresenceBucket(bus, "t").put("decode_worker-1", worker().to_json())
    async with watching(nats_server) as (late, _, _):
        await until(lambda: late.get("decode_worker-1") == worker())
    await bus.close()


async def test_after_a_restart_of_nats_instances_are_announced_again_and_none_was_given_up(
    nats_server: NatsServer,
) -> None:
    async with announcing(nats_server.url) as announcer, watching(nats_server) as (watcher, bus, downs):
        me = announcer.presence.instance_id
        await until(lambda: watcher.get(me) is not None)
        nats_server.stop()
        await until(lambda: not bus.is_connected)
        nats_server.start()
        await until(lambda: bus.is_connected)
        async with watching(nats_server) as (fresh, _, _):
            await until(lambda: fresh.get(me) is not None)
        assert downs == []
        assert watcher.get(me) is not None


async def test_after_a_new_connection_presence_is_said_before_load(nats_server: NatsServer) -> None:
    said: list[str] = []

    async def listen(message: Message) -> None:
        if "decode_worker" in message.subject:
            said.append(message.subject)

    bus = Bus(nats_server.url, name="reader")
    await bus.start()
    assert await bus.wait_connected(10)
    # One subscription, so that what comes keeps its order.
    await bus.subscribe(">", listen)
    async with way_to(nats_server) as way, announcing(way.url, LoadReport(running=3)) as announcer:
        me = announcer.presence.instance_id
        presence, load = f"$KV.{subjects.presence_bucket('t')}.{me}", subjects.load("t", "decode_worker", me)
        # From the second beat on readers know it, and load goes first.
        await until(lambda: said[:2] == [presence, load] and said[-2:] == [load, presence])
        way.cut()
        assert await bus.ping(timeout_s=5)
        said.clear()
        # A reader that came meanwhile takes no load of one that it does not know.
        await until(lambda: len(said) >= 2)
        assert said[:2] == [presence, load]
    await bus.close()


@pytest.mark.long
async def test_a_silent_nats_makes_nobody_lapse(nats_server: NatsServer) -> None:
    async with watching(nats_server) as (watcher, _, downs), announcing(nats_server.url) as announcer:
        await until(lambda: watcher.get(announcer.presence.instance_id) is not None)
        nats_server.signal(signal.SIGSTOP)
        frozen_until = time.monotonic() + 2 * LAPSE_S
        await until(lambda: time.monotonic() > frozen_until)
        assert downs == []
        nats_server.signal(signal.SIGCONT)


@pytest.mark.long
async def test_an_instance_that_falls_silent_lapses_for_readers_and_in_the_bucket(nats_server: NatsServer) -> None:
    async with watching(nats_server) as (watcher, bus, downs):
        assert await bus.wait_connected(5)
        bucket = PresenceBucket(bus, "t")
        await bucket.put("decode_worker-1", worker().to_json())
        await until(lambda: watcher.get("decode_worker-1") is not None)
        await until(lambda: downs == ["decode_worker-1"])
        assert await bucket.read_all() == {}
