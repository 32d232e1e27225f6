"""Copies granted payloads into this process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shoal.common.v1 import kv_transport_pb2 as pb
from shoal.common.v1 import kv_transport_service_pb2 as service_pb
from shoal.common.v1 import kv_transport_service_pb2_grpc as pb_grpc

from shoal_common.errors import DataLoss, FailedPrecondition
from shoal_common.kv_transport.arena import ArenaView
from shoal_common.kv_transport.host import host_id
from shoal_common.kv_transport.payloads import verify
from shoal_common.rpc.channels import Channel

_MAX_MAPPED_ARENAS = 64
_BEST_FIRST = (pb.TRANSPORT_KIND_SHM, pb.TRANSPORT_KIND_GRPC)


class KvPuller:
    """Pulls payloads by whatever way was granted, and checks each. One event loop owns it.

    A grant of shared memory that turns out not to be shared is pulled by gRPC: the holder serves both.
    """

    def __init__(
        self, kinds: Iterable[pb.TransportKind.ValueType] = (pb.TRANSPORT_KIND_SHM, pb.TRANSPORT_KIND_GRPC)
    ) -> None:
        """kinds: the ways to offer, best first."""
        self._kinds = tuple(kinds)
        self._views: dict[str, ArenaView] = {}

    @property
    def offer(self) -> pb.TransportOffer:
        """What to send with a request for a grant."""
        return pb.TransportOffer(kinds=self._kinds, host_id=host_id())

    async def pull(
        self, grant: pb.TransportGrant, payloads: Sequence[pb.Payload], channel: Channel, *, timeout_s: float
    ) -> list[bytes]:
        """The bytes of `payloads`, in their order; `channel` leads to the holder.

        Raises ChecksumMismatch or DataLoss (SHORT_PAYLOAD) for damaged data, grpc.aio.AioRpcError when the holder does
        not answer within `timeout_s`.
        """
        if not payloads:
            return []
        view = self._view(grant)
        if view is not None:
            pulled = [_copy(view, payload) for payload in payloads]
        else:
            pulled = await self._pull_by_grpc(grant, payloads, channel, timeout_s)
        for payload, data in zip(payloads, pulled, strict=True):
            verify(payload, data)
        return pulled

    def close(self) -> None:
        """Unmaps everything. Safe to repeat."""
        for view in self._views.values():
            view.close()
        self._views.clear()

    def _view(self, grant: pb.TransportGrant) -> ArenaView | None:
        if grant.kind != pb.TRANSPORT_KIND_SHM:
            return None
        view = self._views.get(grant.arena_name)
        if view is None:
            try:
                view = ArenaView(grant.arena_name, grant.arena_nonce)
            except FailedPrecondition:
                return None
            while len(self._views) >= _MAX_MAPPED_ARENAS:
                self._views.pop(next(iter(self._views))).close()
            self._views[grant.arena_name] = view
        return view

    async def _pull_by_grpc(
        self, grant: pb.TransportGrant, payloads: Sequence[pb.Payload], channel: Channel, timeout_s: float
    ) -> list[bytes]:
        buffers = {payload.payload_id: bytearray(payload.size_bytes) for payload in payloads}
        filled = dict.fromkeys(buffers, 0)
        request = service_pb.PullRequest(export_id=grant.export_id, payload_ids=list(buffers))
        async for chunk in pb_grpc.KvTransportServiceStub(channel.as_grpc()).Pull(request, timeout=timeout_s):
            buffer = buffers.get(chunk.payload_id)
            end = chunk.offset + len(chunk.data)
            if buffer is None or chunk.offset != filled[chunk.payload_id] or end > len(buffer):
                raise DataLoss(
                    f"payload {chunk.payload_id} sent out of order",
                    reason="SHORT_PAYLOAD",
                    payload_id=chunk.payload_id,
                    offset=chunk.offset,
                )
            buffer[chunk.offset : end] = chunk.data
            filled[chunk.payload_id] = end
        for payload_id, buffer in buffers.items():
            if filled[payload_id] != len(buffer):
                raise DataLoss(
                    f"payload {payload_id} ended at {filled[payload_id]} of {len(buffer)} bytes",
                    reason="SHORT_PAYLOAD",
                    payload_id=payload_id,
                )
        return [bytes(buffers[payload.payload_id]) for payload in payloads]


def _copy(view: ArenaView, payload: pb.Payload) -> bytes:
    return bytes(view.memory[payload.arena_offset : payload.arena_offset + payload.size_bytes])
