"""KV cache nodes that are killed, stopped and cut from NATS under load: what is read is always right."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from pathlib import Path

import grpc
import pytest
from shoal_common.errors import MeshError
from support.kv_client import KvClient, TestChain, items_of
from support.kv_cluster import Cluster, client, kv_cluster, read_back
from support.service_process import service_process
from support.waiting import until_async

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
NAMES = ("a", "b", "c")
SNAPSHOTS = (9, 69, 79)


def chain_of(number: int) -> TestChain:
    return TestChain(f"chaos {number}", 80)


async def put(cluster: Cluster, name: str, chain: TestChain) -> None:
    async with client(cluster.nodes[name]) as one:
        await one.put(items_of(chain, 0, 80, SNAPSHOTS))


async def try_read(cluster: Cluster, name: str, chain: TestChain) -> int:
    """A node that is gone is a miss; a wrong byte is an assertion."""
    async with client(cluster.nodes[name]) as one:
        try:
            return await read_back(one, chain)
        except (grpc.aio.AioRpcError, MeshError):
            return 0


async def test_nodes_that_die_and_come_back_under_load_never_give_a_wrong_byte(tmp_path: Path) -> None:
    draw = random.Random(1)
    with kv_cluster(tmp_path, NAMES, copies="2") as cluster:
        found = 0
        for turn in range(12):
            chains = [chain_of(turn * 4 + number) for number in range(4)]
            writing = [asyncio.create_task(put(cluster, draw.choice(list(cluster.nodes)), chain)) for chain in chains]
            reading = [
                asyncio.create_task(try_read(cluster, draw.choice(list(cluster.nodes)), chain_of(number)))
                for number in range(max(0, turn * 4 - 16), turn * 4)
            ]
            await asyncio.sleep(draw.random() * 0.2)
            dead = draw.choice(NAMES)
            cluster.kill(dead)
            await asyncio.gather(*writing, return_exceptions=True)
            results = await asyncio.gather(*reading, return_exceptions=True)
            wrong = [one for one in results if isinstance(one, AssertionError)]
            assert not wrong
            found += sum(one > 0 for one in results if isinstance(one, int))
            await asyncio.to_thread(cluster.start, dead, copies="2")
        await asyncio.to_thread(cluster.wait_for_peers)
        assert found > 20
        for name in NAMES:
            async with client(cluster.nodes[name]) as one:

                async def is_free(one: KvClient = one) -> bool:
                    return (await one.stats()).lease_count == 0

                # Pins of a dead node end when its presence lapses.
                await until_async(is_free, timeout_s=15, what=f"leases at 0 on {name}")


def test_acknowledged_puts_survive_every_kill(tmp_path: Path) -> None:
    environment = {
        "SHOAL_KV_CACHE_SSD_DIRECTORY": str(tmp_path / "disk"),
        "SHOAL_KV_CACHE_SSD_BYTES": str(256 << 20),
        "SHOAL_KV_CACHE_SSD_SEGMENT_FILE_BYTES": str(1 << 20),
        "SHOAL_KV_CACHE_SSD_FSYNC": "always",
        "SHOAL_KV_CACHE_MAX_ENTRIES": "100000",
        "SHOAL_KV_CACHE_RAM_BYTES": str(4 << 20),
    }
    draw = random.Random(2)
    acknowledged: list[TestChain] = []

    async def put_until(popen_kill_s: float, round_number: int) -> None:
        give_up_s = time.monotonic() + popen_kill_s
        async with client(node) as one:
            for number in range(10_000):
                if time.monotonic() > give_up_s:
                    return
                chain = TestChain(f"acknowledged {round_number} {number}", 20)
                await one.put(items_of(chain, 0, 20, (19,)))
                acknowledged.append(chain)

    async def check() -> None:
        async with client(node) as one:
            for chain in acknowledged:
                assert await read_back(one, chain) == 20 * 128, chain.name

    for round_number in range(8):
        with service_process("shoal_kv_cache", log=tmp_path / f"{round_number}.log", environment=environment) as node:
            asyncio.run(check())
            killer = asyncio.Runner()

            async def load(round_number: int = round_number) -> None:
                putting = asyncio.create_task(put_until(3.0, round_number))
                await asyncio.sleep(0.05 + draw.random() * 0.5)
                node.popen.kill()
                await asyncio.gather(putting, return_exceptions=True)

            with killer:
                killer.run(load())
            node.popen.wait()
    assert len(acknowledged) > 20


async def test_a_stopped_peer_delays_nobody_longer_than_its_timeout(tmp_path: Path) -> None:
    with kv_cluster(tmp_path, NAMES, peer_timeout_s="0.5") as cluster:
        for number in range(6):
            await put(cluster, "a", chain_of(number))
        await asyncio.to_thread(cluster.wait_until_written)
        cluster.nodes["c"].popen.send_signal(signal.SIGSTOP)
        try:
            slowest_s = 0.0
            for number in range(6):
                started_s = time.monotonic()
                await try_read(cluster, "b", chain_of(number))
                slowest_s = max(slowest_s, time.monotonic() - started_s)
            assert slowest_s < 3
        finally:
            cluster.nodes["c"].popen.send_signal(signal.SIGCONT)


async def test_nodes_keep_each_other_while_nats_is_away(tmp_path: Path) -> None:
    with kv_cluster(tmp_path, NAMES) as cluster:
        cluster.nats.stop()
        chain = chain_of(0)
        await put(cluster, "a", chain)
        await asyncio.to_thread(cluster.wait_until_written)
        assert await try_read(cluster, "b", chain) == 80 * 128
        cluster.nats.start()
        await asyncio.to_thread(cluster.wait_for_peers, 30.0)
        assert await try_read(cluster, "c", chain) == 80 * 128
