"""Stores blocks and snapshots in kv_cache, in the background, as far as it keeps up."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
from shoal.common.v1 import kv_transport_pb2 as transport_pb
from shoal.kv_cache.v1 import kv_cache_service_pb2 as pb

from shoal_common.errors import MeshError
from shoal_common.kv_cache_client.nodes import CacheNodes
from shoal_common.kv_cache_client.put_call import PutCall
from shoal_common.kv_transport import PayloadSpec, describe
from shoal_common.rpc import Channels, from_rpc_error, is_transport_failure
from shoal_common.telemetry import Metrics

logger = logging.getLogger(__name__)

_MAX_PUT_BYTES = 32 << 20
_MAX_PUT_PAYLOADS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheItem:
    """A full block or a snapshot: its spec (block_hash set), the hash of the block's parent, and its bytes."""

    spec: PayloadSpec
    parent_hash: bytes
    data: bytes | memoryview


@dataclass(frozen=True, slots=True)
class _Waiting:
    numerics_id: str
    tenant_tag: bytes
    item: CacheItem


class CacheWriter:
    """A queue of items with a bound in bytes; what comes on top is dropped and counted. Belongs to one event loop.

    Items of one chain are stored in the order in which they were offered. A put that fails is not repeated: the items
    are dropped, and whoever needs them computes them again.
    """

    def __init__(
        self,
        *,
        channels: Channels,
        nodes: CacheNodes,
        metrics: Metrics,
        owner_id: str,
        max_queued_bytes: int,
        put_timeout_s: float,
        kinds: Sequence[transport_pb.TransportKind.ValueType] = (transport_pb.TRANSPORT_KIND_SHM,),
    ) -> None:
        """kinds: ways to offer beside messages of a put; a node on this host lets its memory be filled directly."""
        self._channels, self._nodes, self._owner_id = channels, nodes, owner_id
        self._max_queued_bytes, self._put_timeout_s = max_queued_bytes, put_timeout_s
        self._put = PutCall(kinds)
        self._queue: deque[_Waiting] = deque()
        self._queued_bytes = self._storing_bytes = 0
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._dropped = metrics.counter("kv_write_dropped", "Blocks and snapshots not stored", ("reason",))
        self._stored = metrics.counter("kv_write_stored", "Blocks and snapshots newly stored in kv_cache")
        waiting = metrics.gauge("kv_write_waiting_bytes", "Bytes of blocks and snapshots that are not stored yet")
        waiting.set_function(lambda: self._queued_bytes + self._storing_bytes)

    def offer(self, items: Sequence[CacheItem], *, numerics_id: str, tenant_tag: bytes) -> int:
        """Queue items; returns how many were taken."""
        taken = 0
        for item in items:
            if self._queued_bytes + len(item.data) > self._max_queued_bytes:
                break
            self._queue.append(_Waiting(numerics_id, tenant_tag, item))
            self._queued_bytes += len(item.data)
            taken += 1
        if taken < len(items):
            self._dropped.labels("queue_full").inc(len(items) - taken)
        if taken:
            self._idle.clear()
            self._wake.set()
        return taken

    async def run(self) -> None:
        """Store what is offered, for ever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                await self._store(self._next_batch())
                self._storing_bytes = 0
            self._idle.set()

    async def flush(self) -> None:
        """Wait until the queue is empty and stored; give it a deadline."""
        await self._idle.wait()

    def _next_batch(self) -> list[_Waiting]:
        """Items of one owner from the head of the queue, as many as fit into a put."""
        batch: list[_Waiting] = []
        size = 0
        while self._queue and len(batch) < _MAX_PUT_PAYLOADS:
            head = self._queue[0]
            same = not batch or (_owner(head) == _owner(batch[0]))
            if not same or (batch and size + len(head.item.data) > _MAX_PUT_BYTES):
                break
            batch.append(self._queue.popleft())
            size += len(head.item.data)
        self._queued_bytes -= size
        self._storing_bytes = size
        return batch

    def close(self) -> None:
        """Unmap what was filled. After `run` has been cancelled; safe to repeat."""
        self._put.close()

    async def _store(self, batch: Sequence[_Waiting]) -> None:
        address = self._nodes.pick()
        if address is None:
            self._dropped.labels("no_node").inc(len(batch))
            return
        channel = self._channels.get(address)
        begin = _begin(batch, self._owner_id)
        try:
            data = [one.item.data for one in batch]
            self._stored.inc(await self._put.run(channel, begin, data, timeout_s=self._put_timeout_s))
        except grpc.aio.AioRpcError as error:
            if is_transport_failure(error):
                self._channels.rebuild(channel)
                self._nodes.failed(address)
            self._drop(batch, from_rpc_error(error))
        except MeshError as error:
            self._drop(batch, error)

    def _drop(self, batch: Sequence[_Waiting], error: MeshError) -> None:
        self._dropped.labels("put_failed").inc(len(batch))
        logger.warning("put failed", extra={"items": len(batch), "reason": error.reason, "error": error.message})


def _owner(waiting: _Waiting) -> tuple[str, str, bytes]:
    return waiting.item.spec.kv_id, waiting.numerics_id, waiting.tenant_tag


def _begin(batch: Sequence[_Waiting], owner_id: str) -> pb.PutBegin:
    first = batch[0]
    return pb.PutBegin(
        put_id=secrets.token_hex(16),
        owner_id=owner_id,
        kv_id=first.item.spec.kv_id,
        numerics_id=first.numerics_id,
        tenant_tag=first.tenant_tag,
        payloads=[describe(index, one.item.spec, one.item.data) for index, one in enumerate(batch)],
        parent_hashes=[one.item.parent_hash for one in batch],
    )
