"""A gRPC server as every service runs it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection
from shoal.common.v1.direct_service_pb2_grpc import add_DirectServiceServicer_to_server

from shoal_common.rpc.direct.frames import MAX_MESSAGE_BYTES
from shoal_common.rpc.direct.method_table import MethodTable
from shoal_common.rpc.direct.server import DirectServer
from shoal_common.rpc.direct.servicer import FULL_NAME as DIRECT_SERVICE
from shoal_common.rpc.direct.servicer import DirectServicer
from shoal_common.rpc.health import Health
from shoal_common.rpc.interceptors import ServerInterceptor
from shoal_common.rpc.readiness import Readiness
from shoal_common.telemetry import Metrics

logger = logging.getLogger(__name__)

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Two servers on one port would share the calls; an occupied port must be an error.
    ("grpc.so_reuseport", 0),
    # Clients ping every 10 s, also without calls; gRPC's own policy would send them away (too_many_pings).
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    # And a client that vanished without a FIN is noticed in 15 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
)


class AddressInUse(OSError):
    """The address cannot be listened on, most often because another process does."""


@dataclass(frozen=True, slots=True)
class Service:
    """One service of a server: `Service("shoal.decode.v1.DecodeService", add_DecodeServiceServicer_to_server, s)`."""

    full_name: str
    add: Callable[[Any, Any], None]
    servicer: object


class RpcServer:
    """grpc.aio server with error mapping, health and reflection.

    Use from one event loop: `address = await start()`, later `await stop(grace_s)`.
    """

    def __init__(
        self,
        services: Sequence[Service],
        *,
        listen_address: str,
        readiness: Readiness,
        metrics: Metrics,
        has_reflection: bool = True,
        is_edge: bool = False,
        has_direct: bool = False,
    ) -> None:
        """is_edge: callers are outside of the mesh, see ServerInterceptor.

        has_direct: other services may call by direct connections too, on a port that the system chooses.
        """
        self._services = tuple(services)
        self._listen_address = listen_address
        self._has_reflection = has_reflection
        self._health = Health([service.full_name for service in self._services], readiness)
        self._interceptor = ServerInterceptor(metrics, is_edge=is_edge)
        self._server: grpc.aio.Server | None = None
        self._has_direct = has_direct
        self._direct: DirectServer | None = None
        if has_direct:
            metrics.observe(
                "rpc_direct_connections",
                "Callers that are connected beside gRPC",
                lambda: 0 if self._direct is None else self._direct.connection_count,
            )

    async def start(self) -> str:
        """Listen and serve. Returns the address, with the real port where 0 was asked for. Raises AddressInUse."""
        server = grpc.aio.server(interceptors=[self._interceptor], options=list(_OPTIONS))
        for service in self._services:
            service.add(service.servicer, server)
        names = [service.full_name for service in self._services]
        if self._has_direct:
            self._direct = await self._start_direct()
        if self._direct is not None:
            add_DirectServiceServicer_to_server(DirectServicer(self._direct), server)
            names.append(DIRECT_SERVICE)
        await self._health.start(server)
        if self._has_reflection:
            reflection.enable_server_reflection([*names, "grpc.health.v1.Health", reflection.SERVICE_NAME], server)
        try:
            port = server.add_insecure_port(self._listen_address)
        except RuntimeError as error:
            await self._health.stop()
            if self._direct is not None:
                await self._direct.stop(0)
            raise AddressInUse(f"cannot listen on {self._listen_address}; is another process there?") from error
        await server.start()
        self._server = server
        host = self._listen_address.rpartition(":")[0]
        return f"{host}:{port}"

    async def stop(self, grace_s: float) -> None:
        """Report NOT_SERVING, refuse new calls, wait at most `grace_s` for running ones, then cancel them."""
        await self._health.stop()
        ending = [one.stop(grace_s) for one in (self._direct, self._server) if one is not None]
        await asyncio.gather(*ending)

    async def _start_direct(self) -> DirectServer | None:
        table = MethodTable()
        self._health.add(table)
        for service in self._services:
            service.add(service.servicer, table)
        methods = {method: self._interceptor.around(method, one) for method, one in table.handlers.items()}
        direct = DirectServer(methods)
        host = self._listen_address.rpartition(":")[0]
        try:
            await direct.start(host.strip("[]"))
        except OSError as error:
            # A bad address is an error of the listener that callers know; this one they can do without.
            logger.warning("no direct calls", extra={"host": host, "error": str(error)})
            return None
        return direct
