"""Reports of damage: the node believes its own bytes, and only what is damaged goes."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from shoal.common.v1 import kv_transport_pb2 as transport_pb
from shoal.kv_cache.v1 import kv_cache_service_pb2 as pb
from shoal_kv_cache.core.entries import Group, Key, Kind
from shoal_kv_cache.tiers.ssd import SsdTier
from support.kv_client import KV_ID, NUMERICS_ID, TENANT, TestChain, begin_of, items_of
from support.kv_nodes import ServedNode, introduce, open_disk, served_node
from support.memory_remote import MemoryRemote

BLOCK = transport_pb.PAYLOAD_KIND_BLOCK
CHAIN = TestChain("damage", 20)
GROUP = Group(KV_ID, NUMERICS_ID, TENANT)


def spoil_memory(one: ServedNode, index: int, kind: Kind = Kind.BLOCK) -> None:
    held = one.node.store.index.get(GROUP, Key(kind, CHAIN.hashes[index]))
    assert held is not None
    assert held.slab is not None
    one.node.store.ram.arena.write(held.slab, 0, b"damage")


def spoil_disk(folder: Path, payload: bytes) -> None:
    for path in folder.rglob("*"):
        raw = bytearray(path.read_bytes()) if path.is_file() else bytearray()
        at = raw.find(payload)
        if at >= 0:
            raw[at] ^= 1
            path.write_bytes(raw)
            return
    raise AssertionError("the payload is not on disk")


async def test_a_report_of_a_good_block_drops_nothing() -> None:
    async with served_node() as one:
        await one.client.put(items_of(CHAIN, 0, 10, [9]))
        await one.client.report(CHAIN, 4)
        await one.client.report(CHAIN, 9, is_snapshot=True)
        found = await one.client.acquire(CHAIN)
        assert (found.hit_tokens, found.present_tokens) == (1280, 1280)
        assert (await one.client.stats()).corrupt_count == 0


@pytest.mark.parametrize("group", [{"tenant_tag": b"x" * 32}, {"kv_id": "other"}, {"numerics_id": "other"}, {}])
async def test_a_report_reaches_its_own_group_only(group: dict[str, Any]) -> None:
    async with served_node() as one:
        await one.client.put(items_of(CHAIN, 0, 10))
        spoil_memory(one, 4)
        await one.client.report(CHAIN, 4, **group)
        assert (await one.client.acquire(CHAIN)).present_tokens == (1280 if group else 512)


async def test_a_damaged_block_goes_with_what_stands_on_it_and_a_damaged_snapshot_alone() -> None:
    async with served_node() as one:
        await one.client.put(items_of(CHAIN, 0, 10, [7, 9]))
        spoil_memory(one, 9, Kind.SNAPSHOT)
        await one.client.report(CHAIN, 9, is_snapshot=True)
        found = await one.client.acquire(CHAIN, lease_id="first")
        assert (found.hit_tokens, found.replay_tokens) == (1024, 1280)
        spoil_memory(one, 8)
        await one.client.report(CHAIN, 8)
        assert (await one.client.acquire(CHAIN)).present_tokens == 1024
        assert (await one.client.stats()).corrupt_count == 2
        # The lease of before still pins what it read; then all is given back.
        used_bytes = one.node.store.ram.used_bytes
        await one.client.release("first")
        assert one.node.store.ram.used_bytes == used_bytes - 2 * 1024


@pytest.mark.parametrize(("memory", "disk"), [(True, False), (False, True), (True, True)])
async def test_with_a_disk_only_the_bad_copies_go_and_the_good_one_serves(
    tmp_path: Path, memory: bool, disk: bool
) -> None:
    async with served_node(ssd=open_disk(tmp_path)) as one:
        await one.client.put(items_of(CHAIN, 0, 10))
        await asyncio.wait_for(one.node.write_out(), 10)
        if memory:
            spoil_memory(one, 4)
        if disk:
            spoil_disk(tmp_path, CHAIN.block(4))
        await one.client.report(CHAIN, 4)
        found = await one.client.acquire(CHAIN)
        assert found.replay_tokens == (512 if memory and disk else 1280)
        assert await one.client.read(found) == CHAIN.blocks(found.replay_tokens // 128)
        assert (await one.client.stats()).corrupt_count == memory + disk


async def test_what_the_store_outside_has_from_a_damaged_copy_goes_too() -> None:
    remote = MemoryRemote()
    async with served_node(remote=remote) as one:
        await one.client.put(items_of(CHAIN, 0, 10))
        await asyncio.wait_for(one.node.write_out(), 10)
        spoil_memory(one, 4)
        for key in (Key(Kind.BLOCK, CHAIN.hashes[4]), Key(Kind.BLOCK, CHAIN.hashes[5])):
            remote.damage(key)
        await one.client.report(CHAIN, 4)
        left = {key.block_hash for _, key in remote.held}
        # Nobody has said anything of the other one: whoever reads it will find out.
        assert left == set(CHAIN.hashes[:10]) - {CHAIN.hashes[4]}


async def test_reports_that_nothing_can_be_made_of_are_refused_or_change_nothing() -> None:
    async with served_node() as one:
        await one.client.report(CHAIN, 3)
        for request in (pb.ReportCorruptRequest(), pb.ReportCorruptRequest(kind=BLOCK, block_hash=b"short")):
            with pytest.raises(Exception, match="INVALID_ARGUMENT"):
                await one.client.stub.ReportCorrupt(request, timeout=5)
        assert await one.client.put(items_of(CHAIN, 0, 10, [9])) == 11
        assert (await one.client.acquire(CHAIN)).hit_tokens == 1280


class GatedDisk(SsdTier):
    """Holds every write until it is told."""

    gate = threading.Event()

    def append(self, *args: Any, **more: Any) -> list[int]:
        self.gate.wait(10)
        return super().append(*args, **more)


async def test_what_is_damaged_before_it_is_written_out_goes_and_the_rest_is_written(tmp_path: Path) -> None:
    GatedDisk.gate = threading.Event()
    disk = GatedDisk(tmp_path, capacity_bytes=8 << 20, segment_file_bytes=1 << 20)
    async with served_node(ssd=disk) as one:
        await one.client.put(items_of(CHAIN, 0, 10))
        spoil_memory(one, 4)
        GatedDisk.gate.set()
        await asyncio.wait_for(one.node.write_out(), 10)
        assert (await one.client.tier(pb.TIER_SSD)).block_count == 4
        assert (await one.client.acquire(CHAIN)).present_tokens == 512


async def test_what_is_damaged_before_it_is_sent_on_goes() -> None:
    async with served_node("a") as one, served_node("b") as other:
        introduce([one, other])
        owned = next(
            chain
            for chain in (TestChain(f"sent {number}", 4) for number in range(99))
            if one.node.members.owners(chain.hashes[0]) == ("b",)
        )
        begin = one.node.puts.begin(begin_of(items_of(owned, 0, 4)))
        for number, index in enumerate(range(4)):
            begin.fill(pb.PutData(payload_id=number, data=owned.block(index)))
        assert await begin.commit() == 4
        # Before the event loop goes on to send it.
        held = one.node.store.index.get(GROUP, Key(Kind.BLOCK, owned.hashes[2]))
        assert held is not None
        assert held.slab is not None
        one.node.store.ram.arena.write(held.slab, 0, b"damage")
        await asyncio.wait_for(one.node.write_out(), 10)
        assert (await one.client.held())[1] == set(owned.hashes[:2])
        assert (await other.client.held())[1] == set()
