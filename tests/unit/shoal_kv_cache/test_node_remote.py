"""A node with a store outside of the mesh, which may forget, damage or refuse anything."""

from __future__ import annotations

import asyncio
from pathlib import Path

from shoal.kv_cache.v1 import kv_cache_service_pb2 as pb
from shoal_common.errors import Unavailable
from shoal_kv_cache.core.entries import Key, Kind
from shoal_kv_cache.tiers.remote import open_remote
from support.kv_client import TestChain, items_of
from support.kv_nodes import served_node
from support.memory_remote import MemoryRemote

CHAIN = TestChain("remote", 150)


async def stored(remote: MemoryRemote, end: int = 150) -> None:
    """A node that is gone has written a chain out."""
    async with served_node("gone", remote=remote) as one:
        await one.client.put(items_of(CHAIN, 0, end, [end - 1]))
        await asyncio.wait_for(one.node.write_out(), 10)


async def test_what_one_node_wrote_out_another_finds() -> None:
    remote = MemoryRemote()
    await stored(remote)
    async with served_node(remote=remote) as one:
        found = await one.client.acquire(CHAIN)
        assert (found.hit_tokens, found.present_tokens) == (150 * 128, 150 * 128)
        assert await one.client.read(found) == [*CHAIN.blocks(150), CHAIN.snapshot(149)]
        assert (await one.client.tier(pb.TIER_REMOTE)).read_bytes == 150 * 1000 + 5000
        await one.client.acquire(CHAIN)
        assert (await one.client.tier(pb.TIER_REMOTE)).read_bytes == 150 * 1000 + 5000


async def test_a_damaged_payload_is_a_miss_from_there_on_and_is_written_again() -> None:
    remote = MemoryRemote()
    await stored(remote)
    key = Key(Kind.BLOCK, CHAIN.hashes[100])
    remote.damage(key)
    async with served_node(remote=remote) as one:
        found = await one.client.acquire(CHAIN)
        assert (found.hit_tokens, found.replay_tokens) == (0, 100 * 128)
        assert await one.client.read(found) == CHAIN.blocks(100)
        assert not any(held == key for _, held in remote.held)
        await one.client.put(items_of(CHAIN, 0, 150, [149]))
        await asyncio.wait_for(one.node.write_out(), 10)
        assert any(held == key for _, held in remote.held)
        assert (await one.client.acquire(CHAIN)).hit_tokens == 150 * 128


async def test_a_store_that_forgot_a_block_in_the_middle_ends_the_prefix_there() -> None:
    remote = MemoryRemote()
    await stored(remote)
    remote.held = {held: value for held, value in remote.held.items() if held[1].block_hash != CHAIN.hashes[70]}
    async with served_node(remote=remote) as one:
        assert (await one.client.acquire(CHAIN)).replay_tokens == 70 * 128


async def test_a_store_that_fails_is_a_store_that_misses() -> None:
    remote = MemoryRemote()
    remote.error = Unavailable("away", reason="REMOTE_UNAVAILABLE")
    async with served_node(remote=remote) as one:
        assert await one.client.put(items_of(CHAIN, 0, 10)) == 10
        await asyncio.wait_for(one.node.write_out(), 10)
        assert (await one.client.acquire(CHAIN)).replay_tokens == 1280
        stats = await one.client.tier(pb.TIER_REMOTE)
        assert (stats.failing_reason, stats.dropped_count) == ("REMOTE_UNAVAILABLE", 10)


async def test_a_flush_reaches_the_store() -> None:
    remote = MemoryRemote()
    await stored(remote, 20)
    async with served_node(remote=remote) as one:
        assert (await one.client.flush(kv_id="another")).remote_count == 0
        assert (await one.client.flush(kv_id="kv")).remote_count == 21
        assert (await one.client.acquire(CHAIN)).present_tokens == 0


async def test_another_tenant_finds_nothing_in_the_store() -> None:
    remote = MemoryRemote()
    await stored(remote, 20)
    async with served_node(remote=remote) as one:
        found = await one.client.acquire(CHAIN, tenant=b"x" * 32)
        assert (found.hit_tokens, found.present_tokens) == (0, 0)


async def test_a_lease_released_while_it_loads_pins_nothing() -> None:
    class SlowRemote(MemoryRemote):
        gate = asyncio.Event()

        async def exists_many(self, *args: object, **more: object) -> list[bool]:
            await self.gate.wait()
            return await super().exists_many(*args, **more)  # type: ignore[arg-type]

    remote = SlowRemote()
    remote.gate.set()
    await stored(remote, 20)
    remote.gate.clear()
    async with served_node(remote=remote) as one:
        acquiring = asyncio.create_task(one.client.acquire(CHAIN, lease_id="given up"))
        twin = asyncio.create_task(one.client.acquire(CHAIN, lease_id="kept"))
        await asyncio.sleep(0.05)
        await one.client.release("given up")
        remote.gate.set()
        assert not (await acquiring).runs
        assert (await twin).hit_tokens == 2560
        assert (await one.client.stats()).lease_count == 1
        await one.client.release("kept")
        assert (await one.client.stats()).lease_count == 0


async def test_a_caller_cancelled_while_it_loads_leaves_no_pin() -> None:
    remote = MemoryRemote()
    await stored(remote, 20)
    async with served_node(remote=remote) as one:
        for turn in range(20):
            acquiring = asyncio.create_task(one.client.acquire(CHAIN, 10 + turn % 10))
            await asyncio.sleep(turn * 0.0005)
            acquiring.cancel()
            await asyncio.gather(acquiring, return_exceptions=True)
        one.node.acquirer.release_owner("owner")
        await asyncio.sleep(0.05)
        one.node.acquirer.release_owner("owner")
        assert (await one.client.stats()).lease_count == 0
        assert (await one.client.acquire(CHAIN)).hit_tokens == 2560


async def test_a_shared_directory_carries_a_prefix_from_one_node_to_another(tmp_path: Path) -> None:
    url = f"dir://{tmp_path}?capacity_bytes=100000000"
    async with served_node("one", remote=open_remote(url)) as one:
        await one.client.put(items_of(CHAIN, 0, 150, [149]))
        await asyncio.wait_for(one.node.write_out(), 20)
    async with served_node("other", remote=open_remote(url)) as other:
        found = await other.client.acquire(CHAIN)
        assert found.hit_tokens == 150 * 128
        assert await other.client.read(found) == [*CHAIN.blocks(150), CHAIN.snapshot(149)]
        assert (await other.client.flush(everything=True)).remote_count == 151
