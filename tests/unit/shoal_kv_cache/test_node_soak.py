"""Everything at once on two nodes with small memories, disks and a store: right bytes, and nothing left at the end."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.kv_client import SLAB_BYTES, TestChain, items_of
from support.kv_nodes import ServedNode, introduce, open_disk, served_node
from support.memory_remote import MemoryRemote

# Forks of three prompts: chains that share their first blocks do so by name.
CHAINS = [TestChain(f"soak {number}", 70) for number in range(8)]
TENANTS = [b"t" * 32, b"u" * 32]


class Walk:
    """One seeded caller."""

    def __init__(self, seed: int, nodes: list[ServedNode]) -> None:
        self._draw, self._nodes, self._seed = random.Random(seed), nodes, seed
        self._leases: list[tuple[ServedNode, str]] = []
        self.read_count = 0

    async def steps(self, count: int) -> None:
        for number in range(count):
            one, chain = self._draw.choice(self._nodes), self._draw.choice(CHAINS)
            tenant = TENANTS[CHAINS.index(chain) % 2]
            try:
                await self._step(one, chain, tenant, f"{self._seed}-{number}")
            except grpc.aio.AioRpcError as error:
                # All of a small memory may be pinned, or the bound on leases reached.
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise

    async def _step(self, one: ServedNode, chain: TestChain, tenant: bytes, lease_id: str) -> None:
        what = self._draw.choice("ppaaaaarrf")
        end = self._draw.randint(1, chain.count)
        if what == "p":
            snapshots = [end - 1] if self._draw.random() < 0.5 else []
            begin = self._draw.choice([0, 0, 64 if end > 64 else 0])
            await one.client.put(items_of(chain, begin, end, snapshots), tenant=tenant)
        elif what == "a":
            found = await one.client.acquire(chain, end, tenant=tenant, lease_id=lease_id)
            self._leases.append((one, lease_id))
            tokens = max(found.hit_tokens, found.replay_tokens)
            wanted = chain.blocks(tokens // 128)
            if found.hit_tokens:
                wanted.append(chain.snapshot(found.hit_tokens // 128 - 1))
            assert await one.client.read(found) == wanted
            self.read_count += len(wanted)
            other = await one.client.acquire(chain, end, tenant=b"v" * 32)
            assert other.present_tokens == 0
        elif what == "r" and self._leases:
            where, known = self._leases.pop(self._draw.randrange(len(self._leases)))
            await where.client.release(known)
        elif what == "f" and self._draw.random() < 0.2:
            await one.client.flush(tenant_tag=tenant)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)])
async def test_bytes_are_right_and_nothing_is_left(tmp_path: Path, seed: int) -> None:
    remote = MemoryRemote()
    disks = [open_disk(tmp_path / name, capacity_bytes=200 * 4096, segment_file_bytes=100_000) for name in "ab"]
    settings: dict[str, Any] = {"ram_bytes": 250 * SLAB_BYTES, "max_entries": 600, "max_leases": 64}
    async with (
        served_node("a", ssd=disks[0], remote=remote, **settings) as a,
        served_node("b", ssd=disks[1], remote=remote, **settings) as b,
    ):
        introduce([a, b])
        walks = [Walk(10 * seed + number, [a, b]) for number in range(4)]
        await asyncio.gather(*(walk.steps(60) for walk in walks))
        assert sum(walk.read_count for walk in walks) > 200
        for one in (a, b):
            one.node.acquirer.release_owner("owner")
            await asyncio.wait_for(one.node.write_out(), 30)
        for _ in range(2):
            for one in (a, b):
                await one.client.flush(everything=True)
        for one, disk in ((a, disks[0]), (b, disks[1])):
            node = one.node
            assert (await one.client.stats()).lease_count == 0
            assert len(node.store.index) == 0
            assert len(node.exports) == 0
            assert node.store.ram.used_bytes == 0
            assert not node.store.ram._holds
            assert disk.stats().record_count == 0
            assert not node.puts._filling
        assert not remote.held
