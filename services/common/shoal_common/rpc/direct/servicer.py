"""DirectService: tells callers where a server's direct connections are taken."""

from __future__ import annotations

from typing import Any

from shoal.common.v1 import direct_service_pb2 as pb
from shoal.common.v1 import direct_service_pb2_grpc as rpc

from shoal_common.host import host_id
from shoal_common.rpc.direct.frames import VERSION
from shoal_common.rpc.direct.server import DirectServer

FULL_NAME = "shoal.common.v1.DirectService"


class DirectServicer(rpc.DirectServiceServicer):
    """Of one server."""

    def __init__(self, server: DirectServer) -> None:
        self._server = server

    async def Locate(self, request: pb.LocateRequest, context: Any) -> pb.LocateResponse:
        """Where, and with which key."""
        return pb.LocateResponse(
            port=self._server.port,
            socket_name=self._server.socket_name,
            host_id=host_id(),
            key=self._server.key,
            version=VERSION,
        )
