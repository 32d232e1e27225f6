"""Events: a scheduler that follows them knows exactly what the node holds, however many of them are lost."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from shoal.kv_cache.v1 import events_pb2
from shoal_common.bus import Bus
from shoal_common.presence import Presence
from shoal_kv_cache import events
from shoal_kv_cache.core.changes import Changes
from shoal_kv_cache.core.entries import Key, Kind
from shoal_kv_cache.events import EventStream
from shoal_scheduler.core.event_log import KvChange
from shoal_scheduler.core.kv_view import KvView
from shoal_scheduler.core.requests import short_hash
from support.kv_client import SLAB_BYTES, TestChain, items_of
from support.kv_nodes import ServedNode, open_disk, served_node
from support.waiting import until

TENANTS = [b"t" * 32, b"u" * 32]
CHAINS = [TestChain(f"events {number}", 70) for number in range(6)]


class TappedBus(Bus):
    """Keeps what is published; says no while it is cut."""

    def __init__(self) -> None:
        super().__init__("off", name="tapped")
        self.is_off = False
        self.is_cut = False
        self.sent: list[events_pb2.KvEvent] = []

    async def publish(self, subject: str, payload: bytes) -> bool:
        if self.is_cut:
            return False
        self.sent.append(events_pb2.KvEvent.FromString(payload))
        return True


class Follower:
    """A scheduler's view of one node, fed through a bus that may lose, double and reorder."""

    def __init__(self, one: ServedNode, bus: TappedBus) -> None:
        self._one, self._bus = one, bus
        self.view = KvView(max_entries=100_000, max_waiting_events=8, replay_tokens=140)
        self.view.up(Presence(instance_id="node", role="kv_cache", address="x:1"))
        self.list_count = 0

    def take(self, draw: random.Random | None = None) -> None:
        """What was sent since, as a bad bus delivers it."""
        sent, self._bus.sent = self._bus.sent, []
        if draw is not None:
            sent = [one for one in sent for _ in range(draw.choice([0, 1, 1, 1, 1, 2]))]
            if len(sent) > 1 and draw.random() < 0.3:
                at = draw.randrange(len(sent) - 1)
                sent[at], sent[at + 1] = sent[at + 1], sent[at]
        for event in sent:
            self.view.take(event.instance_id, change_of(event))

    async def list_if_needed(self) -> None:
        if self.view.needing_list():
            self.list_count += 1
            number, blocks, snapshots = await self._one.client.held()
            self.view.listed("node", number, list(map(short_hash, blocks)), list(map(short_hash, snapshots)))

    async def check(self) -> None:
        """The view is what the node says it holds."""
        _, blocks, snapshots = await self._one.client.held()
        assert self.view.index.held("node") == (set(map(short_hash, blocks)), set(map(short_hash, snapshots)))


def change_of(event: events_pb2.KvEvent) -> KvChange:
    return KvChange(
        number=event.sequence_number,
        stored_blocks=list(map(short_hash, event.stored_blocks)),
        removed_blocks=list(map(short_hash, event.removed_blocks)),
        stored_snapshots=list(map(short_hash, event.stored_snapshots)),
        removed_snapshots=list(map(short_hash, event.removed_snapshots)),
        is_cleared=event.cleared,
    )


