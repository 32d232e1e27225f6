"""Leases on cached prefixes and the bytes under them. A cache that fails is a cache that misses."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc
from google.protobuf.duration_pb2 import Duration
from shoal.common.v1 import kv_transport_pb2 as transport_pb
from shoal.kv_cache.v1 import kv_cache_service_pb2 as pb
from shoal.kv_cache.v1 import kv_cache_service_pb2_grpc as rpc

from shoal_common.errors import DataLoss, DeadlineExceeded, MeshError
from shoal_common.identity import BLOCK_TOKENS
from shoal_common.kv_cache_client.node_calls import NodeCalls
from shoal_common.kv_cache_client.nodes import CacheNodes
from shoal_common.kv_cache_client.release_queue import ReleaseQueue
from shoal_common.kv_cache_client.runs import leading
from shoal_common.kv_transport import BegunCall, KvPuller, StreamCaller
from shoal_common.rpc import Channel, Channels, from_rpc_error, is_transport_failure
from shoal_common.telemetry import Metrics

logger = logging.getLogger(__name__)

T = TypeVar("T")
_BLOCK, _SNAPSHOT = transport_pb.PAYLOAD_KIND_BLOCK, transport_pb.PAYLOAD_KIND_ENCODER_WINDOW


class Prefix:
    """A pinned prefix. All counts are positions; an empty one (a miss) has zeros.

    hit_tokens           usable with its snapshot
    replay_tokens        usable by warm replay, without one; 0 unless it is longer than the hit and was asked for
    replay_cost_tokens   old rows that a warm replay there runs again
    present_tokens       leading blocks in the cache, pinned or not
    """

    def __init__(
        self,
        cache: PrefixCache,
        channel: Channel | None = None,
        answer: pb.AcquireResponse | None = None,
        request: pb.AcquireRequest | None = None,
    ) -> None:
        answer = answer if answer is not None else pb.AcquireResponse()
        self._cache, self._channel, self._request, self._grant = cache, channel, request, answer.grant
        self._blocks = [run for run in answer.runs if run.kind == _BLOCK]
        self._snapshots = [run for run in answer.runs if run.kind == _SNAPSHOT]
        self.hit_tokens = answer.hit_tokens
        self.replay_tokens = answer.replay_tokens
        self.replay_cost_tokens = answer.replay_cost_tokens
        self.present_tokens = answer.present_tokens
        self.pinned_tokens = sum(len(run.checksums) for run in self._blocks) * BLOCK_TOKENS

    async def blocks(self, end_tokens: int) -> list[memoryview] | None:
        """Blocks of [0, end_tokens). None if they cannot be had: treat as a miss."""
        if end_tokens > self.pinned_tokens:
            return None
        return await self._read(leading(self._blocks, end_tokens // BLOCK_TOKENS), _BLOCK)

    async def snapshot(self) -> memoryview | None:
        """The snapshot at hit_tokens. None if it cannot be had."""
        found = await self._read(self._snapshots[-1:], _SNAPSHOT) if self._snapshots else None
        return found[0] if found else None

    async def _read(
        self, runs: Sequence[transport_pb.PayloadRun], kind: transport_pb.PayloadKind.ValueType
    ) -> list[memoryview] | None:
        """The bytes; damaged ones are reported. None if any cannot be had."""
        if self._channel is None:
            return None
        try:
            return await self._cache.pull(self._grant, runs, self._channel)
        except DataLoss as error:
            await self._report(error, kind, self._channel)
        except (MeshError, grpc.aio.AioRpcError) as error:
            self._cache.failed("pull", error, self._channel)
        return None

    async def _report(self, error: DataLoss, kind: transport_pb.PayloadKind.ValueType, channel: Channel) -> None:
        self._cache.failed("pull", error, channel)
        # A block and the snapshot at its end are both named by the block that ends there.
        index = int(error.metadata.get("position_end", 0)) // BLOCK_TOKENS - 1
        asked = self._request
        if asked is not None and 0 <= index < len(asked.block_hashes):
            report = pb.ReportCorruptRequest(
                kind=kind,
                block_hash=asked.block_hashes[index],
                kv_id=asked.kv_id,
                numerics_id=asked.numerics_id,
                tenant_tag=asked.tenant_tag,
            )
            await self._cache.report(report, channel)


class PrefixCache:
    """Acquires and reads prefixes for one worker. Belongs to one event loop. Never raises MeshError: misses instead."""

    def __init__(
        self,
        *,
        channels: Channels,
        puller: KvPuller,
        nodes: CacheNodes,
        metrics: Metrics,
        owner_id: str,
        acquire_timeout_s: float,
        pull_timeout_s: float,
        lease_s: float,
    ) -> None:
        self._channels, self._puller, self._nodes, self._owner_id = channels, puller, nodes, owner_id
        self._acquire_timeout_s, self._pull_timeout_s = acquire_timeout_s, pull_timeout_s
        self._time_to_live = Duration(seconds=round(lease_s))
        self._caller = StreamCaller(ssl_context=puller.ssl_context)
        self._calls = NodeCalls(puller, self._caller)
        self._ended = ReleaseQueue(self._release_all)
        self._beside: set[asyncio.Task[Any]] = set()
        self._failures = metrics.counter(
            "kv_cache_client_failures", "Calls to kv_cache that failed and count as misses", ("call", "reason")
        )

    @asynccontextmanager
    async def acquired(
        self,
        hashes: Sequence[bytes],
        *,
        kv_id: str,
        numerics_id: str,
        tenant_tag: bytes,
        max_hit_tokens: int,
        want_replay: bool = False,
        blocks_only: bool = False,
        replay_reach_tokens: int = 0,
        recompute_tokens_per_s: float = 0.0,
    ) -> AsyncIterator[Prefix]:
        """The longest usable prefix of a chain, pinned until the block ends. Arguments as in AcquireRequest."""
        address = self._nodes.pick() if hashes and max_hit_tokens > 0 else None
        if address is None:
            yield Prefix(self)
            return
        channel = self._channels.get(address)
        request = pb.AcquireRequest(
            lease_id=f"{self._owner_id}-{secrets.token_hex(8)}",
            owner_id=self._owner_id,
            kv_id=kv_id,
            numerics_id=numerics_id,
            tenant_tag=tenant_tag,
            block_hashes=hashes,
            max_hit_tokens=max_hit_tokens,
            time_to_live=self._time_to_live,
            offer=self._puller.offer,
            want_replay=want_replay,
            blocks_only=blocks_only,
            replay_reach_tokens=replay_reach_tokens,
            recompute_tokens_per_s=recompute_tokens_per_s,
            release_lease_ids=self._ended.take(address),
        )
        begun = self._calls.begin_acquire(request, channel, timeout_s=self._acquire_timeout_s)
        if begun is not None and begun.is_answered:
            answer = self._told(begun, request, channel)
        else:
            acquiring = self._spawn(self._acquire(request, channel, begun))
            try:
                answer = await asyncio.shield(acquiring)
            except asyncio.CancelledError:
                # The node may have pinned already; only its answer tells.
                self._spawn(self._release_after(acquiring, request.lease_id, channel))
                raise
        if answer is None:
            yield Prefix(self)
            return
        try:
            yield Prefix(self, channel, answer, request)
        finally:
            if answer.runs:
                self._ended.add(address, [request.lease_id])

    async def close(self) -> None:
        """Release what has ended, and wait for what is on its way, each at most its deadline. Before the channels."""
        self._ended.flush()
        while self._beside:
            await asyncio.gather(*self._beside, return_exceptions=True)
            self._ended.flush()
        self._caller.close()

    async def pull(
        self, grant: transport_pb.TransportGrant, runs: Sequence[transport_pb.PayloadRun], channel: Channel
    ) -> list[memoryview]:
        """The payloads of runs of a grant. Raises as KvPuller does."""
        return await self._puller.pull_runs(grant, runs, channel, timeout_s=self._pull_timeout_s)

    async def report(self, request: pb.ReportCorruptRequest, channel: Channel) -> None:
        """Tell the node that something of it is damaged."""
        try:
            await rpc.KvCacheServiceStub(channel.as_grpc()).ReportCorrupt(request, timeout=self._acquire_timeout_s)
        except grpc.aio.AioRpcError as error:
            self.failed("report", error, channel)

    def failed(self, call: str, error: MeshError | grpc.aio.AioRpcError, channel: Channel) -> None:
        """Count a failure, and leave a node alone for a while that did not answer."""
        if isinstance(error, grpc.aio.AioRpcError):
            is_transport = is_transport_failure(error)
            if is_transport:
                self._channels.rebuild(channel)
            error = from_rpc_error(error)
        else:
            is_transport = False
        if is_transport or isinstance(error, DeadlineExceeded):
            self._nodes.failed(channel.address)
        self._failures.labels(call, error.reason).inc()
        logger.warning("kv_cache failed", extra={"call": call, "reason": error.reason, "error": error.message})

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Beside the caller, ended by its own deadline."""
        task = asyncio.get_running_loop().create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)
        return task

    async def _acquire(
        self, request: pb.AcquireRequest, channel: Channel, begun: BegunCall[pb.AcquireResponse] | None
    ) -> pb.AcquireResponse | None:
        """None when it failed."""
        try:
            return await self._calls.acquire(request, channel, timeout_s=self._acquire_timeout_s, begun=begun)
        except (MeshError, grpc.aio.AioRpcError) as error:
            self._not_acquired(error, request, channel)
            return None

    def _told(
        self, begun: BegunCall[pb.AcquireResponse], request: pb.AcquireRequest, channel: Channel
    ) -> pb.AcquireResponse | None:
        """The same of a call that was answered at once."""
        try:
            return begun.answer()
        except MeshError as error:
            self._not_acquired(error, request, channel)
            return None

    def _not_acquired(
        self, error: MeshError | grpc.aio.AioRpcError, request: pb.AcquireRequest, channel: Channel
    ) -> None:
        """What it was to release, and the lease that it may have got, are released."""
        self.failed("acquire", error, channel)
        self._ended.add(channel.address, [*request.release_lease_ids, request.lease_id])

    async def _release_after(
        self, acquiring: asyncio.Task[pb.AcquireResponse | None], lease_id: str, channel: Channel
    ) -> None:
        if await acquiring is not None:
            await self._release(lease_id, channel)

    def _release_all(self, address: str, lease_ids: Sequence[str]) -> None:
        for lease_id in lease_ids:
            self._spawn(self._release(lease_id, self._channels.get(address)))

    async def _release(self, lease_id: str, channel: Channel) -> None:
        try:
            await self._calls.release(lease_id, channel, timeout_s=self._acquire_timeout_s)
        except grpc.aio.AioRpcError as error:
            # The lease ends by its time then.
            self.failed("release", error, channel)
