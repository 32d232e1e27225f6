"""KvCacheService: protobuf in, store, protobuf out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias

import grpc
from shoal.kv_cache.v1 import kv_cache_service_pb2 as pb
from shoal.kv_cache.v1 import kv_cache_service_pb2_grpc as pb_grpc
from shoal_common.errors import DeadlineExceeded, InvalidArgument, OutOfCapacity, ResourceExhausted
from shoal_common.kv_transport import ArenaFull

from shoal_kv_cache.config import KvCacheConfig
from shoal_kv_cache.core.entries import BLOCK_TOKENS, HASH_BYTES, Entry, Key, Kind
from shoal_kv_cache.puts import Put
from shoal_kv_cache.store import PAYLOAD_KIND, Store

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_PAGE_HASHES = 4096
_KIND = {payload_kind: kind for kind, payload_kind in PAYLOAD_KIND.items()}


class KvCacheServicer(pb_grpc.KvCacheServiceServicer):
    """Serves one node."""

    def __init__(
        self,
        store: Store,
        config: KvCacheConfig,
        *,
        instance_id: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._config, self._instance_id, self._clock = store, config, instance_id, clock
        self._puts_in_flight = 0

    async def Acquire(self, request: pb.AcquireRequest, context: Context) -> pb.AcquireResponse:
        if any(len(one) != HASH_BYTES for one in request.block_hashes):
            raise InvalidArgument.at("block_hashes", f"each must be {HASH_BYTES} bytes", reason="MALFORMED_CHAIN")
        if request.max_hit_tokens % BLOCK_TOKENS:
            raise InvalidArgument.at(
                "max_hit_tokens", f"must be a multiple of {BLOCK_TOKENS}", reason="MALFORMED_CHAIN"
            )
        if not request.lease_id:
            raise InvalidArgument.at("lease_id", "must not be empty")
        now_s = self._clock()
        self._store.expire(now_s)
        lease_s = request.time_to_live.ToTimedelta().total_seconds() or self._config.max_lease_s
        granted = self._store.acquire(
            lease_id=request.lease_id,
            owner_id=request.owner_id,
            kv_id=request.kv_id,
            numerics_id=request.numerics_id,
            hashes=list(request.block_hashes),
            max_hit_tokens=request.max_hit_tokens,
            want_replay=request.want_replay,
            blocks_only=request.blocks_only,
            ends_at_s=now_s + min(lease_s, self._config.max_lease_s),
            offer=request.offer,
        )
        return pb.AcquireResponse(
            hit_tokens=granted.acquisition.hit_tokens,
            replay_tokens=granted.acquisition.replay_tokens,
            present_tokens=granted.acquisition.present_tokens,
            grant=granted.grant,
            payloads=granted.payloads,
        )

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        self._store.release(request.lease_id)
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
                        put = Put(self._store, request.begin)
                        yield pb.PutResponse(wanted=pb.PutWanted(payload_ids=put.wanted_ids))
                    elif put is not None and kind == "data":
                        put.fill(request.data)
                    elif put is not None and kind == "commit":
                        yield pb.PutResponse(committed=pb.PutCommitted(stored_count=put.commit()))
                        return
                    else:
                        raise InvalidArgument.at("message", "the order is begin, data, commit")
        except TimeoutError as error:
            seconds = self._config.put_timeout_s
            raise DeadlineExceeded(f"a put took more than {seconds} s", put_timeout_s=seconds) from error
        except ArenaFull as error:
            raise OutOfCapacity(f"everything held is pinned: {error.message}", reason="OUT_OF_SPACE") from error
        finally:
            self._puts_in_flight -= 1
            if put is not None:
                put.discard()

    async def Flush(self, request: pb.FlushRequest, context: Context) -> pb.FlushResponse:
        has_filter = request.HasField("kv_id") or request.HasField("tenant_tag")
        if has_filter == request.everything:
            raise InvalidArgument.at("everything", "set it, or a filter, and not both")
        keys = [entry.key for entry in self._store.index if _matches(entry, request)]
        self._store.drop(keys)
        snapshot_count = sum(key.kind is Kind.SNAPSHOT for key in keys)
        return pb.FlushResponse(block_count=len(keys) - snapshot_count, snapshot_count=snapshot_count)

    async def ReportCorrupt(self, request: pb.ReportCorruptRequest, context: Context) -> pb.ReportCorruptResponse:
        if request.kind not in _KIND:
            raise InvalidArgument.at("kind", "only blocks and encoder windows are stored")
        self._store.drop([Key(_KIND[request.kind], request.block_hash)], is_corrupt=True)
        return pb.ReportCorruptResponse()

    async def ListHeld(self, request: pb.ListHeldRequest, context: Context) -> AsyncIterator[pb.ListHeldResponse]:
        # Both are taken before the first await, so that the list is as of the number.
        number = self._store.events.sequence_number
        keys = [entry.key for entry in self._store.index]
        yield pb.ListHeldResponse(header=pb.HeldHeader(instance_id=self._instance_id, sequence_number=number))
        for start in range(0, len(keys), _PAGE_HASHES):
            part = keys[start : start + _PAGE_HASHES]
            yield pb.ListHeldResponse(
                page=pb.HeldPage(
                    block_hashes=[key.block_hash for key in part if key.kind is Kind.BLOCK],
                    snapshot_hashes=[key.block_hash for key in part if key.kind is Kind.SNAPSHOT],
                )
            )

    async def GetStats(self, request: pb.GetStatsRequest, context: Context) -> pb.GetStatsResponse:
        store = self._store
        snapshot_count = sum(entry.key.kind is Kind.SNAPSHOT for entry in store.index)
        return pb.GetStatsResponse(
            block_count=len(store.index) - snapshot_count,
            snapshot_count=snapshot_count,
            used_bytes=store.tier.used_bytes,
            capacity_bytes=store.tier.capacity_bytes,
            lease_count=len(store.index.leases),
            acquire_count=store.counts.acquire_count,
            hit_count=store.counts.hit_count,
            queried_tokens=store.counts.queried_tokens,
            hit_tokens=store.counts.hit_tokens,
            evicted_count=store.counts.evicted_count,
            corrupt_count=store.counts.corrupt_count,
        )


def _matches(entry: Entry, request: pb.FlushRequest) -> bool:
    if request.HasField("kv_id") and entry.kv_id != request.kv_id:
        return False
    return not (request.HasField("tenant_tag") and entry.tenant_tag != request.tenant_tag)
