"""The workers' client of kv_cache against a real node."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import grpc
import pytest
from shoal.common.v1 import kv_transport_pb2 as transport_pb
from shoal.kv_cache.v1 import kv_cache_service_pb2 as pb
from shoal.kv_cache.v1 import kv_cache_service_pb2_grpc as rpc
from shoal_common.chains import HashChain
from shoal_common.kv_cache_client import CacheItem, CacheNodes, CacheWriter, Prefix, PrefixCache
from shoal_common.kv_transport import KvPuller, PayloadSpec
from shoal_common.rpc import Channels
from shoal_common.telemetry import Metrics
from support.service_process import ServiceProcess, service_process
from support.waiting import until_async

Kinds: TypeAlias = "tuple[transport_pb.TransportKind.ValueType, ...]"
BOTH: Kinds = (transport_pb.TRANSPORT_KIND_SHM, transport_pb.TRANSPORT_KIND_GRPC)
KV_ID, NUMERICS_ID, TENANT = "kv", "numerics", b"t" * 32
BLOCK_BYTES, SNAPSHOT_BYTES = 1000, 3 << 20


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with service_process("shoal_kv_cache", log=tmp_path_factory.mktemp("kv") / "log") as started:
        yield started


@dataclass
class Client:
    cache: PrefixCache
    writer: CacheWriter
    metrics: Metrics


@contextlib.asynccontextmanager
async def client(address: str, *, kinds: Kinds = BOTH, max_queued_bytes: int = 64 << 20) -> AsyncIterator[Client]:
    channels, puller, metrics = Channels(), KvPuller(kinds), Metrics()
    nodes = CacheNodes(address=address, watcher=None)
    cache = PrefixCache(
        channels=channels,
        puller=puller,
        nodes=nodes,
        metrics=metrics,
        owner_id="me",
        acquire_timeout_s=5,
        pull_timeout_s=5,
        lease_s=30,
    )
    writer = CacheWriter(
        channels=channels,
        nodes=nodes,
        metrics=metrics,
        owner_id="me",
        max_queued_bytes=max_queued_bytes,
        put_timeout_s=5,
    )
    running = asyncio.create_task(writer.run())
    try:
        yield Client(cache, writer, metrics)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await cache.close()
        puller.close()
        await channels.close()


def block(chain: HashChain, index: int) -> CacheItem:
    spec = PayloadSpec(
        kind=transport_pb.PAYLOAD_KIND_BLOCK,
        position_begin=index * 128,
        position_end=index * 128 + 128,
        shape=(BLOCK_BYTES,),
        dtype="uint8",
        kv_id=KV_ID,
        block_hash=chain.hashes[index],
    )
    return CacheItem(spec=spec, parent_hash=chain.parent_of(index), data=bytes([index]) * BLOCK_BYTES)


def snapshot(chain: HashChain, tokens: int) -> CacheItem:
    spec = PayloadSpec(
        kind=transport_pb.PAYLOAD_KIND_ENCODER_WINDOW,
        position_begin=tokens - 128,
        position_end=tokens,
        shape=(1, 128, SNAPSHOT_BYTES // 128),
        dtype="uint8",
        kv_id=KV_ID,
        block_hash=chain.hashes[tokens // 128 - 1],
    )
    return CacheItem(spec=spec, parent_hash=chain.parent_of(tokens // 128 - 1), data=b"s" * SNAPSHOT_BYTES)


async def read(prefix: Prefix, tokens: int) -> list[bytes]:
    """The blocks as bytes."""
    return [bytes(one) for one in await prefix.blocks(tokens) or ()]


def chain_of(name: int, tokens: int = 640) -> HashChain:
    return HashChain(bytes([name]) * 32, list(range(tokens)))


@pytest.mark.parametrize("kinds", [BOTH, BOTH[1:]], ids=["shm", "grpc"])
async def test_what_was_written_is_found_and_read_back(node: ServiceProcess, kinds: Kinds) -> None:
    chain = chain_of(kinds[0])
    async with client(node.address, kinds=kinds) as one:
        items = [*(block(chain, index) for index in range(5)), snapshot(chain, 384)]
        assert one.writer.offer(items, numerics_id=NUMERICS_ID, tenant_tag=TENANT) == 6
        await asyncio.wait_for(one.writer.flush(), 10)
        async with one.cache.acquired(
            chain.hashes, kv_id=KV_ID, numerics_id=NUMERICS_ID, tenant_tag=TENANT, max_hit_tokens=512, want_replay=True
        ) as prefix:
            assert (prefix.hit_tokens, prefix.replay_tokens, prefix.present_tokens) == (384, 512, 640)
            assert await read(prefix, 512) == [bytes([index]) * BLOCK_BYTES for index in range(4)]
            assert await prefix.blocks(640) is None
            assert bytes(await prefix.snapshot() or b"") == b"s" * SNAPSHOT_BYTES
        async with one.cache.acquired(
            chain.hashes, kv_id=KV_ID, numerics_id=NUMERICS_ID, tenant_tag=TENANT, max_hit_tokens=256, blocks_only=True
        ) as prefix:
            assert prefix.pinned_tokens == 256
            assert await prefix.snapshot() is None


async def test_other_numerics_never_hit(node: ServiceProcess) -> None:
    chain = chain_of(7)
    async with client(node.address) as one:
        one.writer.offer([block(chain, 0)], numerics_id=NUMERICS_ID, tenant_tag=TENANT)
        await asyncio.wait_for(one.writer.flush(), 10)
        async with one.cache.acquired(
            chain.hashes, kv_id=KV_ID, numerics_id="other", tenant_tag=TENANT, max_hit_tokens=128, blocks_only=True
        ) as prefix:
            assert prefix.pinned_tokens == 0


async def test_a_caller_cancelled_at_any_moment_leaves_no_lease(node: ServiceProcess) -> None:
    chain = chain_of(60)
    async with client(node.address) as one:
        one.writer.offer([block(chain, index) for index in range(5)], numerics_id=NUMERICS_ID, tenant_tag=TENANT)
        await asyncio.wait_for(one.writer.flush(), 10)

        async def hold() -> None:
            async with one.cache.acquired(
                chain.hashes,
                kv_id=KV_ID,
                numerics_id=NUMERICS_ID,
                tenant_tag=TENANT,
                max_hit_tokens=640,
                want_replay=True,
            ) as prefix:
                assert prefix.replay_tokens == 640
                await asyncio.sleep(3600)

        for turn in range(40):
            holding = asyncio.create_task(hold())
            await asyncio.sleep(turn * 0.0001)
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)
        async with grpc.aio.insecure_channel(node.address) as channel:
            stub = rpc.KvCacheServiceStub(channel)

            async def is_free() -> bool:
                return (await stub.GetStats(pb.GetStatsRequest(), timeout=5)).lease_count == 0

            await until_async(is_free, what="leases at 0")


async def test_a_node_that_is_not_there_is_a_miss_and_loses_writes_only() -> None:
    chain = chain_of(8)
    async with client("127.0.0.1:1") as one:
        one.writer.offer([block(chain, 0)], numerics_id=NUMERICS_ID, tenant_tag=TENANT)
        await asyncio.wait_for(one.writer.flush(), 10)
        async with one.cache.acquired(
            chain.hashes, kv_id=KV_ID, numerics_id=NUMERICS_ID, tenant_tag=TENANT, max_hit_tokens=512
        ) as prefix:
            assert (prefix.hit_tokens, prefix.pinned_tokens) == (0, 0)
        assert b'shoal_kv_write_dropped_total{reason="put_failed"} 1.0' in one.metrics.render()


async def test_a_full_queue_drops_and_counts() -> None:
    chain = chain_of(9)
    async with client("127.0.0.1:1", max_queued_bytes=2 * BLOCK_BYTES) as one:
        items = [block(chain, index) for index in range(3)]
        assert one.writer.offer(items, numerics_id=NUMERICS_ID, tenant_tag=TENANT) == 2
        assert b'shoal_kv_write_dropped_total{reason="queue_full"} 1.0' in one.metrics.render()


def test_a_chain_grown_in_pieces_has_the_hashes_of_the_whole() -> None:
    whole = chain_of(3)
    pieces = HashChain(bytes([3]) * 32)
    for start in range(0, 640, 50):
        pieces.extend(range(start, min(start + 50, 640)))
    fork = pieces.fork()
    fork.extend(range(200))
    assert pieces.hashes == whole.hashes
    assert fork.hashes[:5] == whole.hashes
    assert len(fork.hashes) == 6
    assert fork.token_count == 840


def grpc_acquires(node: ServiceProcess) -> int:
    """Acquires that came by gRPC since the node started."""
    with urllib.request.urlopen(f"http://{node.admin}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    name = "shoal_rpc_server_duration_seconds_count{"
    return sum(round(float(line.split()[-1])) for line in lines if line.startswith(name) and "/Acquire" in line)


async def test_only_the_first_of_many_misses_goes_by_grpc(node: ServiceProcess) -> None:
    before = grpc_acquires(node)
    async with client(node.address) as one:
        for turn in range(4):
            async with one.cache.acquired(
                chain_of(200 + turn).hashes,
                kv_id=KV_ID,
                numerics_id=NUMERICS_ID,
                tenant_tag=TENANT,
                max_hit_tokens=640,
            ) as prefix:
                assert (prefix.hit_tokens, await prefix.blocks(128)) == (0, None)
    assert grpc_acquires(node) == before + 1
