"""Puts, flushes and tenants at one node."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from shoal.common.v1 import kv_transport_pb2 as transport_pb
from shoal.kv_cache.v1 import events_pb2
from shoal.kv_cache.v1 import kv_cache_service_pb2 as pb
from shoal_common.bus import Bus
from shoal_common.host import host_id
from shoal_common.kv_transport.arena import ArenaView
from shoal_kv_cache.core.entries import Entry
from shoal_kv_cache.tiers.ssd import SsdTier
from support.kv_client import BLOCK_BYTES, SLAB_BYTES, Item, TestChain, begin_of, block_item, items_of, send
from support.kv_nodes import ServedNode, open_disk, served_node
from support.waiting import until

CHAIN = TestChain("puts", 80)
OTHER_TENANT = b"o" * 32


class OpenPut:
    """A put in steps."""

    def __init__(self, one: ServedNode, items: Sequence[Item], **more: Any) -> None:
        self._one, self._items, self._more = one, items, more
        self._call: Any = one.client.stub.Put(None, timeout=20)
        self.wanted = pb.PutWanted()

    async def begin(self) -> OpenPut:
        begin = begin_of(self._items, **{k: v for k, v in self._more.items() if k != "offer"})
        if "offer" in self._more:
            begin.offer.CopyFrom(self._more["offer"])
        await self._call.write(pb.PutRequest(begin=begin))
        answer = await self._call.read()
        assert isinstance(answer, pb.PutResponse), await self._call.code()
        self.wanted = answer.wanted
        return self

    async def finish(self) -> int:
        ids = [] if self.wanted.slabs else list(self.wanted.payload_ids)
        await send(self._call, self._items, ids)
        answer = await self._call.read()
        assert isinstance(answer, pb.PutResponse), await self._call.code()
        return answer.committed.stored_count

    def leave(self) -> None:
        self._call.cancel()


async def test_what_one_put_is_filling_another_leaves_out_and_waits_for() -> None:
    async with served_node() as one:
        first = await OpenPut(one, items_of(CHAIN, 0, 3)).begin()
        second = await OpenPut(one, items_of(CHAIN, 0, 5, [4])).begin()
        assert list(first.wanted.payload_ids) == [0, 1, 2]
        assert list(second.wanted.payload_ids) == [3, 4, 5]
        waiting = asyncio.create_task(second.finish())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert await first.finish() == 3
        assert await waiting == 3
        assert (await one.client.acquire(CHAIN)).hit_tokens == 5 * 128


async def test_a_writer_that_dies_leaves_nothing_and_those_after_it_go_on() -> None:
    async with served_node() as one:
        first = await OpenPut(one, items_of(CHAIN, 0, 3)).begin()
        second = await OpenPut(one, items_of(CHAIN, 0, 5)).begin()
        waiting = asyncio.create_task(second.finish())
        first.leave()
        # What stood on the dead one's blocks is an orphan: no error, nothing stored.
        assert await waiting == 0
        assert (await one.client.acquire(CHAIN)).present_tokens == 0
        assert one.node.store.ram.used_bytes == 0
        assert await one.client.put(items_of(CHAIN, 0, 5)) == 5


async def test_a_put_whose_parent_is_missing_is_no_error_and_stores_nothing() -> None:
    async with served_node() as one:
        assert await one.client.put(items_of(CHAIN, 3, 6)) == 0
        assert one.node.store.ram.used_bytes == 0
        # The first of a segment stands without one.
        assert await one.client.put(items_of(CHAIN, 64, 66)) == 2


async def test_a_writer_on_the_host_fills_the_memory_itself() -> None:
    offer = transport_pb.TransportOffer(kinds=[transport_pb.TRANSPORT_KIND_SHM], host_id=host_id())
    items = items_of(CHAIN, 0, 4, [3])
    async with served_node() as one:
        put = await OpenPut(one, items, offer=offer).begin()
        assert put.wanted.grant.kind == transport_pb.TRANSPORT_KIND_SHM
        assert len(put.wanted.slabs) == 4 + 5
        fill(put.wanted, items)
        assert await put.finish() == 5
        assert await one.client.read(await one.client.acquire(CHAIN)) == [*CHAIN.blocks(4), CHAIN.snapshot(3)]


async def test_memory_filled_wrongly_is_data_loss_and_stores_nothing() -> None:
    offer = transport_pb.TransportOffer(kinds=[transport_pb.TRANSPORT_KIND_SHM], host_id=host_id())
    async with served_node() as one:
        put = await OpenPut(one, items_of(CHAIN, 0, 4), offer=offer).begin()
        with pytest.raises(Exception, match="checksum"):
            await put.finish()
        assert one.node.store.ram.used_bytes == 0
        assert (await one.client.acquire(CHAIN)).present_tokens == 0


def fill(wanted: pb.PutWanted, items: Sequence[Item]) -> None:
    """What a writer does with the slabs."""
    view = ArenaView(wanted.grant.arena_name, wanted.grant.arena_nonce, is_writable=True)
    slabs = iter(wanted.slabs)
    for one in items:
        for begin in range(0, len(one.data), wanted.grant.slab_bytes):
            part = one.data[begin : begin + wanted.grant.slab_bytes]
            at = wanted.grant.first_slab_offset + next(slabs) * wanted.grant.slab_bytes
            view.memory[at : at + len(part)] = part
    view.close()


async def test_a_block_of_another_tenant_is_absent_and_a_put_of_it_looks_like_any_other() -> None:
    async with served_node() as one:
        assert await one.client.put(items_of(CHAIN, 0, 4, [3])) == 5
        put = await OpenPut(one, items_of(CHAIN, 0, 4, [3]), tenant=OTHER_TENANT).begin()
        assert list(put.wanted.payload_ids) == [0, 1, 2, 3, 4]
        assert await put.finish() == 5
        found = await one.client.acquire(CHAIN, tenant=OTHER_TENANT)
        assert (found.hit_tokens, found.replay_tokens, found.present_tokens) == (0, 0, 0)
        assert (await one.client.acquire(CHAIN)).hit_tokens == 512


async def test_a_put_in_flight_does_not_survive_a_flush_that_means_it() -> None:
    async with served_node() as one:
        put = await OpenPut(one, items_of(CHAIN, 0, 3)).begin()
        other = await OpenPut(one, items_of(CHAIN, 0, 3), tenant=OTHER_TENANT).begin()
        await one.client.flush(tenant_tag=b"t" * 32)
        assert await put.finish() == 0
        assert await other.finish() == 3
        assert (await one.client.acquire(CHAIN)).present_tokens == 0
        assert (await one.client.acquire(CHAIN, tenant=OTHER_TENANT)).present_tokens == 384
        assert await one.client.put(items_of(CHAIN, 0, 3)) == 3


class SlowDisk(SsdTier):
    """Holds every write until it is told."""

    gate: Any = None

    def append(self, items: Sequence[tuple[Entry, Any]], **more: Any) -> list[int]:
        self.gate.wait(10)
        return super().append(items, **more)


async def test_a_write_back_in_flight_does_not_survive_a_flush_nor_a_restart(tmp_path: Path) -> None:
    SlowDisk.gate = threading.Event()
    disk = SlowDisk(tmp_path, capacity_bytes=8 << 20, segment_file_bytes=1 << 20)
    async with served_node(ssd=disk) as one:
        await one.client.put(items_of(CHAIN, 0, 70, [69]))
        flushing = asyncio.create_task(one.client.flush(everything=True))
        await asyncio.sleep(0.05)
        assert not flushing.done()
        SlowDisk.gate.set()
        flushed = await flushing
        assert (flushed.block_count, flushed.snapshot_count) == (70, 1)
        assert disk.stats().record_count == 0
        assert one.node.store.ram.used_bytes == 0
    async with served_node(ssd=open_disk(tmp_path)) as one:
        assert (await one.client.stats()).block_count == 0


async def test_groups_are_listed_with_what_each_tier_holds(tmp_path: Path) -> None:
    async with served_node(ssd=open_disk(tmp_path)) as one:
        await one.client.put(items_of(CHAIN, 0, 3, [2]))
        await one.client.put(items_of(TestChain("theirs", 2), 0, 2), tenant=OTHER_TENANT)
        await asyncio.wait_for(one.node.write_out(), 10)
        listed = await one.client.stub.ListGroups(pb.ListGroupsRequest(tenant_tag=OTHER_TENANT), timeout=5)
        (group,) = listed.groups
        assert [(tier.tier, tier.block_count, tier.used_bytes) for tier in group.tiers] == [
            (pb.TIER_RAM, 2, 2000),
            (pb.TIER_SSD, 2, 2000),
        ]
        assert len((await one.client.stub.ListGroups(pb.ListGroupsRequest(), timeout=5)).groups) == 2


async def test_a_tenant_over_its_quota_loses_its_own_first() -> None:
    async with served_node(ram_bytes=20 * SLAB_BYTES, tenant_ram_bytes=5 * SLAB_BYTES) as one:
        await one.client.put(items_of(CHAIN, 0, 5))
        for number in range(30):
            await one.client.put(items_of(TestChain(f"greedy {number}", 2), 0, 2), tenant=OTHER_TENANT)
        assert (await one.client.acquire(CHAIN)).present_tokens == 640


async def test_a_full_table_makes_room_as_a_full_memory_does() -> None:
    async with served_node(max_entries=40, ram_bytes=1 << 20) as one:
        for number in range(30):
            chain = TestChain(f"table {number}", 5)
            assert await one.client.put(items_of(chain, 0, 5)) == 5
            assert (await one.client.acquire(chain, lease_id="look")).present_tokens == 640
            await one.client.release("look")


async def test_a_lease_of_a_dead_owner_and_one_whose_time_is_over_end() -> None:
    async with served_node() as one:
        await one.client.put(items_of(CHAIN, 0, 5))
        await one.client.acquire(CHAIN)
        one.node.acquirer.release_owner("owner")
        assert (await one.client.stats()).lease_count == 0
        await one.client.acquire(CHAIN)
        one.node.acquirer.expire(1e12)
        assert (await one.client.stats()).lease_count == 0


class Recorder(Bus):
    """Keeps what is published."""

    def __init__(self) -> None:
        super().__init__("off", name="recorder")
        self.events: list[events_pb2.KvEvent] = []

    async def publish(self, subject: str, payload: bytes) -> bool:
        self.events.append(events_pb2.KvEvent.FromString(payload))
        return True


async def test_events_have_numbers_without_gaps_and_add_up_to_the_list() -> None:
    bus = Recorder()
    async with served_node(bus=bus, ram_bytes=40 * SLAB_BYTES) as one:
        for number in range(10):
            await one.client.put(items_of(TestChain(f"events {number}", 8), 0, 8))
        await one.client.flush(kv_id="another")
        number, blocks, _ = await one.client.held()
        await until(lambda: len(bus.events) >= number, what="all events published")
        assert [event.sequence_number for event in bus.events] == list(range(1, number + 1))
        seen: set[bytes] = set()
        for event in bus.events:
            seen -= set(event.removed_blocks)
            seen |= set(event.stored_blocks)
        assert seen == blocks
        assert len(blocks) <= 40


async def test_a_payload_sent_in_pieces_is_whole() -> None:
    item = block_item(CHAIN, 0, payload_id=7)
    async with served_node() as one:

        async def messages() -> AsyncIterator[pb.PutRequest]:
            yield pb.PutRequest(begin=begin_of([item]))
            for offset in range(0, BLOCK_BYTES, 300):
                part = pb.PutData(payload_id=7, offset=offset, data=item.data[offset : offset + 300])
                yield pb.PutRequest(data=part)
            yield pb.PutRequest(commit=pb.PutCommit())

        answers = [answer async for answer in one.client.stub.Put(messages(), timeout=10)]
        assert answers[-1].committed.stored_count == 1


async def test_a_put_at_a_full_node_never_takes_room_from_what_it_stands_on() -> None:
    async with served_node(ram_bytes=12 * SLAB_BYTES) as one:
        others = TestChain("others", 4)
        await one.client.put(items_of(CHAIN, 0, 8))
        await one.client.put(items_of(others, 0, 4))
        # Used again and again: by their worth the end of the chain would go first.
        for _ in range(20):
            await one.client.acquire(others, lease_id="used")
            await one.client.release("used")
        assert await one.client.put(items_of(CHAIN, 8, 12)) == 4
        assert (await one.client.acquire(CHAIN, lease_id="look")).present_tokens == 12 * 128
        await one.client.release("look")
        # Nothing is left but what it stands on: refused, and that is still there.
        with pytest.raises(grpc.aio.AioRpcError, match="pinned"):
            await one.client.put(items_of(CHAIN, 12, 13))
        assert (await one.client.acquire(CHAIN)).present_tokens == 12 * 128


async def test_a_put_of_a_snapshot_at_a_full_node_never_takes_room_from_its_block() -> None:
    offer = transport_pb.TransportOffer(kinds=[transport_pb.TRANSPORT_KIND_SHM], host_id=host_id())
    async with served_node(ram_bytes=8 * SLAB_BYTES) as one:
        await one.client.put(items_of(CHAIN, 0, 4))
        with pytest.raises(grpc.aio.AioRpcError, match="pinned"):
            await OpenPut(one, items_of(CHAIN, 0, 4, [3]), offer=offer).begin()
        assert (await one.client.acquire(CHAIN)).present_tokens == 512


OTHERS = [TestChain(f"within {number}", 4) for number in range(5)]
NO_QUOTA = f"{OTHER_TENANT.hex()}=0:0"


async def fill_up(one: ServedNode) -> None:
    """No slab is free; slabs are a little larger than blocks, and more may have gone than was needed."""
    rest = TestChain("rest", 20)
    free = one.node.store.ram.arena.free_count
    assert await one.client.put(items_of(rest, 0, free)) == free


async def test_a_tenant_with_a_quota_of_nothing_uses_what_is_free_and_takes_nothing_from_others() -> None:
    async with served_node(ram_bytes=20 * SLAB_BYTES, tenant_quotas=(NO_QUOTA,)) as one:
        assert await one.client.put(items_of(CHAIN, 0, 8), tenant=OTHER_TENANT) == 8
        assert (await one.client.acquire(CHAIN, tenant=OTHER_TENANT, lease_id="own")).present_tokens == 1024
        await one.client.release("own")
        for chain in OTHERS:
            assert await one.client.put(items_of(chain, 0, 4)) == 4
        await fill_up(one)
        # It made room, since nobody else was over a quota.
        assert (await one.client.acquire(CHAIN, tenant=OTHER_TENANT)).present_tokens == 0
        held = await one.client.held()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await one.client.put(items_of(CHAIN, 0, 1), tenant=OTHER_TENANT)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await one.client.held() == held


async def test_a_tenant_whose_own_are_pinned_takes_up_to_its_quota_from_others_and_no_more() -> None:
    async with served_node(
        ram_bytes=20 * SLAB_BYTES, tenant_quotas=(f"{OTHER_TENANT.hex()}={7 * SLAB_BYTES}:0",)
    ) as one:
        assert await one.client.put(items_of(CHAIN, 0, 4), tenant=OTHER_TENANT) == 4
        await one.client.acquire(CHAIN, tenant=OTHER_TENANT, lease_id="pins its own")
        for chain in OTHERS[:4]:
            assert await one.client.put(items_of(chain, 0, 4)) == 4
        assert await one.client.put(items_of(CHAIN, 4, 7), tenant=OTHER_TENANT) == 3
        left = [(await one.client.acquire(chain)).present_tokens for chain in OTHERS[:4]]
        assert 12 * 128 <= sum(left) < 16 * 128
        await one.client.acquire(CHAIN, tenant=OTHER_TENANT, lease_id="pins these too")
        await fill_up(one)
        with pytest.raises(grpc.aio.AioRpcError):
            await one.client.put(items_of(CHAIN, 7, 8), tenant=OTHER_TENANT)
        assert [(await one.client.acquire(chain)).present_tokens for chain in OTHERS[:4]] == left


async def test_after_a_restart_tenants_have_what_they_had_and_their_quotas_of_the_disk_hold(tmp_path: Path) -> None:
    def disk() -> SsdTier:
        return open_disk(tmp_path, capacity_bytes=160 * 4096, segment_file_bytes=64 << 10)

    settings: dict[str, Any] = {"tenant_ssd_bytes": 12 * BLOCK_BYTES}
    async with served_node(ssd=disk(), **settings) as one:
        await one.client.put(items_of(CHAIN, 0, 10))
        for number in range(18):
            await one.client.put(items_of(TestChain(f"greedy {number}", 8), 0, 8), tenant=OTHER_TENANT)
        await asyncio.wait_for(one.node.write_out(), 10)
    async with served_node(ssd=disk(), **settings) as one:
        listed = await one.client.stub.ListGroups(pb.ListGroupsRequest(), timeout=5)
        held = {group.tenant_tag: group.tiers[1].used_bytes for group in listed.groups}
        assert held == {b"t" * 32: 10 * BLOCK_BYTES, OTHER_TENANT: 144 * BLOCK_BYTES}
        for number in range(18, 24):
            await one.client.put(items_of(TestChain(f"greedy {number}", 8), 0, 8), tenant=OTHER_TENANT)
            await asyncio.wait_for(one.node.write_out(), 10)
        listed = await one.client.stub.ListGroups(pb.ListGroupsRequest(tenant_tag=b"t" * 32), timeout=5)
        assert listed.groups[0].tiers[1].block_count == 10
