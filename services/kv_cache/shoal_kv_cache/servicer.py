"""KvCacheService: protobuf in, node, protobuf out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeAlias

import grpc
from shoal.kv_cache.v1 import kv_cache_service_pb2 as pb
from shoal.kv_cache.v1 import kv_cache_service_pb2_grpc as pb_grpc
from shoal_common.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted

from shoal_kv_cache.asked import asked_of
from shoal_kv_cache.cluster.flush_sync import MAX_ID_CHARS, message_of
from shoal_kv_cache.config import KvCacheConfig
from shoal_kv_cache.core.entries import HASH_BYTES, Group, Key
from shoal_kv_cache.core.flush_epochs import Filter
from shoal_kv_cache.node import Node
from shoal_kv_cache.payload_checks import check_names
from shoal_kv_cache.puts import Put, out_of_order
from shoal_kv_cache.store import KIND

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_PAGE_HASHES = 4096
_FLUSH_WAIT_S = 15.0


class KvCacheServicer(pb_grpc.KvCacheServiceServicer):
    """Serves one node."""

    def __init__(self, node: Node, config: KvCacheConfig, *, instance_id: str) -> None:
        self._node, self._config, self._instance_id = node, config, instance_id
        self._puts_in_flight = 0

    async def Acquire(self, request: pb.AcquireRequest, context: Context) -> pb.AcquireResponse:
        answer = await self.acquire(request, time_left_s=context.time_remaining())
        if not answer.runs:
            # Who misses would come by gRPC, at several times the price, until the first hit.
            answer.grant.CopyFrom(self._node.store.exports.grant_nothing(request.offer))
        return answer

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        return await self.release(request)

    async def acquire(self, request: pb.AcquireRequest, *, time_left_s: float | None = None) -> pb.AcquireResponse:
        """Acquire, from wherever it came."""
        config = self._config
        asked = asked_of(
            request,
            max_lease_s=config.max_lease_s,
            budget_s=min(config.load_timeout_s, time_left_s if time_left_s is not None else config.load_timeout_s),
        )
        self._release_all(request.release_lease_ids)
        self._node.expire()
        # What it holds may have been flushed while it was away.
        flushes = self._node.flushes
        if not flushes.may_serve() and not await flushes.wait_caught_up(asked.budget_s):
            return pb.AcquireResponse()
        return await self._node.acquirer.acquire(asked)

    def acquire_at_once(self, request: pb.AcquireRequest) -> pb.AcquireResponse | None:
        """Acquire, where memory answers it without waiting. Leases that end with the call end after the answer."""
        ended = request.release_lease_ids
        if not self._node.flushes.may_serve() or request.lease_id in ended:
            return None
        asked = asked_of(request, max_lease_s=self._config.max_lease_s, budget_s=self._config.load_timeout_s)
        self._node.expire()
        answer = self._node.acquirer.acquire_at_once(asked)
        if answer is not None and ended:
            asyncio.get_running_loop().call_soon(self._release_all, list(ended))
        return answer

    def _release_all(self, lease_ids: Sequence[str]) -> None:
        for lease_id in lease_ids:
            self._node.acquirer.release(lease_id)

    async def release(self, request: pb.ReleaseRequest) -> pb.ReleaseResponse:
        """Release, from wherever it came."""
        self._node.acquirer.release(request.lease_id)
        return pb.ReleaseResponse()

    async def Put(
        self, request_iterator: AsyncIterator[pb.PutRequest], context: Context
    ) -> AsyncIterator[pb.PutResponse]:
        if self._puts_in_flight >= self._config.max_puts:
            raise ResourceExhausted(
                f"{self._puts_in_flight} puts are in flight", reason="QUEUE_FULL", max_puts=self._config.max_puts
            )
        self._puts_in_flight += 1
        put: Put | None = None
        try:
            async with asyncio.timeout(self._config.put_timeout_s):
                async for request in request_iterator:
                    kind = request.WhichOneof("message")
                    if put is None and kind == "begin":
                        put = self._node.puts.begin(request.begin)
                        yield pb.PutResponse(wanted=put.wanted)
                    elif put is not None and kind == "data":
                        put.fill(request.data)
                    elif put is not None and kind == "commit":
                        yield pb.PutResponse(committed=pb.PutCommitted(stored_count=await put.commit()))
                        return
                    else:
                        raise out_of_order()
        except TimeoutError as error:
            seconds = self._config.put_timeout_s
            raise DeadlineExceeded(f"a put took more than {seconds} s", put_timeout_s=seconds) from error
        finally:
            self._puts_in_flight -= 1
            if put is not None:
                put.discard()

    async def Flush(self, request: pb.FlushRequest, context: Context) -> pb.FlushResponse:
        has_filter = request.HasField("kv_id") or request.HasField("tenant_tag")
        if has_filter == request.everything:
            raise InvalidArgument.at("everything", "set it, or a filter, and not both")
        if len(request.flush_id) > MAX_ID_CHARS:
            raise InvalidArgument.at("flush_id", f"at most {MAX_ID_CHARS} characters")
        check_names(request.kv_id, "", request.tenant_tag)
        # A node that was away hears of older flushes first, and cannot tell later which of them it missed.
        if not self._node.flushes.may_serve():
            await self._node.flushes.wait_caught_up(_FLUSH_WAIT_S)
        flushed = await self._node.flusher.flush(
            Filter(
                kv_id=request.kv_id if request.HasField("kv_id") else None,
                tenant_tag=request.tenant_tag if request.HasField("tenant_tag") else None,
            ),
            flush_id=request.flush_id,
        )
        return pb.FlushResponse(
            block_count=flushed.block_count,
            snapshot_count=flushed.snapshot_count,
            remote_count=flushed.remote_count,
        )

    async def ListFlushes(self, request: pb.ListFlushesRequest, context: Context) -> pb.ListFlushesResponse:
        log = self._node.flusher.log
        if request.known_digest == log.digest():
            return pb.ListFlushesResponse()
        return pb.ListFlushesResponse(records=[message_of(one) for one in log.records], has_forgotten=log.has_forgotten)

    async def ReportCorrupt(self, request: pb.ReportCorruptRequest, context: Context) -> pb.ReportCorruptResponse:
        if request.kind not in KIND:
            raise InvalidArgument.at("kind", "only blocks and encoder windows are stored")
        if len(request.block_hash) != HASH_BYTES:
            raise InvalidArgument.at("block_hash", f"must be {HASH_BYTES} bytes")
        group = Group(request.kv_id, request.numerics_id, request.tenant_tag)
        await self._node.reported(group, Key(KIND[request.kind], request.block_hash))
        return pb.ReportCorruptResponse()

    async def ListHeld(self, request: pb.ListHeldRequest, context: Context) -> AsyncIterator[pb.ListHeldResponse]:
        # What changes between pages is told by events after this number: they are applied on top.
        number = self._node.store.events.sequence_number
        yield pb.ListHeldResponse(header=pb.HeldHeader(instance_id=self._instance_id, sequence_number=number))
        cursor: int | None = 0
        while cursor is not None:
            blocks, snapshots, cursor = self._node.store.index.hash_page(cursor, _PAGE_HASHES)
            yield pb.ListHeldResponse(page=pb.HeldPage(block_hashes=blocks, snapshot_hashes=snapshots))

    async def GetStats(self, request: pb.GetStatsRequest, context: Context) -> pb.GetStatsResponse:
        return self._node.stats.get_stats()

    async def ListGroups(self, request: pb.ListGroupsRequest, context: Context) -> pb.ListGroupsResponse:
        return self._node.stats.list_groups(
            request.kv_id if request.HasField("kv_id") else None,
            request.tenant_tag if request.HasField("tenant_tag") else None,
        )

    async def Verify(self, request: pb.VerifyRequest, context: Context) -> AsyncIterator[pb.VerifyResponse]:
        async for progress in self._node.verifier.verify(request.tiers):
            yield progress
