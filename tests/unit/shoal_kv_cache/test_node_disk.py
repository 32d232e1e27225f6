"""A node with a disk: what was put comes back from it, after a restart too; a bad disk costs hits, never the node."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from shoal.kv_cache.v1 import kv_cache_service_pb2 as pb
from shoal_common.errors import MeshError
from shoal_kv_cache.core.changes import Changes
from shoal_kv_cache.tiers.ssd import Read, SsdTier, SsdUnavailable
from support.kv_client import SLAB_BYTES, TestChain, items_of
from support.kv_nodes import ServedNode, open_disk, served_node
from support.waiting import until

CHAIN = TestChain("disk", 100)


async def written(one: ServedNode) -> None:
    """Everything that was put lies on disk."""
    await asyncio.wait_for(one.node.write_out(), 10)


def forget_memory(one: ServedNode) -> None:
    """Every copy in memory that has one on disk goes."""
    changes = Changes()
    one.node.store.index.evict_ram(1 << 30, changes)
    assert not changes.removed
    one.node.store.settle(changes)


async def test_what_went_out_of_memory_is_found_on_disk_and_read_back(tmp_path: Path) -> None:
    async with served_node(ssd=open_disk(tmp_path)) as one:
        assert await one.client.put(items_of(CHAIN, 0, 80, [69])) == 81
        await written(one)
        forget_memory(one)
        found = await one.client.acquire(CHAIN)
        assert (found.hit_tokens, found.replay_tokens, found.present_tokens) == (70 * 128, 80 * 128, 80 * 128)
        assert await one.client.read(found) == [*CHAIN.blocks(80), CHAIN.snapshot(69)]
        ram, ssd = found.tier_hits[:2]
        assert (ram.hit_tokens, ssd.hit_tokens, ssd.is_used) == (0, 70 * 128, True)
        assert ssd.load_bytes == 80 * 1000 + 5000
        disk = await one.client.tier(pb.TIER_SSD)
        assert disk.block_count == 80
        assert disk.read_bytes == 80 * 1000 + 5000


async def test_a_restart_keeps_what_was_on_disk(tmp_path: Path) -> None:
    async with served_node(ssd=open_disk(tmp_path)) as one:
        await one.client.put(items_of(CHAIN, 0, 70, [65]))
        await written(one)
    async with served_node(ssd=open_disk(tmp_path)) as one:
        _, blocks, snapshots = await one.client.held()
        assert (blocks, snapshots) == (set(CHAIN.hashes[:70]), {CHAIN.hashes[65]})
        found = await one.client.acquire(CHAIN)
        assert found.hit_tokens == 66 * 128
        assert await one.client.read(found) == [*CHAIN.blocks(70), CHAIN.snapshot(65)]


async def test_a_flipped_bit_on_disk_costs_the_rest_of_its_segment_and_nothing_else(tmp_path: Path) -> None:
    async with served_node(ssd=open_disk(tmp_path)) as one:
        await one.client.put(items_of(CHAIN, 0, 80))
        await written(one)
        forget_memory(one)
        flip(tmp_path, CHAIN.block(10))
        found = await one.client.acquire(CHAIN)
        assert found.replay_tokens == 10 * 128
        assert await one.client.read(found) == CHAIN.blocks(10)
        assert (await one.client.stats()).corrupt_count == 1
        assert await one.client.put(items_of(CHAIN, 0, 80)) == 54
        assert (await one.client.acquire(CHAIN)).replay_tokens == 80 * 128


async def test_verify_finds_damage_in_memory_and_on_disk(tmp_path: Path) -> None:
    async with served_node(ssd=open_disk(tmp_path)) as one:
        await one.client.put(items_of(CHAIN, 0, 20))
        await written(one)
        flip(tmp_path, CHAIN.block(7))
        slab = one.node.store.index.page(0, 100)[0][3].slab
        assert slab is not None
        one.node.store.ram.arena.write(slab, 0, b"x")
        messages = [message async for message in one.client.stub.Verify(pb.VerifyRequest(), timeout=10)]
        assert messages[-1].is_done
        damaged = {message.tier: message.damaged_count for message in messages[:-1]}
        assert damaged == {pb.TIER_RAM: 1, pb.TIER_SSD: 1}
        # Each had its other copy.
        assert (await one.client.acquire(CHAIN)).replay_tokens == 20 * 128


async def test_a_small_disk_keeps_what_is_worth_most_and_memory_goes_on(tmp_path: Path) -> None:
    disk = open_disk(tmp_path, capacity_bytes=64 * 4096, segment_file_bytes=64 << 10)
    async with served_node(ssd=disk, ram_bytes=30 * SLAB_BYTES) as one:
        for name in range(12):
            chain = TestChain(f"many {name}", 10)
            assert await one.client.put(items_of(chain, 0, 10)) == 10
            await written(one)
            assert (await one.client.acquire(chain, lease_id="look")).replay_tokens == 1280
            await one.client.release("look")
        stats = await one.client.tier(pb.TIER_SSD)
        assert 0 < stats.used_bytes <= stats.capacity_bytes
        assert stats.block_count > 20


class BrokenDisk(SsdTier):
    """Answers every write with an error."""

    error: MeshError = SsdUnavailable("broken")

    def append(self, *args: object, **more: object) -> list[int]:
        raise self.error


async def test_a_disk_that_takes_no_writes_is_told_and_memory_serves_on(tmp_path: Path) -> None:
    disk = BrokenDisk(tmp_path, capacity_bytes=8 << 20, segment_file_bytes=1 << 20)
    async with served_node(ssd=disk) as one:
        assert await one.client.put(items_of(CHAIN, 0, 10)) == 10
        await written(one)
        found = await one.client.acquire(CHAIN)
        assert found.replay_tokens == 1280
        stats = await one.client.tier(pb.TIER_SSD)
        assert (stats.failing_reason, stats.dropped_count) == ("SSD_UNAVAILABLE", 10)


async def test_under_fsync_always_a_put_that_is_not_durable_is_not_acknowledged(tmp_path: Path) -> None:
    disk = BrokenDisk(tmp_path, capacity_bytes=8 << 20, segment_file_bytes=1 << 20)
    async with served_node(ssd=disk, ssd_fsync="always", ssd_directory=str(tmp_path)) as one:
        with pytest.raises(Exception, match="broken"):
            await one.client.put(items_of(CHAIN, 0, 10))
        assert (await one.client.acquire(CHAIN)).replay_tokens == 1280


async def test_under_fsync_always_an_answered_put_is_on_disk(tmp_path: Path) -> None:
    async with served_node(ssd=open_disk(tmp_path), ssd_fsync="always", ssd_directory=str(tmp_path)) as one:
        await one.client.put(items_of(CHAIN, 0, 70))
        assert (await one.client.tier(pb.TIER_SSD)).block_count == 70


async def test_a_slow_disk_is_left_out_where_computing_is_faster(tmp_path: Path) -> None:
    async with served_node(ssd=open_disk(tmp_path)) as one:
        await one.client.put(items_of(CHAIN, 0, 10, [9]))
        await written(one)
        forget_memory(one)
        assert one.node.disk is not None
        for _ in range(20):
            one.node.disk.rate.observed(10_000, 1.0)
        assert (await one.client.acquire(CHAIN, tokens_per_s=1e5)).hit_tokens == 0
        found = await one.client.acquire(CHAIN, tokens_per_s=100)
        assert found.hit_tokens == 1280


class HangingDisk(SsdTier):
    """Answers no read until it is told."""

    gate = threading.Event()

    def read_many(self, reads: Sequence[Read], **more: Any) -> list[bytes | MeshError | None]:
        self.gate.wait(20)
        return super().read_many(reads, **more)


async def test_a_disk_that_hangs_costs_one_caller_its_time_and_the_next_ones_nothing(tmp_path: Path) -> None:
    HangingDisk.gate.clear()
    disk = HangingDisk(tmp_path, capacity_bytes=8 << 20, segment_file_bytes=1 << 20)
    async with served_node(ssd=disk, load_timeout_s=0.3) as one:
        await one.client.put(items_of(CHAIN, 0, 50))
        await written(one)
        forget_memory(one)
        await one.client.put(items_of(CHAIN, 64, 70))
        started_s = time.monotonic()
        for _ in range(10):
            assert (await one.client.acquire(CHAIN)).replay_tokens == 0
        assert time.monotonic() - started_s < 2
        # Memory and puts go on, and what was read late is there.
        assert await one.client.put(items_of(TestChain("others", 10), 0, 10)) == 10
        HangingDisk.gate.set()
        await until(lambda: one.node.store.index.usage()[0].block_count == 66, what="late reads")
        assert (await one.client.acquire(CHAIN)).replay_tokens == 50 * 128


async def test_two_acquires_of_one_prefix_read_it_once(tmp_path: Path) -> None:
    async with served_node(ssd=open_disk(tmp_path)) as one:
        await one.client.put(items_of(CHAIN, 0, 50, [49]))
        await written(one)
        forget_memory(one)
        answers = await asyncio.gather(*(one.client.acquire(CHAIN) for _ in range(4)))
        assert [answer.hit_tokens for answer in answers] == [6400] * 4
        assert (await one.client.tier(pb.TIER_SSD)).read_bytes == 50 * 1000 + 5000


def flip(folder: Path, payload: bytes) -> None:
    """One bit of a payload in whatever file holds it."""
    for path in folder.rglob("*"):
        if not path.is_file():
            continue
        raw = bytearray(path.read_bytes())
        at = raw.find(payload)
        if at >= 0:
            raw[at] ^= 1
            path.write_bytes(raw)
            return
    raise AssertionError("the payload is not on disk")


async def test_a_table_too_small_for_the_disk_takes_what_fits_and_forgets_the_rest(tmp_path: Path) -> None:
    async with served_node(ssd=open_disk(tmp_path)) as one:
        for name in range(10):
            await one.client.put(items_of(TestChain(f"large {name}", 10), 0, 10))
        await written(one)
    async with served_node(ssd=open_disk(tmp_path), max_entries=50) as one:
        count = (await one.client.stats()).block_count
        assert 30 < count < 50
        assert one.node.disk is not None
        await one.node.disk.remove_all()
        assert one.node.disk.tier.stats().record_count == count


class Forgetful(SsdTier):
    """Cannot make removals durable while it is told so."""

    is_failing = True

    def remove(self, *args: Any, **more: Any) -> None:
        if self.is_failing:
            raise SsdUnavailable("broken")
        super().remove(*args, **more)


async def test_a_flush_that_a_disk_cannot_keep_says_so_and_can_be_repeated(tmp_path: Path) -> None:
    disk = Forgetful(tmp_path, capacity_bytes=8 << 20, segment_file_bytes=1 << 20)
    async with served_node(ssd=disk) as one:
        await one.client.put(items_of(CHAIN, 0, 10))
        await written(one)
        for _ in range(2):
            with pytest.raises(Exception, match="broken"):
                await one.client.flush(everything=True)
            assert (await one.client.acquire(CHAIN)).present_tokens == 0
        disk.is_failing = False
        await one.client.flush(everything=True)
        assert disk.stats().record_count == 0
    async with served_node(ssd=open_disk(tmp_path)) as one:
        assert (await one.client.stats()).block_count == 0
