"""Several nodes: owners hold what others put, local nodes cache in front of them, a death costs its share only."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
import pytest
from shoal.kv_cache.v1 import kv_cache_service_pb2 as pb
from shoal_kv_cache.core.rendezvous import Ring
from support.kv_client import TestChain, items_of
from support.kv_nodes import ServedNode, introduce, served_cluster, served_node

NAMES = ["a", "b", "c"]


def owner_of(chain: TestChain, block: int, names: Sequence[str] = NAMES) -> str:
    return Ring(names, copies=1).owners(chain.hashes[block // 64 * 64])[0]


def by_name(nodes: Sequence[ServedNode]) -> dict[str, ServedNode]:
    return {one.node.node_id: one for one in nodes}


async def settled(nodes: Sequence[ServedNode]) -> None:
    """All that was put has been sent on."""
    await asyncio.wait_for(asyncio.gather(*(one.node.write_out() for one in nodes)), 20)


def chain_with_owners(names: Sequence[str], segments: int) -> TestChain:
    """A chain whose segments have several owners, none of them alone."""
    for number in range(100):
        chain = TestChain(f"chain {number}", 64 * segments)
        if len({owner_of(chain, 64 * one, names) for one in range(segments)}) == min(len(names), segments):
            return chain
    raise AssertionError("no such chain")


async def test_what_was_put_at_one_node_is_found_whole_from_every_other_and_cached_there() -> None:
    chain = chain_with_owners(NAMES, 3)
    async with served_cluster(NAMES) as nodes:
        writer, reader = nodes[0], nodes[2]
        assert await writer.client.put(items_of(chain, 0, 192, [149, 191])) == 194
        await settled(nodes)
        for number, one in enumerate(nodes):
            _, blocks, _ = await one.client.held()
            owned = {hash_ for index, hash_ in enumerate(chain.hashes) if owner_of(chain, index) == NAMES[number]}
            assert blocks == (set(chain.hashes) if one is writer else owned)
        found = await reader.client.acquire(chain)
        assert (found.hit_tokens, found.present_tokens) == (192 * 128, 192 * 128)
        assert await reader.client.read(found) == [*chain.blocks(192), chain.snapshot(191)]
        # Copies are kept, told of, and need no peer the next time.
        _, blocks, snapshots = await reader.client.held()
        assert (blocks, snapshots) == (set(chain.hashes), {chain.hashes[191]})
        read_bytes = (await reader.client.tier(pb.TIER_PEERS)).read_bytes
        again = await reader.client.acquire(chain)
        assert again.hit_tokens == 192 * 128
        assert (await reader.client.tier(pb.TIER_PEERS)).read_bytes == read_bytes


async def test_only_what_is_missing_here_is_pulled_from_owners() -> None:
    chain = TestChain("partly", 128)
    async with served_cluster(NAMES) as nodes:
        await nodes[0].client.put(items_of(chain, 0, 128, [127]))
        await nodes[1].client.put(items_of(chain, 0, 40))
        await settled(nodes)
        found = await nodes[1].client.acquire(chain)
        assert found.hit_tokens == 128 * 128
        owned = sum(owner_of(chain, index) == "b" for index in range(40, 128))
        pulled = (await nodes[1].client.tier(pb.TIER_PEERS)).read_bytes
        has_snapshot = owner_of(chain, 127) == "b"
        assert pulled == (128 - 40 - owned) * 1000 + (0 if has_snapshot else 5000)


async def test_without_a_node_only_its_segments_are_missed_and_a_new_one_takes_only_its_share() -> None:
    chains = [TestChain(f"share {number}", 64) for number in range(24)]
    async with served_cluster(NAMES) as nodes:
        for chain in chains:
            await nodes[0].client.put(items_of(chain, 0, 3, [2]), is_from_peer=False)
        await settled(nodes)
        reader, dead = nodes[1], nodes[2]
        await dead.kill()
        reader.node.members.down("c")
        for chain in chains:
            found = await reader.client.acquire(chain, 3)
            was_lost = owner_of(chain, 0) == "c"
            # The writer keeps a copy too, and now owns half of what was the dead one's.
            has_new_owner = owner_of(chain, 0, ["a", "b"]) == "a"
            assert found.hit_tokens == (0 if was_lost and not has_new_owner else 384)
    async with served_cluster(NAMES) as nodes, served_node("d") as new:
        for chain in chains:
            await nodes[0].client.put(items_of(chain, 0, 3, [2]))
        await settled(nodes)
        introduce([*nodes, new])
        for chain in chains:
            has_moved = owner_of(chain, 0, [*NAMES, "d"]) == "d"
            is_here = owner_of(chain, 0) == "b"
            found = await nodes[1].client.acquire(chain, 3)
            assert found.hit_tokens == (0 if has_moved and not is_here else 384)


async def test_with_two_copies_a_death_costs_nothing() -> None:
    chains = [TestChain(f"copies {number}", 64) for number in range(12)]
    async with served_cluster(NAMES, copies=2) as nodes:
        for chain in chains:
            await nodes[0].client.put(items_of(chain, 0, 3, [2]))
        await settled(nodes)
        await nodes[0].kill()
        for one in nodes[1:]:
            one.node.members.down("a")
        for chain in chains:
            assert (await nodes[1].client.acquire(chain, 3)).hit_tokens == 384


async def test_a_stopped_peer_costs_its_timeout_once_and_then_nothing() -> None:
    async with served_node("a", peer_timeout_s=0.3) as one, served_node("b") as other:
        introduce([one, other])
        await other.kill()
        chains = [TestChain(f"stopped {number}", 64) for number in range(40)]
        for chain in chains:
            assert (await one.client.acquire(chain, 3)).hit_tokens == 0
        failures = (await one.client.tier(pb.TIER_PEERS)).failure_count
        assert failures == 1


async def test_a_damaged_copy_at_an_owner_is_dropped_there_and_here_it_is_a_miss() -> None:
    chain = next(one for one in (TestChain(f"bad {n}", 64) for n in range(99)) if owner_of(one, 0, "ab") == "b")
    async with served_cluster(["a", "b"]) as nodes:
        reader, owner = nodes
        await owner.client.put(items_of(chain, 0, 10))
        slab = owner.node.store.index.page(0, 100)[0][4].slab
        assert slab is not None
        owner.node.store.ram.arena.write(slab, 0, b"damage")
        assert (await reader.client.acquire(chain)).replay_tokens == 0
        assert (await owner.client.acquire(chain)).replay_tokens == 4 * 128
        # And the next time what is left there serves.
        assert (await reader.client.acquire(chain)).replay_tokens == 4 * 128


@pytest.mark.parametrize("is_owner_damaged", [False, True])
async def test_of_a_block_reported_as_damaged_every_bad_copy_goes_and_every_good_one_stays(
    is_owner_damaged: bool,
) -> None:
    chain = next(one for one in (TestChain(f"bad {n}", 64) for n in range(99)) if owner_of(one, 0) == "b")
    async with served_cluster(NAMES, copies=1) as nodes:
        writer, owner, _ = nodes
        await writer.client.put(items_of(chain, 0, 10))
        await settled(nodes)
        for one in nodes[: 1 + is_owner_damaged]:
            slab = one.node.store.index.page(0, 100)[0][5].slab
            assert slab is not None
            one.node.store.ram.arena.write(slab, 0, b"damage")
        await writer.client.report(chain, 5)
        assert (await writer.client.held())[1] == set(chain.hashes[:5])
        assert (await owner.client.held())[1] == set(chain.hashes[: 5 if is_owner_damaged else 10])
        # What is left anywhere serves.
        assert (await writer.client.acquire(chain)).replay_tokens == (5 if is_owner_damaged else 10) * 128


async def test_another_tenant_finds_nothing_at_peers_either() -> None:
    chain = TestChain("private", 64)
    async with served_cluster(NAMES) as nodes:
        await nodes[0].client.put(items_of(chain, 0, 10))
        await settled(nodes)
        for one in nodes:
            found = await one.client.acquire(chain, tenant=b"x" * 32)
            assert (found.hit_tokens, found.replay_tokens, found.present_tokens) == (0, 0, 0)


async def test_leases_at_peers_end_with_the_load() -> None:
    chain = TestChain("leases", 128)
    async with served_cluster(NAMES) as nodes:
        await nodes[0].client.put(items_of(chain, 0, 128, [127]))
        await settled(nodes)
        await nodes[1].client.acquire(chain, lease_id="mine")
        assert [(await one.client.stats()).lease_count for one in nodes] == [0, 1, 0]
        await nodes[1].client.release("mine")
        assert [(await one.client.stats()).lease_count for one in nodes] == [0, 0, 0]


async def test_a_call_to_a_node_that_is_gone_is_unavailable() -> None:
    async with served_node() as one:
        await one.kill()
        with pytest.raises(grpc.aio.AioRpcError):
            await one.client.stats()
