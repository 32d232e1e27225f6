"""The serving end of direct connections: where they are taken."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shoal_common.rpc.direct.frames import KEY_BYTES
from shoal_common.rpc.direct.serving import Serving

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    import grpc

    Handler = grpc.RpcMethodHandler[Any, Any]

MAX_CONNECTIONS = 1024
_BACKLOG = 128
_CANCEL_S = 1.0
_ANY_IPV6 = "::"


class DirectServer:
    """Serves methods on a TCP port, and on an abstract unix socket to processes of its own user on this host.

    methods   full name to handler, interceptors around them already; their functions are coroutines
    Belongs to one event loop. Callers show `key`, which only gRPC tells them.
    """

    def __init__(self, methods: Mapping[str, Handler]) -> None:
        self.methods = methods
        self.key = secrets.token_bytes(KEY_BYTES)
        self.port = 0
        self.socket_name = ""
        self.is_stopping = False
        self._connections: set[Serving] = set()
        self._servers: list[asyncio.Server] = []

    @property
    def connection_count(self) -> int:
        """Callers that are connected. From any thread."""
        return len(self._connections)

    async def start(self, host: str) -> None:
        """Listen on a free port of `host`. Raises OSError, then listens nowhere."""
        loop = asyncio.get_running_loop()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # As gRPC, which takes callers of both families there.
        is_dual = host == _ANY_IPV6 and socket.has_dualstack_ipv6()
        listener = socket.create_server((host, 0), family=family, dualstack_ipv6=is_dual)
        self.port = listener.getsockname()[1]
        self._servers.append(await loop.create_server(lambda: Serving(self), sock=listener, backlog=_BACKLOG))
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        name = f"shoal-direct-{secrets.token_hex(16)}"
        try:
            local.bind(f"\0{name}")
            self._servers.append(await loop.create_unix_server(lambda: Serving(self), sock=local, backlog=_BACKLOG))
        except BaseException:
            local.close()
            await self.stop(0)
            raise
        self.socket_name = name

    async def stop(self, grace_s: float) -> None:
        """Take no new calls, wait at most `grace_s` for running ones, then cancel them and hang up. Safe to repeat."""
        self.is_stopping = True
        for server in self._servers:
            server.close()
        running = self._running()
        if running and grace_s > 0:
            await asyncio.wait(running, timeout=grace_s)
        cut = self._running()
        for connection in list(self._connections):
            connection.cut()
        if cut:
            _, stuck = await asyncio.wait(cut, timeout=_CANCEL_S)
            if stuck:
                logger.warning("calls do not end when they are cancelled", extra={"calls": len(stuck)})
        await asyncio.gather(*(connection.closed() for connection in self._connections))

    def connected(self, connection: Serving) -> bool:
        """A connection was made. False: it is one too many."""
        if self.is_stopping or len(self._connections) >= MAX_CONNECTIONS:
            return False
        self._connections.add(connection)
        return True

    def disconnected(self, connection: Serving) -> None:
        """It is over."""
        self._connections.discard(connection)

    def _running(self) -> list[asyncio.Task[None]]:
        return [task for one in self._connections for task in one.tasks()]
