"""The workers' client of kv_cache on the wire: one call a get, releases that ride, puts that fill, faults that miss."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal.common.v1 import kv_transport_pb2 as transport_pb
from shoal_common.chains import HashChain
from shoal_common.kv_cache_client import CacheItem, CacheNodes, CacheWriter, Prefix, PrefixCache
from shoal_common.kv_cache_client.release_queue import ReleaseQueue
from shoal_common.kv_cache_client.runs import leading
from shoal_common.kv_transport import KvPuller, PayloadSpec
from shoal_common.rpc import Channels
from shoal_common.telemetry import Metrics
from support.kv_node import KvNode
from support.kv_ways import GRPC, SHM, TCP
from support.waiting import until

Kinds: TypeAlias = "tuple[transport_pb.TransportKind.ValueType, ...]"
WAYS = [pytest.param((SHM, TCP, GRPC), id="shm"), pytest.param((TCP, GRPC), id="tcp"), pytest.param((GRPC,), id="grpc")]
TENANT = b"t" * 32
BLOCK_BYTES = 3000


@dataclass
class Client:
    cache: PrefixCache
    writer: CacheWriter
    metrics: Metrics

    def acquired(self, chain: HashChain, tokens: int) -> contextlib.AbstractAsyncContextManager[Prefix]:
        return self.cache.acquired(
            chain.hashes,
            kv_id="kv",
            numerics_id="numerics",
            tenant_tag=TENANT,
            max_hit_tokens=tokens,
            want_replay=True,
            replay_reach_tokens=256,
            recompute_tokens_per_s=1000,
        )


@contextlib.asynccontextmanager
async def client(address: str, kinds: Kinds = (SHM, TCP, GRPC), *, fills: bool = True) -> AsyncIterator[Client]:
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
        max_queued_bytes=64 << 20,
        put_timeout_s=5,
        kinds=(SHM,) if fills else (),
    )
    running = asyncio.create_task(writer.run())
    try:
        yield Client(cache, writer, metrics)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        writer.close()
        await cache.close()
        puller.close()
        await channels.close()


def items(chain: HashChain, data: list[bytes], snapshot: bytes = b"") -> list[CacheItem]:
    made = [_item(chain, index, one, transport_pb.PAYLOAD_KIND_BLOCK) for index, one in enumerate(data)]
    if snapshot:
        made.append(_item(chain, len(data) - 1, snapshot, transport_pb.PAYLOAD_KIND_ENCODER_WINDOW))
    return made


def _item(chain: HashChain, index: int, data: bytes, kind: transport_pb.PayloadKind.ValueType) -> CacheItem:
    spec = PayloadSpec(
        kind=kind,
        position_begin=index * 128,
        position_end=index * 128 + 128,
        shape=(len(data),),
        dtype="uint8",
        kv_id="kv",
        block_hash=chain.hashes[index],
    )
    return CacheItem(spec=spec, parent_hash=chain.parent_of(index), data=data)


async def read(prefix: Prefix, tokens: int) -> list[bytes]:
    """The blocks as bytes."""
    return [bytes(one) for one in await prefix.blocks(tokens) or ()]


def chain_of(count: int) -> HashChain:
    return HashChain(os.urandom(32), list(range(count * 128)))


async def store(one: Client, chain: HashChain, data: list[bytes], snapshot: bytes = b"") -> None:
    offered = items(chain, data, snapshot)
    assert one.writer.offer(offered, numerics_id="numerics", tenant_tag=TENANT) == len(offered)
    await asyncio.wait_for(one.writer.flush(), 20)


@pytest.mark.parametrize("kinds", WAYS)
@pytest.mark.parametrize("fills", [True, False], ids=["filled", "sent"])
async def test_what_was_written_in_either_way_is_read_back_in_every_way(kinds: Kinds, fills: bool) -> None:
    chain, data, snapshot = chain_of(6), [os.urandom(BLOCK_BYTES) for _ in range(6)], os.urandom(2 << 20)
    async with KvNode(size_bytes=8 << 20) as node, client(node.address, kinds, fills=fills) as one:
        await store(one, chain, data, snapshot)
        assert node.filled_count == (7 if fills else 0)
        for _ in range(2):
            async with one.acquired(chain, 768) as prefix:
                assert (prefix.hit_tokens, prefix.present_tokens, prefix.pinned_tokens) == (768, 768, 768)
                assert await read(prefix, 768) == data
                assert await read(prefix, 256) == data[:2]
                assert await read(prefix, 0) == []
                assert await prefix.blocks(896) is None
                assert bytes(await prefix.snapshot() or b"") == snapshot
        assert node.stream is not None
        sent_by = node.stream
        await until(lambda: (sent_by.sent_bytes > 0) == (kinds[0] == TCP), what="the way that was granted")


async def test_a_put_into_memory_that_cannot_be_mapped_is_sent_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    chain, data = chain_of(3), [os.urandom(BLOCK_BYTES) for _ in range(3)]
    monkeypatch.setattr("shoal_common.kv_transport.mapped.ArenaView", _unmappable)
    async with KvNode(size_bytes=8 << 20) as node, client(node.address) as one:
        await store(one, chain, data)
        async with one.acquired(chain, 384) as prefix:
            assert await read(prefix, 384) == data


def _unmappable(name: str, nonce: bytes, *, is_writable: bool = False) -> None:
    from shoal_common.errors import FailedPrecondition

    raise FailedPrecondition("another mount namespace", reason="ARENA_NOT_SHARED")


async def test_a_request_says_whose_it_is_what_a_replay_costs_and_which_leases_have_ended() -> None:
    chain = chain_of(3)
    async with KvNode(size_bytes=8 << 20) as node, client(node.address) as one:
        await store(one, chain, [os.urandom(BLOCK_BYTES) for _ in range(3)])
        for _ in range(3):
            async with one.acquired(chain, 384):
                assert len(node.leases) == 1
        first, second, third = node.acquires
        assert (first.tenant_tag, first.replay_reach_tokens, first.recompute_tokens_per_s) == (TENANT, 256, 1000)
        assert list(first.release_lease_ids) == []
        assert list(second.release_lease_ids) == [first.lease_id]
        assert list(third.release_lease_ids) == [second.lease_id]
        # Nothing follows the last one: it goes by itself.
        await until(lambda: not node.leases, what="the last lease ends")


async def test_a_get_is_one_call_which_goes_by_the_stream_once_that_is_known() -> None:
    chain = chain_of(3)
    async with KvNode(size_bytes=8 << 20) as node, client(node.address) as one:
        await store(one, chain, [os.urandom(BLOCK_BYTES) for _ in range(3)])
        assert node.stream is not None
        for turn in range(4):
            async with one.acquired(chain, 384) as prefix:
                await prefix.blocks(384)
            assert len(node.acquires) == turn + 1
            assert node.stream.connection_count == (turn > 0)


async def test_calls_go_by_tcp_where_the_socket_for_calls_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    # As in another network namespace: the name means nothing there.
    monkeypatch.setattr("shoal_common.kv_transport.StreamServer.call_socket", "shoal-kv-calls-elsewhere")
    chain, data = chain_of(3), [os.urandom(BLOCK_BYTES) for _ in range(3)]
    async with KvNode(size_bytes=8 << 20) as node, client(node.address) as one:
        await store(one, chain, data)
        for turn in range(3):
            async with one.acquired(chain, 384) as prefix:
                assert await read(prefix, 384) == data
            assert node.stream is not None
            assert node.stream.connection_count == (turn > 0)


async def test_a_stream_that_ends_is_replaced_by_grpc_without_a_miss() -> None:
    chain, data = chain_of(3), [os.urandom(BLOCK_BYTES) for _ in range(3)]
    async with KvNode(size_bytes=8 << 20) as node, client(node.address, (TCP, GRPC)) as one:
        await store(one, chain, data)
        for turn in range(3):
            async with one.acquired(chain, 384) as prefix:
                assert await read(prefix, 384) == data
            if turn == 0 and node.stream is not None:
                node.stream.close()


async def test_damage_is_reported_by_the_hash_of_its_block_and_is_a_miss() -> None:
    chain, data = chain_of(6), [os.urandom(BLOCK_BYTES) for _ in range(6)]
    async with KvNode(size_bytes=8 << 20) as node, client(node.address) as one:
        await store(one, chain, data, b"s" * 5000)
        for kind, index in ((1, 4), (3, 5)):
            held = node.held[kind, chain.hashes[index]]
            node.arena.write(held.first, 9, bytes([node.arena.load(held.first, 10)[9] ^ 128]))
        async with one.acquired(chain, 768) as prefix:
            assert await read(prefix, 512) == data[:4]
            assert await prefix.blocks(768) is None
            assert await prefix.snapshot() is None
        assert node.reported == [chain.hashes[4], chain.hashes[5]]
        assert b'kv_cache_client_failures_total{call="pull",reason="CHECKSUM_MISMATCH"} 2.0' in one.metrics.render()


async def test_a_caller_cancelled_at_any_moment_leaves_no_lease() -> None:
    chain = chain_of(3)
    async with KvNode(size_bytes=8 << 20) as node, client(node.address) as one:
        await store(one, chain, [os.urandom(BLOCK_BYTES) for _ in range(3)])

        async def hold() -> None:
            async with one.acquired(chain, 384):
                await asyncio.Event().wait()

        for turn in range(40):
            holding = asyncio.create_task(hold())
            for _ in range(turn):
                await asyncio.sleep(0)
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)
        await until(lambda: not node.leases, what="leases at 0")


async def test_releases_of_a_failed_acquire_are_made_good() -> None:
    chain = chain_of(3)
    async with KvNode(size_bytes=8 << 20) as node, client(node.address) as one:
        await store(one, chain, [os.urandom(BLOCK_BYTES) for _ in range(3)])
        async with one.acquired(chain, 384):
            pass
        node.fails_next = True
        async with one.acquired(chain, 384) as prefix:
            assert prefix.pinned_tokens == 0
        await until(lambda: not node.leases, what="leases at 0")


async def test_closing_releases_what_still_waits() -> None:
    chain = chain_of(3)
    async with KvNode(size_bytes=8 << 20) as node:
        async with client(node.address) as one:
            await store(one, chain, [os.urandom(BLOCK_BYTES) for _ in range(3)])
            async with one.acquired(chain, 384):
                pass
            assert len(node.leases) == 1
        assert not node.leases


async def test_ids_that_nobody_takes_are_released_in_time_and_each_once() -> None:
    released: list[tuple[str, list[str]]] = []
    queue = ReleaseQueue(lambda address, ids: released.append((address, list(ids))), after_s=0.02)
    queue.add("a", ["1", "2"])
    queue.add("b", ["3"])
    assert queue.take("a") == ["1", "2"]
    assert queue.take("a") == []
    await until(lambda: bool(released), what="the timer")
    assert released == [("b", ["3"])]
    queue.add("a", [str(number) for number in range(64)])
    assert len(released) == 2  # many do not wait


@given(st.lists(st.integers(0, 5), max_size=5), st.integers(0, 20), st.integers(1, 3))
def test_the_leading_payloads_of_runs_are_those_of_their_list(counts: list[int], wanted: int, per: int) -> None:
    runs, number = [], 0
    for count in counts:
        slabs = range(number * per, (number + count) * per)
        checksums = range(number, number + count)
        runs.append(transport_pb.PayloadRun(first_payload_id=number, checksums=checksums, slabs=slabs))
        number += count
    found = leading(runs, wanted)
    assert [one for run in found for one in run.checksums] == list(range(min(wanted, number)))
    assert [one for run in found for one in run.slabs] == list(range(min(wanted, number) * per))
