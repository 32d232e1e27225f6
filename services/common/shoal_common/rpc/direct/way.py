"""The direct way to one address: looked for in the background, and again after it was lost."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable

import grpc
from shoal.common.v1 import direct_service_pb2 as pb

from shoal_common.rpc.direct.client import DirectClient, connect
from shoal_common.rpc.direct.frames import DirectBroken

logger = logging.getLogger(__name__)

_LOCATE_S = 2.0
_AGAIN_S = 1.0
"""After a failure. The server that is there then may be another one."""
_RETIRED_S = 600.0
_ABSENT_S = 30.0
"""After a server has said that it takes no direct calls, or none could be made."""


class DirectWay:
    """Invariant: at most one connection, and at most one search for one. Belongs to one event loop.

    locate   asks the server by gRPC, within so many seconds
    """

    def __init__(self, address: str, locate: Callable[[float], Awaitable[pb.LocateResponse]]) -> None:
        self._address, self._locate = address, locate
        self._connection: DirectClient | None = None
        self._search: asyncio.Task[None] | None = None
        self._next_s = 0.0
        self._is_closed = False
        self._retired: asyncio.Task[None] | None = None

    def connection(self) -> DirectClient | None:
        """The connection, if it is up. Without one a search is begun when it is time for one."""
        connection = self._connection
        if connection is not None and connection.takes_calls:
            return None if connection.is_overloaded else connection
        if self._search is None and not self._is_closed:
            loop = asyncio.get_running_loop()
            if loop.time() >= self._next_s:
                if connection is not None and connection.is_open:
                    self._retire(connection)
                # Of no caller's trace: the connection is for all of them.
                self._search = loop.create_task(self._look(), context=contextvars.Context())
        return None

    async def settle(self, timeout_s: float) -> None:
        """Wait until a search that runs, or is due, has ended; at most `timeout_s`."""
        if self.connection() is None and self._search is not None:
            await asyncio.wait({self._search}, timeout=timeout_s)

    async def close(self, grace_s: float) -> None:
        """End it once its calls have ended, after `grace_s` at the latest. Safe to repeat."""
        self._is_closed = True
        if self._search is not None:
            self._search.cancel()
            await asyncio.gather(self._search, return_exceptions=True)
        connection, self._connection = self._connection, None
        if self._retired is not None:
            self._retired.cancel()
            await asyncio.gather(self._retired, return_exceptions=True)
        if connection is not None:
            await connection.finish(grace_s)

    def _retire(self, connection: DirectClient) -> None:
        # It has no numbers left for calls, after four thousand millions of them.
        self._connection = None
        self._retired = asyncio.get_running_loop().create_task(connection.finish(_RETIRED_S))

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._connection = await connect(self._address, await self._locate(_LOCATE_S))
        except grpc.RpcError as error:
            is_absent = error.code() is grpc.StatusCode.UNIMPLEMENTED
            self._next_s = loop.time() + (_ABSENT_S if is_absent else _AGAIN_S)
        except DirectBroken as error:
            logger.info("calls stay with gRPC", extra={"address": self._address, "error": error.message})
            self._next_s = loop.time() + _ABSENT_S
        except Exception as error:
            logger.error("looking for a direct way failed", extra={"address": self._address}, exc_info=error)
            self._next_s = loop.time() + _ABSENT_S
        else:
            self._next_s = 0.0
        finally:
            self._search = None
