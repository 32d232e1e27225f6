"""Chains of blocks with known bytes, and a bare client of a KV cache node: what tests put, find and read back."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.duration_pb2 import Duration
from shoal.common.v1 import kv_transport_pb2 as transport_pb
from shoal.kv_cache.v1 import kv_cache_service_pb2 as pb
from shoal.kv_cache.v1 import kv_cache_service_pb2_grpc as rpc
from shoal_common.kv_transport import KvPuller, PayloadSpec, describe
from shoal_common.rpc import Channel

KV_ID, NUMERICS_ID, TENANT = "kv", "numerics", b"t" * 32
BLOCK_BYTES, SNAPSHOT_BYTES = 1000, 5000
SLAB_BYTES = 1024
_leases = itertools.count(1)


@dataclass(frozen=True)
class TestChain:
    """A chain by name; the bytes of its payloads follow from their hashes."""

    __test__ = False

    name: str
    count: int
    hashes: list[bytes] = field(init=False)

    def __post_init__(self) -> None:
        hashes, parent = [], self.root
        for index in range(self.count):
            parent = hashlib.sha256(parent + index.to_bytes(4, "little")).digest()
            hashes.append(parent)
        object.__setattr__(self, "hashes", hashes)

    @property
    def root(self) -> bytes:
        return hashlib.sha256(self.name.encode()).digest()

    def parent_of(self, index: int) -> bytes:
        return self.hashes[index - 1] if index else self.root

    def block(self, index: int) -> bytes:
        return (self.hashes[index] * (BLOCK_BYTES // 32 + 1))[:BLOCK_BYTES]

    def snapshot(self, index: int) -> bytes:
        return (self.hashes[index] * (SNAPSHOT_BYTES // 32 + 1))[-SNAPSHOT_BYTES:]

    def blocks(self, end: int) -> list[bytes]:
        return [self.block(index) for index in range(end)]


@dataclass(frozen=True)
class Item:
    """One payload of a put."""

    payload: transport_pb.Payload
    data: bytes
    parent_hash: bytes


def block_item(chain: TestChain, index: int, *, payload_id: int) -> Item:
    spec = PayloadSpec(
        kind=transport_pb.PAYLOAD_KIND_BLOCK,
        position_begin=index * 128,
        position_end=(index + 1) * 128,
        shape=(BLOCK_BYTES,),
        dtype="uint8",
        kv_id=KV_ID,
        block_hash=chain.hashes[index],
    )
    data = chain.block(index)
    return Item(describe(payload_id, spec, data), data, chain.parent_of(index))


def snapshot_item(chain: TestChain, index: int, *, payload_id: int) -> Item:
    spec = PayloadSpec(
        kind=transport_pb.PAYLOAD_KIND_ENCODER_WINDOW,
        position_begin=index * 128,
        position_end=(index + 1) * 128,
        shape=(1, SNAPSHOT_BYTES),
        dtype="uint8",
        kv_id=KV_ID,
        block_hash=chain.hashes[index],
    )
    data = chain.snapshot(index)
    return Item(describe(payload_id, spec, data), data, chain.parent_of(index))


def items_of(chain: TestChain, begin: int, end: int, snapshots: Sequence[int] = ()) -> list[Item]:
    """Blocks [begin, end) and the snapshots at the ends of some."""
    items = [block_item(chain, index, payload_id=number) for number, index in enumerate(range(begin, end))]
    for index in snapshots:
        items.append(snapshot_item(chain, index, payload_id=len(items)))
    return items


class KvClient:
    """One client of one node, on one event loop."""

    def __init__(
        self,
        address: str,
        *,
        kinds: Sequence[transport_pb.TransportKind.ValueType] = (transport_pb.TRANSPORT_KIND_SHM,),
    ) -> None:
        self.channel = Channel(address)
        self.stub = rpc.KvCacheServiceStub(self.channel.as_grpc())
        self.puller = KvPuller(kinds)

    async def close(self) -> None:
        self.puller.close()
        await self.channel.close()

    async def put(self, items: Sequence[Item], *, tenant: bytes = TENANT, is_from_peer: bool = False) -> int:
        """Puts payloads by gRPC; how many were new."""
        call = self.stub.Put(None, timeout=20)
        await call.write(pb.PutRequest(begin=begin_of(items, tenant=tenant, is_from_peer=is_from_peer)))
        answer = await call.read()
        assert isinstance(answer, pb.PutResponse), await call.code()
        await send(call, items, answer.wanted.payload_ids)
        committed = await call.read()
        assert isinstance(committed, pb.PutResponse), await call.code()
        return committed.committed.stored_count

    async def acquire(
        self,
        chain: TestChain,
        count: int | None = None,
        *,
        begin: int = 0,
        tenant: bytes = TENANT,
        replay: bool = True,
        lease_id: str | None = None,
        tokens_per_s: float = 0.0,
        timeout_s: float = 10.0,
    ) -> pb.AcquireResponse:
        """The longest prefix of the first `count` blocks."""
        end = chain.count if count is None else count
        return await self.stub.Acquire(
            pb.AcquireRequest(
                lease_id=lease_id or f"lease-{next(_leases)}",
                owner_id="owner",
                kv_id=KV_ID,
                numerics_id=NUMERICS_ID,
                tenant_tag=tenant,
                block_hashes=chain.hashes[begin:end],
                position_begin=begin * 128,
                max_hit_tokens=end * 128,
                want_replay=replay,
                time_to_live=Duration(seconds=30),
                offer=self.puller.offer,
                recompute_tokens_per_s=tokens_per_s,
            ),
            timeout=timeout_s,
        )

    async def read(self, answer: pb.AcquireResponse) -> list[bytes]:
        """The blocks, then the snapshot, of an answer."""
        if not answer.runs:
            return []
        pulled = await self.puller.pull_runs(answer.grant, answer.runs, self.channel, timeout_s=10)
        return [bytes(one) for one in pulled]

    async def release(self, lease_id: str) -> None:
        await self.stub.Release(pb.ReleaseRequest(lease_id=lease_id), timeout=10)

    async def stats(self) -> pb.GetStatsResponse:
        return await self.stub.GetStats(pb.GetStatsRequest(), timeout=10)

    async def tier(self, tier: pb.Tier.ValueType) -> pb.TierStats:
        return next(one for one in (await self.stats()).tiers if one.tier == tier)

    async def flush(self, **what: object) -> pb.FlushResponse:
        return await self.stub.Flush(pb.FlushRequest(**what), timeout=20)  # type: ignore[arg-type]

    async def report(self, chain: TestChain, index: int, *, is_snapshot: bool = False, **group: Any) -> None:
        """Reports a block, or the snapshot at its end, as damaged."""
        named = {"kv_id": KV_ID, "numerics_id": NUMERICS_ID, "tenant_tag": TENANT} | group
        kind = transport_pb.PAYLOAD_KIND_ENCODER_WINDOW if is_snapshot else transport_pb.PAYLOAD_KIND_BLOCK
        request = pb.ReportCorruptRequest(kind=kind, block_hash=chain.hashes[index], **named)
        await self.stub.ReportCorrupt(request, timeout=10)

    async def held(self) -> tuple[int, set[bytes], set[bytes]]:
        """Sequence number, blocks and snapshots, as ListHeld tells them."""
        number = 0
        blocks: set[bytes] = set()
        snapshots: set[bytes] = set()
        async for message in self.stub.ListHeld(pb.ListHeldRequest(), timeout=10):
            number = message.header.sequence_number if message.HasField("header") else number
            blocks.update(message.page.block_hashes)
            snapshots.update(message.page.snapshot_hashes)
        return number, blocks, snapshots


def begin_of(items: Sequence[Item], *, tenant: bytes = TENANT, is_from_peer: bool = False) -> pb.PutBegin:
    """What announces them."""
    return pb.PutBegin(
        put_id="put",
        owner_id="owner",
        kv_id=KV_ID,
        numerics_id=NUMERICS_ID,
        tenant_tag=tenant,
        payloads=[one.payload for one in items],
        parent_hashes=[one.parent_hash for one in items],
        is_from_peer=is_from_peer,
    )


async def send(call: object, items: Sequence[Item], wanted: Sequence[int]) -> None:
    """The wanted payloads, then the commit."""
    write = call.write  # type: ignore[attr-defined]
    for one in items:
        if one.payload.payload_id in wanted:
            await write(pb.PutRequest(data=pb.PutData(payload_id=one.payload.payload_id, data=one.data)))
    await write(pb.PutRequest(commit=pb.PutCommit()))
