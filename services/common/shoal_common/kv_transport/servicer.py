"""Serves live exports by gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
from shoal.common.v1 import kv_transport_service_pb2 as pb
from shoal.common.v1 import kv_transport_service_pb2_grpc as pb_grpc

from shoal_common.kv_transport.exports import ExportTable

CHUNK_BYTES = 1 << 20


class KvTransportServicer(pb_grpc.KvTransportServiceServicer):
    """KvTransportService over an ExportTable."""

    def __init__(self, exports: ExportTable) -> None:
        self._exports = exports

    async def Pull(
        self, request: pb.PullRequest, context: grpc.aio.ServicerContext[pb.PullRequest, pb.PullResponse]
    ) -> AsyncIterator[pb.PullResponse]:
        export = self._exports.get(request.export_id)
        for payload_id in request.payload_ids:
            data = export.read(payload_id)
            for offset in range(0, max(len(data), 1), CHUNK_BYTES):
                yield pb.PullResponse(payload_id=payload_id, offset=offset, data=data[offset : offset + CHUNK_BYTES])
