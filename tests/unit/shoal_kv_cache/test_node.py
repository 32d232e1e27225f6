"""A node served by gRPC: puts are atomic, leases are honest, damage never gets in."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

import grpc
import pytest
from shoal.common.v1 import kv_transport_pb2 as transport_pb
from shoal.common.v1 import kv_transport_service_pb2_grpc as transport_grpc
from shoal.kv_cache.v1 import kv_cache_service_pb2 as pb
from shoal.kv_cache.v1 import kv_cache_service_pb2_grpc as pb_grpc
from shoal_common.bus import Bus
from shoal_common.kv_transport import KvPuller, KvTransportServicer, PayloadSpec, describe
from shoal_common.rpc.channels import Channel
from shoal_common.rpc.readiness import Readiness
from shoal_common.rpc.server import RpcServer, Service
from shoal_common.telemetry import Metrics
from shoal_kv_cache.config import KvCacheConfig
from shoal_kv_cache.node import Node as KvNode
from shoal_kv_cache.servicer import KvCacheServicer
from shoal_kv_cache.store import Store

SIZE, SLAB = 1000, 1024
HASHES = [bytes([number]) * 32 for number in range(1, 9)]
KINDS = [transport_pb.TRANSPORT_KIND_SHM, transport_pb.TRANSPORT_KIND_GRPC]


class Node:
    """A served node and a client of it."""

    def __init__(self, store: Store, channel: Channel) -> None:
        self.store, self.channel = store, channel
        self.stub = pb_grpc.KvCacheServiceStub(channel.as_grpc())

    async def put(self, payloads: Iterable[tuple[transport_pb.Payload, bytes, bytes]], *, damage: bool = False) -> int:
        """Puts (payload, data, parent hash) triples; returns how many were stored."""
        items = list(payloads)
        call = self.stub.Put(None, timeout=10)
        begin = pb.PutBegin(
            put_id="p",
            kv_id="kv",
            numerics_id="num",
            payloads=[one for one, _, _ in items],
            parent_hashes=[parent for _, _, parent in items],
        )
        await call.write(pb.PutRequest(begin=begin))
        answer = await call.read()
        assert isinstance(answer, pb.PutResponse)
        for payload, data, _ in items:
            if payload.payload_id in answer.wanted.payload_ids:
                sent = bytes([data[0] ^ 1]) + data[1:] if damage else data
                for offset in range(0, len(sent), 300):
                    part = pb.PutData(payload_id=payload.payload_id, offset=offset, data=sent[offset : offset + 300])
                    await call.write(pb.PutRequest(data=part))
        await call.write(pb.PutRequest(commit=pb.PutCommit()))
        committed = await call.read()
        assert isinstance(committed, pb.PutResponse)
        return committed.committed.stored_count

    async def acquire(
        self, count: int, *, lease_id: str = "lease", replay: bool = True, puller: KvPuller | None = None
    ) -> pb.AcquireResponse:
        return await self.stub.Acquire(
            pb.AcquireRequest(
                lease_id=lease_id,
                owner_id="owner",
                kv_id="kv",
                numerics_id="num",
                block_hashes=HASHES[:count],
                max_hit_tokens=count * 128,
                want_replay=replay,
                offer=(puller or KvPuller()).offer,
            ),
            timeout=10,
        )


def block(
    index: int, *, kind: transport_pb.PayloadKind.ValueType = transport_pb.PAYLOAD_KIND_BLOCK
) -> tuple[transport_pb.Payload, bytes, bytes]:
    data = os.urandom(SIZE)
    spec = PayloadSpec(
        kind=kind,
        position_begin=index * 128,
        position_end=(index + 1) * 128,
        shape=(SIZE,),
        dtype="uint8",
        kv_id="kv",
        block_hash=HASHES[index],
    )
    is_block = kind == transport_pb.PAYLOAD_KIND_BLOCK
    parent = (HASHES[index - 1] if index else bytes(32)) if is_block else HASHES[index]
    return describe(index + (0 if is_block else 100), spec, data), data, parent


def first_block(number: int) -> tuple[transport_pb.Payload, bytes, bytes]:
    """The first block of another chain."""
    payload, data, _ = block(0)
    payload.block_hash = HASHES[number]
    payload.payload_id = number
    return payload, data, bytes(32)


@asynccontextmanager
async def node(*, ram_bytes: int = 1 << 20, clock: Callable[[], float] = time.monotonic) -> AsyncIterator[Node]:
    config = KvCacheConfig(ram_bytes=ram_bytes, put_timeout_s=5, max_leases=8, max_entries=1000)
    made = KvNode(config, Bus.off(), mesh="local", instance_id="node", node_id="node", clock=clock)
    made.start()
    await made.flushes.catch_up([])
    readiness = Readiness()
    server = RpcServer(
        [
            Service(
                "shoal.kv_cache.v1.KvCacheService",
                pb_grpc.add_KvCacheServiceServicer_to_server,
                KvCacheServicer(made, config, instance_id="node"),
            ),
            Service(
                "shoal.common.v1.KvTransportService",
                transport_grpc.add_KvTransportServiceServicer_to_server,
                KvTransportServicer(made.exports),
            ),
        ],
        listen_address="127.0.0.1:0",
        readiness=readiness,
        metrics=Metrics(),
    )
    channel = Channel(await server.start())
    try:
        yield Node(made.store, channel)
    finally:
        await channel.close()
        await server.stop(0)
        await made.stop()


@pytest.mark.parametrize("kinds", [KINDS, KINDS[1:]])
async def test_what_was_put_comes_back_as_it_was(kinds: list[transport_pb.TransportKind.ValueType]) -> None:
    puller = KvPuller(kinds)
    async with node() as one:
        items = [block(0), block(1), block(1, kind=transport_pb.PAYLOAD_KIND_ENCODER_WINDOW)]
        assert await one.put(items) == 3
        assert await one.put(items) == 0
        found = await one.acquire(4, puller=puller)
        assert (found.hit_tokens, found.present_tokens) == (256, 256)
        assert found.grant.kind == kinds[0]
        pulled = await puller.pull_runs(found.grant, found.runs, one.channel, timeout_s=10)
        assert pulled == [data for _, data, _ in items]
        puller.close()


async def test_the_same_lease_twice_is_one_lease_and_release_is_idempotent() -> None:
    async with node() as one:
        await one.put([block(0)])
        assert await one.acquire(1) == await one.acquire(1)
        assert len(one.store.index.leases) == 1
        for _ in range(2):
            await one.stub.Release(pb.ReleaseRequest(lease_id="lease"), timeout=10)
        assert len(one.store.index.leases) == 0


async def test_a_damaged_put_stores_nothing_and_gives_its_room_back() -> None:
    async with node() as one:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await one.put([block(0), block(1)], damage=True)
        assert caught.value.code() is grpc.StatusCode.DATA_LOSS
        assert len(one.store.index) == 0
        assert one.store.ram.used_bytes == 0


async def test_a_writer_that_leaves_before_commit_leaves_nothing() -> None:
    async with node() as one:
        payload, data, parent = block(0)
        call = one.stub.Put(None, timeout=10)
        begin = pb.PutBegin(put_id="p", kv_id="kv", numerics_id="num", payloads=[payload], parent_hashes=[parent])
        await call.write(pb.PutRequest(begin=begin))
        await call.read()
        await call.write(pb.PutRequest(data=pb.PutData(payload_id=0, data=data)))
        await call.done_writing()
        assert not isinstance(await call.read(), pb.PutResponse)
        assert one.store.ram.used_bytes == 0
        assert (await one.acquire(1)).present_tokens == 0


async def test_a_full_node_evicts_what_is_not_pinned_and_refuses_when_all_is() -> None:
    async with node(ram_bytes=3 * SLAB) as one:
        await one.put([block(0), block(1), block(2)])
        await one.acquire(2, lease_id="pins two")
        assert await one.put([first_block(4)]) == 1
        assert (await one.acquire(3, lease_id="look")).present_tokens == 256
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await one.put([first_block(5), first_block(6)])
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert one.store.ram.used_bytes <= 3 * SLAB
        assert (await one.acquire(2, lease_id="still")).present_tokens == 256


async def test_flush_is_complete_and_says_what_it_means() -> None:
    async with node() as one:
        await one.put([block(0)])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await one.stub.Flush(pb.FlushRequest(), timeout=10)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await one.stub.Flush(pb.FlushRequest(kv_id="other"), timeout=10)).block_count == 0
        assert (await one.stub.Flush(pb.FlushRequest(everything=True), timeout=10)).block_count == 1
        assert one.store.ram.used_bytes == 0


async def test_the_list_is_as_of_its_sequence_number() -> None:
    async with node() as one:
        await one.put([block(0), block(1)])
        await one.put([block(2)])
        messages = [message async for message in one.stub.ListHeld(pb.ListHeldRequest(), timeout=10)]
        assert messages[0].header.sequence_number == 2
        assert sorted(messages[1].page.block_hashes) == sorted(HASHES[:3])


@pytest.mark.parametrize(
    "change",
    [
        {"position_end": 130},
        {"position_begin": 1},
        {"block_hash": b"short"},
        {"kv_id": "other"},
        {"size_bytes": 7},
        {"dtype": "int4"},
        {"kind": transport_pb.PAYLOAD_KIND_DRAFT_WINDOW},
    ],
)
async def test_a_malformed_payload_is_refused_with_its_field(change: dict[str, object]) -> None:
    async with node() as one:
        payload, data, parent = block(0)
        for name, value in change.items():
            setattr(payload, name, value)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await one.put([(payload, data, parent)])
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "payloads[0]" in (caught.value.details() or "")
