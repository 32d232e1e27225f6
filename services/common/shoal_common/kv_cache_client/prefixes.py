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

from shoal_common.errors import DataLoss, MeshError
from shoal_common.identity import BLOCK_TOKENS
from shoal_common.kv_cache_client.nodes import CacheNodes
from shoal_common.kv_transport import KvPuller
from shoal_common.rpc import Channel, Channels, from_rpc_error, is_transport_failure
from shoal_common.telemetry import Metrics

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Prefix:
    """A pinned prefix. All counts are positions; an empty one (a miss) has zeros.

    hit_tokens       usable with its snapshot
    replay_tokens    usable by warm replay, without one; 0 unless it is longer than the hit and was asked for
    present_tokens   leading blocks in the cache, pinned or not
    """

    def __init__(self, cache: PrefixCache, channel: Channel | None, answer: pb.AcquireResponse) -> None:
        self._cache, self._channel, self._answer = cache, channel, answer
        self._blocks = [one for one in answer.payloads if one.kind == transport_pb.PAYLOAD_KIND_BLOCK]
        self._snapshots = [one for one in answer.payloads if one.kind == transport_pb.PAYLOAD_KIND_ENCODER_WINDOW]
        self.hit_tokens = answer.hit_tokens
        self.replay_tokens = answer.replay_tokens
        self.present_tokens = answer.present_tokens

    @property
    def pinned_tokens(self) -> int:
        """Positions whose blocks can be read."""
        return len(self._blocks) * BLOCK_TOKENS

    async def blocks(self, end_tokens: int) -> list[bytes] | None:
        """Blocks of [0, end_tokens). None if they cannot be had: treat as a miss."""
        wanted = self._blocks[: end_tokens // BLOCK_TOKENS]
        if len(wanted) * BLOCK_TOKENS != end_tokens:
            return None
        return await self._read(wanted)

    async def snapshot(self) -> bytes | None:
        """The snapshot at hit_tokens. None if it cannot be had."""
        found = await self._read(self._snapshots[-1:]) if self._snapshots else None
        return found[0] if found else None

    async def _read(self, payloads: Sequence[transport_pb.Payload]) -> list[bytes] | None:
        if self._channel is None:
            return None
        return await self._cache.read(self._answer.grant, payloads, self._channel)


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
        self._acquire_timeout_s, self._pull_timeout_s, self._lease_s = acquire_timeout_s, pull_timeout_s, lease_s
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
        max_hit_tokens: int,
        want_replay: bool = False,
        blocks_only: bool = False,
    ) -> AsyncIterator[Prefix]:
        """The longest usable prefix of a chain, pinned until the block ends. Arguments as in AcquireRequest."""
        address = self._nodes.pick() if hashes and max_hit_tokens > 0 else None
        if address is None:
            yield Prefix(self, None, pb.AcquireResponse())
            return
        channel = self._channels.get(address)
        request = pb.AcquireRequest(
            lease_id=f"{self._owner_id}-{secrets.token_hex(8)}",
            owner_id=self._owner_id,
            kv_id=kv_id,
            numerics_id=numerics_id,
            block_hashes=hashes,
            max_hit_tokens=max_hit_tokens,
            time_to_live=Duration(seconds=round(self._lease_s)),
            offer=self._puller.offer,
            want_replay=want_replay,
            blocks_only=blocks_only,
        )
        stub = rpc.KvCacheServiceStub(channel.as_grpc())
        acquiring = self._spawn(self._acquire(stub, request))
        try:
            answer = await asyncio.shield(acquiring)
        except asyncio.CancelledError:
            # The node may have pinned already; only its answer tells.
            self._spawn(self._release_after(acquiring, stub, request.lease_id, channel))
            raise
        except grpc.aio.AioRpcError as error:
            self._failed("acquire", error, channel)
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                self._spawn(self._release(stub, request.lease_id, channel))
            yield Prefix(self, None, pb.AcquireResponse())
            return
        try:
            yield Prefix(self, channel, answer)
        finally:
            if answer.payloads:
                # Not awaited: a caller that is being cancelled would cut it short.
                self._spawn(self._release(stub, request.lease_id, channel))

    async def close(self) -> None:
        """Wait for releases that are on their way, each at most its deadline. Before the channels are closed."""
        await asyncio.gather(*self._beside, return_exceptions=True)

    async def read(
        self, grant: transport_pb.TransportGrant, payloads: Sequence[transport_pb.Payload], channel: Channel
    ) -> list[bytes] | None:
        """The bytes of payloads of a grant; damaged ones are reported. None if any cannot be had."""
        try:
            return await self._puller.pull(grant, payloads, channel, timeout_s=self._pull_timeout_s)
        except DataLoss as error:
            self._count("pull", error)
            await self._report(payloads, error, channel)
        except grpc.aio.AioRpcError as error:
            self._failed("pull", error, channel)
        return None

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Beside the caller, ended by its own deadline."""
        task = asyncio.get_running_loop().create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)
        return task

    async def _acquire(self, stub: rpc.KvCacheServiceAsyncStub, request: pb.AcquireRequest) -> pb.AcquireResponse:
        return await stub.Acquire(request, timeout=self._acquire_timeout_s)

    async def _release_after(
        self,
        acquiring: asyncio.Task[pb.AcquireResponse],
        stub: rpc.KvCacheServiceAsyncStub,
        lease_id: str,
        channel: Channel,
    ) -> None:
        try:
            await acquiring
        except grpc.aio.AioRpcError as error:
            self._failed("acquire", error, channel)
        await self._release(stub, lease_id, channel)

    async def _release(self, stub: rpc.KvCacheServiceAsyncStub, lease_id: str, channel: Channel) -> None:
        try:
            await stub.Release(pb.ReleaseRequest(lease_id=lease_id), timeout=self._acquire_timeout_s)
        except grpc.aio.AioRpcError as error:
            # The lease ends by its time then.
            self._failed("release", error, channel)

    async def _report(self, payloads: Sequence[transport_pb.Payload], error: MeshError, channel: Channel) -> None:
        damaged = error.metadata.get("payload_id")
        for payload in payloads:
            if str(payload.payload_id) != damaged or not payload.block_hash:
                continue
            request = pb.ReportCorruptRequest(kind=payload.kind, block_hash=payload.block_hash)
            try:
                await rpc.KvCacheServiceStub(channel.as_grpc()).ReportCorrupt(request, timeout=self._acquire_timeout_s)
            except grpc.aio.AioRpcError as failure:
                self._failed("report", failure, channel)

    def _failed(self, call: str, error: grpc.aio.AioRpcError, channel: Channel) -> None:
        if is_transport_failure(error):
            self._channels.rebuild(channel)
        if is_transport_failure(error) or error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            self._nodes.failed(channel.address)
        self._count(call, from_rpc_error(error))

    def _count(self, call: str, error: MeshError) -> None:
        self._failures.labels(call, error.reason).inc()
        logger.warning("kv_cache failed", extra={"call": call, "reason": error.reason, "error": error.message})
