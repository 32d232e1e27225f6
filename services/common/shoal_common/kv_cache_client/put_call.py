"""One put: its bytes written into the node's memory where the host is the same, sent as messages elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from shoal.common.v1 import kv_transport_pb2 as transport_pb
from shoal.kv_cache.v1 import kv_cache_service_pb2 as pb
from shoal.kv_cache.v1 import kv_cache_service_pb2_grpc as rpc

from shoal_common.errors import DataLoss, Unavailable
from shoal_common.kv_transport import MappedArenas, fill, filling, host_id
from shoal_common.rpc import Channel

_CHUNK_BYTES = 1 << 20


class PutCall:
    """Begin, the bytes, Commit. One event loop owns it."""

    def __init__(self, kinds: Sequence[transport_pb.TransportKind.ValueType]) -> None:
        """kinds: what to offer beside messages, which always work."""
        self._kinds = tuple(kinds)
        self._arenas = MappedArenas(is_writable=True)

    async def run(
        self, channel: Channel, begin: pb.PutBegin, data: Sequence[bytes | memoryview], *, timeout_s: float
    ) -> int:
        """Store `data`, as `begin` describes it; how many payloads were new.

        Raises grpc.aio.AioRpcError; DataLoss or Unavailable for a node that does not keep to the order.
        """
        if self._kinds:
            begin.offer.CopyFrom(transport_pb.TransportOffer(kinds=self._kinds, host_id=host_id()))
        stored = await self._attempt(channel, begin, data, timeout_s)
        if stored is None:
            # The memory is not shared after all, though both sides thought so: never again.
            self._kinds = ()
            begin.ClearField("offer")
            stored = await self._attempt(channel, begin, data, timeout_s)
        if stored is None:
            raise Unavailable("the node grants memory that was not asked for", reason="PUT_OUT_OF_ORDER")
        return stored

    def close(self) -> None:
        """Unmap. Safe to repeat."""
        self._arenas.close()

    async def _attempt(
        self, channel: Channel, begin: pb.PutBegin, data: Sequence[bytes | memoryview], timeout_s: float
    ) -> int | None:
        """None when a grant of memory cannot be used."""
        # The stubs type a call without its two-way methods.
        stub: Any = rpc.KvCacheServiceStub(channel.as_grpc())
        call = stub.Put(timeout=timeout_s)
        try:
            await _say(call, pb.PutRequest(begin=begin))
            wanted = (await _answer(call, "wanted")).wanted
            if wanted.HasField("grant") and wanted.payload_ids:
                if not await self._fill(wanted, begin, data):
                    return None
            else:
                await _send(call, wanted, data)
            await _say(call, pb.PutRequest(commit=pb.PutCommit()))
            await call.done_writing()
            return (await _answer(call, "committed")).committed.stored_count
        finally:
            call.cancel()

    async def _fill(self, wanted: pb.PutWanted, begin: pb.PutBegin, data: Sequence[bytes | memoryview]) -> bool:
        grant = wanted.grant
        view = self._arenas.get(grant) if grant.kind == transport_pb.TRANSPORT_KIND_SHM else None
        if view is None or view.descriptor is None:
            return False
        parts = [data[payload_id] for payload_id in wanted.payload_ids]
        descriptor = view.descriptor

        def locked() -> None:
            # The thread goes on when its caller gives up: the node takes nothing back before the lock ends.
            with filling(descriptor, wanted.fill_number):
                fill(view.memory, grant, wanted.slabs, parts)

        await asyncio.to_thread(locked)
        return True


async def _answer(call: Any, kind: str) -> pb.PutResponse:
    """The next answer, which must be of a kind. Raises AioRpcError, DataLoss."""
    answer = await call.read()
    if not isinstance(answer, pb.PutResponse):
        # An error status has been raised by the read; this is an OK that came too early.
        raise DataLoss(f"the put ended where {kind} was due", reason="PUT_OUT_OF_ORDER")
    if not answer.HasField(kind):  # type: ignore[arg-type]
        raise DataLoss(f"{answer.WhichOneof('message')} came where {kind} was due", reason="PUT_OUT_OF_ORDER")
    return answer


async def _say(call: Any, message: pb.PutRequest) -> None:
    try:
        await call.write(message)
    except asyncio.InvalidStateError:
        # The node has ended the call; reading raises its status.
        await call.read()
        raise Unavailable("the put ended early", reason="PUT_OUT_OF_ORDER") from None


async def _send(call: Any, wanted: pb.PutWanted, data: Sequence[bytes | memoryview]) -> None:
    for payload_id in wanted.payload_ids:
        whole = data[payload_id]
        for offset in range(0, len(whole), _CHUNK_BYTES):
            part = bytes(whole[offset : offset + _CHUNK_BYTES])
            await _say(call, pb.PutRequest(data=pb.PutData(payload_id=payload_id, offset=offset, data=part)))
