"""Other nodes as a place to load from: the owners of the segments of a chain."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc
from google.protobuf.duration_pb2 import Duration
from shoal.common.v1 import kv_transport_pb2 as transport_pb
from shoal.kv_cache.v1 import kv_cache_service_pb2 as pb
from shoal.kv_cache.v1 import kv_cache_service_pb2_grpc as rpc
from shoal_common.errors import DataLoss, MeshError
from shoal_common.kv_transport import KvPuller
from shoal_common.kv_transport.buffers import Buffer
from shoal_common.rpc import Channel, Channels, from_rpc_error, is_transport_failure

from shoal_kv_cache.cluster.members import Members, Peer
from shoal_kv_cache.cluster.reports import report_of
from shoal_kv_cache.core.entries import BLOCK_TOKENS, SEGMENT_BLOCKS, Entry, Form, Key, Kind
from shoal_kv_cache.core.load_rate import LoadRate
from shoal_kv_cache.core.prefix_plan import Level
from shoal_kv_cache.movement.sources import Look, Sighting
from shoal_kv_cache.store import KIND
from shoal_kv_cache.tier_counts import TierCounts

logger = logging.getLogger(__name__)

_LEASE_MARGIN_S = 10.0
_MAX_CALLS = 32


@dataclass(frozen=True, slots=True)
class _Part:
    """Blocks [begin, end) of a chain that one peer is asked for."""

    peers: tuple[Peer, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a peer has pinned for us."""

    peer: Peer
    channel: Channel
    lease_id: str
    answer: pb.AcquireResponse


