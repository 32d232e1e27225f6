"""grpc.health.v1 that tells the truth: "" is the process, a service's full name whether it would serve."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from shoal_common.rpc.readiness import Readiness

_STATES = health_pb2.HealthCheckResponse.ServingStatus


class Health:
    """Health of one server, fed by its readiness. `""` serves from start to stop; service names serve when ready."""

    def __init__(self, service_names: Sequence[str], readiness: Readiness) -> None:
        self._names = tuple(service_names)
        self._readiness = readiness
        self._servicer = HealthServicer()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def add(self, server: Any) -> None:
        """Add the health service to a server."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def start(self, server: grpc.aio.Server) -> None:
        """Add the health service to `server` and follow the readiness from now on."""
        self.add(server)
        await self._servicer.set("", _STATES.SERVING)
        await self._publish()
        loop = asyncio.get_running_loop()

        def changed(is_ready: bool) -> None:
            loop.call_soon_threadsafe(self._changed.set)

        self._readiness.listen(changed)
        self._task = asyncio.create_task(self._follow())

    async def stop(self) -> None:
        """Everything NOT_SERVING, for good."""
        if self._task is not None:
            self._task.cancel()
        await self._servicer.enter_graceful_shutdown()

    async def _follow(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._publish()

    async def _publish(self) -> None:
        state = _STATES.SERVING if self._readiness.is_ready else _STATES.NOT_SERVING
        for name in self._names:
            await self._servicer.set(name, state)