async def change_something(one: ServedNode, draw: random.Random) -> None:
    """A put, an eviction, a flush, damage, a disk that loses copies: whatever changes what is held."""
    chain = draw.choice(CHAINS)
    tenant = TENANTS[CHAINS.index(chain) % 2]
    what = draw.choice("pppppptdevf")
    store = one.node.store
    if what == "p":
        end = draw.randint(1, 70)
        await one.client.put(items_of(chain, 0, end, [end - 1]), tenant=tenant)
    elif what == "t":
        await one.client.flush(tenant_tag=tenant)
    elif what == "f" and draw.random() < 0.5:
        await one.client.flush(everything=True)
    elif what == "e":
        changes = Changes()
        store.index.evict_ram(draw.randint(1, 40) * SLAB_BYTES, changes)
        if draw.random() < 0.5:
            store.index.evict_ssd(draw.randint(1, 40) * SLAB_BYTES, changes)
        store.settle(changes)
    elif what in "dv":
        page = [held for held in store.index.page(0, 4096)[0] if held.slab is not None]
        for held in draw.sample(page, min(len(page), 2)):
            assert held.slab is not None
            store.ram.arena.write(held.slab, 0, b"damage")
            await one.node.reported(held.entry.group, held.entry.key)


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_a_view_that_follows_events_is_what_the_node_holds_after_every_change(tmp_path: Path, seed: int) -> None:
    draw, bus = random.Random(seed), TappedBus()
    async with served_node(ssd=open_disk(tmp_path), bus=bus, ram_bytes=150 * SLAB_BYTES) as one:
        follower = Follower(one, bus)
        await follower.list_if_needed()
        for _ in range(60):
            await change_something(one, draw)
            await told(one, bus)
            follower.take()
            await follower.check()
        # One list at the start was enough.
        assert follower.list_count == 1


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_a_view_behind_a_bad_bus_is_what_the_node_holds_after_a_list(tmp_path: Path, seed: int) -> None:
    draw, bus = random.Random(seed), TappedBus()
    async with served_node(ssd=open_disk(tmp_path), bus=bus, ram_bytes=150 * SLAB_BYTES) as one:
        follower = Follower(one, bus)
        for _ in range(60):
            await change_something(one, draw)
            await told(one, bus)
            follower.take(draw)
            if draw.random() < 0.3:
                await follower.list_if_needed()
        # The last ones come, as they do when there is something to say again.
        await one.client.put(items_of(TestChain("last", 1), 0, 1))
        await told(one, bus)
        follower.take()
        await follower.list_if_needed()
        await follower.check()


async def told(one: ServedNode, bus: TappedBus) -> None:
    """All events are on the bus."""
    if one.node.events.sequence_number:
        await until(lambda: one.node.events._sent_number == one.node.events.sequence_number, what="events")


async def test_what_empties_the_node_is_one_short_event() -> None:
    bus = TappedBus()
    async with served_node(bus=bus, max_entries=8192, ram_bytes=8 << 20) as one:
        for number in range(8):
            await one.client.put(items_of(TestChain(f"many {number}", 500), 0, 500))
        await told(one, bus)
        bus.sent.clear()
        await one.client.flush(tenant_tag=TENANTS[0])
        await told(one, bus)
        assert [(event.cleared, len(event.removed_blocks)) for event in bus.sent] == [(True, 0)]
        # Nothing was held: nothing to tell.
        await one.client.flush(everything=True)
        assert one.node.events.sequence_number == bus.sent[0].sequence_number


async def test_a_flush_with_something_left_tells_what_went() -> None:
    bus = TappedBus()
    async with served_node(bus=bus) as one:
        await one.client.put(items_of(CHAINS[0], 0, 5))
        await one.client.put(items_of(CHAINS[1], 0, 1), tenant=TENANTS[1])
        await told(one, bus)
        bus.sent.clear()
        await one.client.flush(tenant_tag=TENANTS[0])
        await told(one, bus)
        (event,) = bus.sent
        assert (event.cleared, set(event.removed_blocks)) == (False, set(CHAINS[0].hashes[:5]))


async def test_events_lost_at_the_end_show_although_nothing_happens_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_AGAIN_S", 0.02)
    bus = TappedBus()
    async with served_node(bus=bus) as one:
        follower = Follower(one, bus)
        await follower.list_if_needed()
        bus.is_cut = True
        await one.client.put(items_of(CHAINS[0], 0, 5))
        await until(lambda: one.node.events.dropped_count > 2, what="lost events")
        assert not bus.sent
        bus.is_cut = False
        await until(lambda: bool(bus.sent), what="an event that shows the gap")
        follower.take()
        await follower.list_if_needed()
        assert follower.list_count == 2
        await follower.check()
        # And then it is quiet.
        number = one.node.events.sequence_number
        await asyncio.sleep(0.1)
        assert one.node.events.sequence_number == number


async def test_an_overfull_queue_shows_as_a_gap_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_AGAIN_S", 0.02)
    monkeypatch.setattr(events, "_MAX_PENDING", 3)
    bus = TappedBus()
    stream = EventStream(bus, mesh="local", instance_id="node")
    for number in range(5):
        stream.emit(Changes(stored=[Key(Kind.BLOCK, bytes([number]) * 32)]))
    running = asyncio.create_task(stream.run())
    await until(lambda: len(bus.sent) == 4, what="events")
    assert [event.sequence_number for event in bus.sent] == [1, 2, 3, 6]
    await asyncio.sleep(0.1)
    assert len(bus.sent) == 4
    running.cancel()