class PeerSource:
    """Asks the owners of each segment, all at once, under a lease of its own at each. Belongs to one event loop."""

    level = Level.PEERS

    def __init__(
        self,
        members: Members,
        channels: Channels,
        puller: KvPuller,
        counts: TierCounts,
        *,
        instance_id: str,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.members, self.channels, self.puller, self.counts = members, channels, puller, counts
        self.rate = LoadRate(bytes_per_s=1e9, latency_s=0.002)
        self.clock = clock
        self._instance_id, self._timeout_s = instance_id, timeout_s
        self._limit = asyncio.Semaphore(_MAX_CALLS)

    @property
    def is_there(self) -> bool:
        """See Source."""
        return len(self.members) > 0

    async def look(self, look: Look) -> Sighting | None:
        """See Source."""
        parts = self._parts(look)
        if not parts:
            return None
        asking = [asyncio.ensure_future(self._ask(look, part)) for part in parts]
        try:
            answers = await asyncio.gather(*asking)
        except BaseException:
            # Those that have answered keep pins, which their time ends.
            for one in asking:
                one.cancel()
            raise
        return PeerSighting(self, look, [one for one in answers if one is not None])

    def failed(self, peer: Peer, error: grpc.aio.AioRpcError, channel: Channel) -> None:
        """A call to a peer failed."""
        if is_transport_failure(error):
            self.channels.rebuild(channel)
        if is_transport_failure(error) or error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            self.members.failed(peer.node_id)
        failure = from_rpc_error(error)
        self.counts.failed(failure.reason)
        logger.info("peer failed", extra={"peer": peer.node_id, "reason": failure.reason, "error": failure.message})

    def _parts(self, look: Look) -> list[_Part]:
        """One part per segment from the first block of interest on; neighbours of the same peers are one."""
        parts: list[_Part] = []
        begin = look.begin
        while begin < look.last:
            end = min(look.last, (begin // SEGMENT_BLOCKS + 1) * SEGMENT_BLOCKS)
            first = begin // SEGMENT_BLOCKS * SEGMENT_BLOCKS
            # The name of a segment that the chain does not begin with is not known: nobody is asked for it.
            peers = self._owners(look.hash_of(first)) if first >= look.first_index else ()
            if parts and parts[-1].peers == peers and parts[-1].end == begin:
                parts[-1] = _Part(peers, parts[-1].begin, end)
            elif peers:
                parts.append(_Part(peers, begin, end))
            begin = end
        return parts

    def _owners(self, first_hash: bytes) -> tuple[Peer, ...]:
        names = self.members.owners(first_hash)
        found = (self.members.peer(name) for name in names if name != self.members.node_id)
        return tuple(peer for peer in found if peer is not None)

    async def _ask(self, look: Look, part: _Part) -> _Answer | None:
        for peer in part.peers:
            async with self._limit:
                answer = await self._ask_one(look, part, peer)
            if answer is not None:
                return answer
        return None

    async def _ask_one(self, look: Look, part: _Part, peer: Peer) -> _Answer | None:
        channel = self.channels.get(peer.address)
        lease_id = f"{look.lease_id}@{self._instance_id}:{part.begin}"
        timeout_s = min(self._timeout_s, look.timeout_s)
        request = pb.AcquireRequest(
            lease_id=lease_id,
            owner_id=self._instance_id,
            kv_id=look.group.kv_id,
            numerics_id=look.group.numerics_id,
            tenant_tag=look.group.tenant_tag,
            block_hashes=look.hashes[part.begin - look.first_index : part.end - look.first_index],
            position_begin=part.begin * BLOCK_TOKENS,
            max_hit_tokens=min(look.max_blocks, part.end) * BLOCK_TOKENS,
            time_to_live=Duration(seconds=round(look.timeout_s + _LEASE_MARGIN_S)),
            offer=self.puller.offer,
            want_replay=True,
            blocks_only=look.blocks_only,
            is_from_peer=True,
            recompute_tokens_per_s=look.recompute_tokens_per_s,
        )
        try:
            answer = await rpc.KvCacheServiceStub(channel.as_grpc()).Acquire(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            self.failed(peer, error, channel)
            return None
        return _Answer(peer, channel, lease_id, answer) if answer.runs else None


class PeerSighting:
    """What peers have pinned. See Sighting."""

    def __init__(self, source: PeerSource, look: Look, answers: Sequence[_Answer]) -> None:
        self._source, self._look, self._answers = source, look, list(answers)
        self.blocks: set[int] = set()
        self.snapshots: set[int] = set()
        for one in answers:
            for run in one.answer.runs:
                first = run.position_begin // BLOCK_TOKENS
                if KIND.get(run.kind) is Kind.BLOCK:
                    self.blocks.update(range(first, first + len(run.checksums)))
                else:
                    self.snapshots.add((run.position_begin + run.positions) // BLOCK_TOKENS - 1)
        # A peer that answers with more than it was asked for is not believed.
        asked = range(look.begin, look.last)
        self.blocks.intersection_update(asked)
        self.snapshots.intersection_update(asked)

    async def load(
        self, blocks: Sequence[int], snapshot: int | None, *, timeout_s: float
    ) -> list[tuple[Entry, Buffer]]:
        """See Sighting."""
        wanted = set(blocks)
        parts = await asyncio.gather(
            *(self._pull(one, run, wanted, snapshot, timeout_s) for one in self._answers for run in one.answer.runs)
        )
        return [one for part in parts for one in part]

    async def close(self) -> None:
        """Releases what the peers have pinned; who does not hear of it lets go by time."""
        answers, self._answers = self._answers, []
        await asyncio.gather(*(self._release(one) for one in answers))

    async def _release(self, one: _Answer) -> None:
        try:
            stub = rpc.KvCacheServiceStub(one.channel.as_grpc())
            await stub.Release(pb.ReleaseRequest(lease_id=one.lease_id), timeout=1.0)
        except grpc.aio.AioRpcError as error:
            self._source.failed(one.peer, error, one.channel)

    async def _pull(
        self, one: _Answer, run: transport_pb.PayloadRun, wanted: set[int], snapshot: int | None, timeout_s: float
    ) -> list[tuple[Entry, Buffer]]:
        part = _cut(run, wanted, snapshot)
        if part is None:
            return []
        source, size_bytes = self._source, part.size_bytes * len(part.checksums)
        started_s = source.clock()
        try:
            pulled = await source.puller.pull_runs(one.answer.grant, [part], one.channel, timeout_s=timeout_s)
        except grpc.aio.AioRpcError as error:
            source.failed(one.peer, error, one.channel)
            return []
        except MeshError as error:
            source.counts.failed(error.reason)
            logger.warning("pull from a peer failed", extra={"peer": one.peer.node_id, "reason": error.reason})
            if isinstance(error, DataLoss):
                await self._report(one, part, error)
            return []
        source.rate.observed(size_bytes, source.clock() - started_s)
        source.counts.read(size_bytes)
        return list(zip(_entries(self._look, part), pulled, strict=True))

    async def _report(self, one: _Answer, part: transport_pb.PayloadRun, error: MeshError) -> None:
        """Tells the peer what is damaged, so that it drops it."""
        offset = int(error.metadata.get("payload_id", part.first_payload_id)) - part.first_payload_id
        entries = _entries(self._look, part)
        if not 0 <= offset < len(entries):
            return
        request = report_of(self._look.group, entries[offset].key)
        try:
            await rpc.KvCacheServiceStub(one.channel.as_grpc()).ReportCorrupt(request, timeout=1.0)
        except grpc.aio.AioRpcError as failure:
            self._source.failed(one.peer, failure, one.channel)


def _cut(run: transport_pb.PayloadRun, wanted: set[int], snapshot: int | None) -> transport_pb.PayloadRun | None:
    """The part of a run from its first wanted payload to its last; None where there is none."""
    if run.kind == transport_pb.PAYLOAD_KIND_ENCODER_WINDOW:
        ends_at = (run.position_begin + run.positions) // BLOCK_TOKENS - 1
        return run if snapshot == ends_at else None
    first = run.position_begin // BLOCK_TOKENS
    here = [index for index in range(first, first + len(run.checksums)) if index in wanted]
    if not here:
        return None
    begin, end = here[0] - first, here[-1] + 1 - first
    per_payload = len(run.slabs) // len(run.checksums)
    part = transport_pb.PayloadRun()
    part.CopyFrom(run)
    part.first_payload_id += begin
    part.position_begin += begin * BLOCK_TOKENS
    part.checksums[:] = run.checksums[begin:end]
    part.slabs[:] = run.slabs[begin * per_payload : end * per_payload]
    return part


def _entries(look: Look, run: transport_pb.PayloadRun) -> list[Entry]:
    form = Form(run.positions, tuple(run.shape), run.dtype, run.size_bytes)
    entries = []
    for offset, checksum in enumerate(run.checksums):
        position_end = run.position_begin + (offset + 1) * run.positions
        index = position_end // BLOCK_TOKENS - 1
        key = Key(KIND[run.kind], look.hash_of(index))
        entries.append(Entry(key, look.group, look.parent_of(index), position_end, form, checksum))
    return entries
