"""Flushes that meet what is on its way: loads, write-back to every slower place, puts of peers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from shoal_common.errors import Unavailable
from shoal_common.kv_transport.buffers import Buffer
from shoal_kv_cache.core.changes import Changes
from shoal_kv_cache.core.entries import Entry, Group, Key
from shoal_kv_cache.tiers.remote import Loaded
from shoal_kv_cache.tiers.ssd import Read, SsdTier
from support.kv_client import TENANT, TestChain, items_of
from support.kv_nodes import introduce, served_node
from support.memory_remote import MemoryRemote
from support.waiting import until

CHAIN = TestChain("in flight", 20)
WHATS: list[dict[str, Any]] = [{"kv_id": "kv"}, {"tenant_tag": TENANT}, {"everything": True}]


class SlowReads(SsdTier):
    """Holds every read until it is told."""

    gate = threading.Event()
    is_reading = False

    def read_many(self, reads: Sequence[Read], **more: Any) -> list[Any]:
        self.is_reading = True
        self.gate.wait(10)
        return super().read_many(reads, **more)


@pytest.mark.parametrize("what", WHATS)
async def test_what_is_being_read_from_disk_when_it_is_flushed_is_not_found(
    tmp_path: Path, what: dict[str, Any]
) -> None:
    SlowReads.gate = threading.Event()
    disk = SlowReads(tmp_path, capacity_bytes=8 << 20, segment_file_bytes=1 << 20)
    async with served_node(ssd=disk) as one:
        await one.client.put(items_of(CHAIN, 0, 20))
        await asyncio.wait_for(one.node.write_out(), 10)
        changes = Changes()
        one.node.store.index.evict_ram(1 << 30, changes)
        one.node.store.settle(changes)
        loading = asyncio.create_task(one.client.acquire(CHAIN))
        await until(lambda: disk.is_reading, what="the read")
        flushing = asyncio.create_task(one.client.flush(**what))
        await until(lambda: not len(one.node.store.index), what="the flush")
        SlowReads.gate.set()
        await flushing
        assert not (await loading).runs
        assert (await one.client.acquire(CHAIN)).present_tokens == 0
        assert one.node.store.ram.used_bytes == 0
        assert disk.stats().record_count == 0


class SlowRemote(MemoryRemote):
    """Holds gets or puts until it is told; may fail after it has stored."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.is_busy = False
        self.fails_after: Unavailable | None = None

    async def _wait(self) -> None:
        self.is_busy = True
        await self.gate.wait()

    async def get_many(self, group: Group, keys: Sequence[Key], **more: Any) -> list[Any]:
        found: list[Loaded | Any] = await super().get_many(group, keys, **more)
        await self._wait()
        return found

    async def put_many(self, items: Sequence[tuple[Entry, Buffer]], *, timeout_s: float) -> None:
        await self._wait()
        await super().put_many(items, timeout_s=timeout_s)
        if self.fails_after is not None:
            raise self.fails_after


@pytest.mark.parametrize("what", WHATS)
async def test_what_is_being_loaded_from_outside_when_it_is_flushed_is_not_kept(what: dict[str, Any]) -> None:
    remote = SlowRemote()
    remote.gate.set()
    async with served_node("gone", remote=remote) as one:
        await one.client.put(items_of(CHAIN, 0, 20))
        await asyncio.wait_for(one.node.write_out(), 10)
    remote.gate.clear()
    remote.is_busy = False
    async with served_node(remote=remote) as one:
        loading = asyncio.create_task(one.client.acquire(CHAIN))
        await until(lambda: remote.is_busy, what="the load")
        await one.client.flush(**what)
        remote.gate.set()
        assert not (await loading).runs
        assert (await one.client.held())[1] == set()
        assert one.node.store.ram.used_bytes == 0
        assert not remote.held


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("what", WHATS)
async def test_what_is_being_written_outside_when_it_is_flushed_is_gone_there_too(
    what: dict[str, Any], fails: bool
) -> None:
    remote = SlowRemote()
    remote.fails_after = Unavailable("away", reason="REMOTE_UNAVAILABLE") if fails else None
    async with served_node(remote=remote) as one:
        await one.client.put(items_of(CHAIN, 0, 20))
        await until(lambda: remote.is_busy, what="the write-back")
        flushing = asyncio.create_task(one.client.flush(**what))
        await until(lambda: not len(one.node.store.index), what="the flush")
        assert not flushing.done()
        remote.gate.set()
        await flushing
        assert not remote.held


async def test_what_one_node_sends_to_another_while_both_are_flushed_is_nowhere_after_two_rounds() -> None:
    async with served_node("a") as a, served_node("b") as b:
        introduce([a, b])
        chains = [TestChain(f"sent {number}", 70) for number in range(12)]

        async def put_all() -> None:
            for chain in chains:
                await a.client.put(items_of(chain, 0, 70))

        for order in ([a, b], [b, a]):
            putting = asyncio.create_task(put_all())
            await until(lambda: len(a.node.store.index) > 100, what="puts")
            await putting
            # As `shoal kv flush` does: all of them, twice.
            for _ in range(2):
                await asyncio.gather(*(one.client.flush(tenant_tag=TENANT) for one in order))
            assert [len(one.node.store.index) for one in order] == [0, 0]
            await asyncio.wait_for(asyncio.gather(a.node.write_out(), b.node.write_out()), 10)
            assert [len(one.node.store.index) for one in order] == [0, 0]


async def test_a_load_from_a_peer_that_meets_a_flush_leaves_nothing_after_two_rounds() -> None:
    async with served_node("a") as a, served_node("b") as b:
        chains = [TestChain(f"pulled {number}", 64) for number in range(16)]
        for chain in chains:
            await b.client.put(items_of(chain, 0, 64), is_from_peer=True)
        introduce([a, b])
        loading = [asyncio.create_task(a.client.acquire(chain, timeout_s=10)) for chain in chains]
        await asyncio.sleep(0.01)
        for _ in range(2):
            await asyncio.gather(*(one.client.flush(tenant_tag=TENANT) for one in (a, b)))
        await asyncio.gather(*loading)
        a.node.acquirer.release_owner("owner")
        assert [(await one.client.held())[1] for one in (a, b)] == [set(), set()]
        assert [one.node.store.ram.used_bytes for one in (a, b)] == [0, 0]
