"""Calls to one kv_cache node: by its byte stream once that is known, else by gRPC, which always works."""

from __future__ import annotations

import time

from shoal.common.v1 import kv_transport_pb2 as transport_pb
from shoal.kv_cache.v1 import kv_cache_service_pb2 as pb
from shoal.kv_cache.v1 import kv_cache_service_pb2_grpc as rpc

from shoal_common.errors import DeadlineExceeded
from shoal_common.kv_transport import (
    BegunCall,
    KvPuller,
    StreamBroken,
    StreamCaller,
    StreamUnreachable,
    local_address,
    stream_address,
)
from shoal_common.rpc import Channel

_LEAST_S = 0.001


class NodeCalls:
    """The first Acquire of a node goes by gRPC and learns where its stream is. One event loop owns it.

    Raises MeshError (by the stream) or grpc.aio.AioRpcError.
    """

    def __init__(self, puller: KvPuller, caller: StreamCaller) -> None:
        self._may_stream = transport_pb.TRANSPORT_KIND_TCP in puller.offer.kinds
        self._caller = caller
        self._streams: dict[str, list[str]] = {}

    def begin_acquire(
        self, request: pb.AcquireRequest, channel: Channel, *, timeout_s: float
    ) -> BegunCall[pb.AcquireResponse] | None:
        """Acquire, sent and perhaps answered. None where no stream is known. `acquire` goes on with it."""
        streams = self._streams.get(channel.address)
        if not streams:
            return None
        return self._caller.begin(streams[0], "Acquire", request, pb.AcquireResponse, timeout_s=timeout_s)

    async def acquire(
        self,
        request: pb.AcquireRequest,
        channel: Channel,
        *,
        timeout_s: float,
        begun: BegunCall[pb.AcquireResponse] | None = None,
    ) -> pb.AcquireResponse:
        """Acquire. Idempotent by lease_id, so that a broken stream can be followed by gRPC."""
        ends_s = time.monotonic() + timeout_s
        left_s, streams = timeout_s, self._streams.get(channel.address)
        while streams:
            if begun is None:
                begun = self._caller.begin(streams[0], "Acquire", request, pb.AcquireResponse, timeout_s=left_s)
            try:
                if not begun.is_answered:
                    await self._caller.finish(begun)
                return begun.answer()
            except (StreamUnreachable, StreamBroken):
                if streams[:1] == [begun.address]:
                    del streams[:1]
                begun = None
            left_s = max(_LEAST_S, ends_s - time.monotonic())
        left_s = ends_s - time.monotonic()
        if left_s < _LEAST_S:
            raise DeadlineExceeded(f"Acquire took more than {timeout_s} s", timeout_s=timeout_s)
        answer = await rpc.KvCacheServiceStub(channel.as_grpc()).Acquire(request, timeout=left_s)
        self._learn(answer.grant, channel)
        return answer

    async def release(self, lease_id: str, channel: Channel, *, timeout_s: float) -> None:
        """Release one lease."""
        await rpc.KvCacheServiceStub(channel.as_grpc()).Release(pb.ReleaseRequest(lease_id=lease_id), timeout=timeout_s)

    def _learn(self, grant: transport_pb.TransportGrant, channel: Channel) -> None:
        local = local_address(grant.call_socket) if grant.call_socket else ""
        remote = stream_address(grant, channel) if self._may_stream else ""
        # The one on this host first; where it cannot be reached, from another network namespace say, the other.
        self._streams[channel.address] = [one for one in (local, remote) if one]
