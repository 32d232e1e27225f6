"""Pulls by gRPC chunks: slower, and works wherever calls do."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.common.v1 import kv_transport_pb2 as pb
from shoal.common.v1 import kv_transport_service_pb2 as service_pb
from shoal.common.v1 import kv_transport_service_pb2_grpc as pb_grpc

from shoal_common.errors import DataLoss
from shoal_common.kv_transport.wanted import Wanted
from shoal_common.rpc.channels import Channel


async def pull_by_grpc(
    grant: pb.TransportGrant, wanted: Sequence[Wanted], memory: memoryview, channel: Channel, timeout_s: float
) -> None:
    """Take every payload to its place in `memory` and check it there.

    Raises ChecksumMismatch, DataLoss (SHORT_PAYLOAD), grpc.aio.AioRpcError.
    """
    places = {one.first_payload_id + index: (one, index) for one in wanted for index in range(one.count)}
    filled = dict.fromkeys(places, 0)
    request = service_pb.PullRequest(export_id=grant.export_id, payload_ids=list(places))
    async for chunk in pb_grpc.KvTransportServiceStub(channel.as_grpc()).Pull(request, timeout=timeout_s):
        one, index = places.get(chunk.payload_id, (None, 0))
        end = chunk.offset + len(chunk.data)
        if one is None or chunk.offset != filled[chunk.payload_id] or end > one.size_bytes:
            raise DataLoss(
                f"payload {chunk.payload_id} sent out of order",
                reason="SHORT_PAYLOAD",
                payload_id=chunk.payload_id,
                offset=chunk.offset,
            )
        begin = one.begin + index * one.stride
        memory[begin + chunk.offset : begin + end] = chunk.data
        filled[chunk.payload_id] = end
        if end == one.size_bytes:
            one.verify(memory, index, index + 1)
    for payload_id, (one, _) in places.items():
        if filled[payload_id] != one.size_bytes:
            raise DataLoss(
                f"payload {payload_id} ended at {filled[payload_id]} of {one.size_bytes} bytes",
                reason="SHORT_PAYLOAD",
                payload_id=payload_id,
            )
