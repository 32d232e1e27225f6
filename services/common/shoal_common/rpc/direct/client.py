"""The calling end of direct connections: finding the server's, connecting, opening calls."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Callable, Mapping
from typing import Any

from shoal.common.v1 import direct_service_pb2 as pb

from shoal_common.host import host_id, host_of
from shoal_common.rpc.direct.call import DirectCall
from shoal_common.rpc.direct.connection import DirectConnection
from shoal_common.rpc.direct.frames import (
    VERSION,
    DirectBroken,
    Ending,
    FrameKind,
    Opening,
    pack_frame,
    pack_hello,
    unpack_credit,
    unpack_hello,
)
from shoal_common.same_host import unpace

logger = logging.getLogger(__name__)

_CONNECT_S = 1.0
_LAST_ID = 2**32 - 1


class DirectClient(DirectConnection):
    """One connection. `open` begins calls while it `is_open`."""

    def __init__(self) -> None:
        super().__init__(pings=True)
        self._calls: dict[int, DirectCall] = {}
        self._last_id = 0
        self._greeted: asyncio.Future[None] = self._loop.create_future()
        self._idle: asyncio.Event | None = None

    async def finish(self, grace_s: float) -> None:
        """Close once all calls have ended, after `grace_s` at the latest: then they are broken."""
        if self._calls and grace_s > 0:
            self._idle = asyncio.Event()
            try:
                async with asyncio.timeout(grace_s):
                    await self._idle.wait()
            except TimeoutError:
                pass
        self.close()

    async def greet(self, key: bytes) -> None:
        """Show the server's key. Raises DirectBroken when it is another server's."""
        self.write(pack_frame(FrameKind.HELLO, 0, pack_hello(key)))
        await self._greeted

    def open(
        self,
        method: str,
        request: Any,
        *,
        serialize: Callable[[Any], bytes],
        deserialize: Callable[[bytes], Any],
        metadata: Mapping[str, str],
        timeout_s: float,
        takes_one: bool,
    ) -> DirectCall:
        """Begin a call. `takes_one`: the method takes one message, `request`; else `request` may be an iterator."""
        call_id = self._last_id = self._last_id + 1
        call = DirectCall(self, call_id, serialize, deserialize, self._forget)
        if not self.is_open or call_id == _LAST_ID:
            call.broken(DirectBroken("the connection has ended"))
            return call
        self._calls[call_id] = call
        opening = Opening(method, timeout_s, metadata, serialize(request) if takes_one else None)
        self.write(pack_frame(FrameKind.OPEN, call_id, opening.pack()))
        if not math.isinf(timeout_s):
            call.expires(timeout_s)
        if not takes_one and request is not None:
            call.write_all(request)
        return call

    def _take(self, kind: int, call_id: int, payload: bytes) -> None:
        if kind == FrameKind.HELLO and not self._greeted.done():
            unpack_hello(payload)
            self._greeted.set_result(None)
            return
        call = self._calls.get(call_id)
        if call is None:
            if not 0 < call_id <= self._last_id:
                raise DirectBroken(f"a frame for call {call_id}, which was not opened")
            return  # It crossed the caller's leaving.
        if kind == FrameKind.MESSAGE:
            call.messages.feed(payload)
        elif kind == FrameKind.END:
            call.end(Ending.unpack(payload))
        elif kind == FrameKind.CREDIT:
            call.messages.feed_credit(unpack_credit(payload))
        else:
            raise DirectBroken(f"a frame of kind {kind}")

    def _ended(self, error: DirectBroken) -> None:
        if not self._greeted.done():
            self._greeted.set_exception(error)
        for call in list(self._calls.values()):
            call.broken(error)

    def _forget(self, call_id: int) -> None:
        self._calls.pop(call_id, None)
        if self._idle is not None and not self._calls:
            self._idle.set()


async def connect(address: str, located: pb.LocateResponse) -> DirectClient:
    """A connection to the server that said so at `address`. Raises DirectBroken."""
    if located.version != VERSION:
        raise DirectBroken(f"version {located.version} of the framing, here it is {VERSION}")
    is_near = bool(located.host_id) and located.host_id == host_id()
    for is_local in (True, False) if is_near and located.socket_name else (False,):
        connection: DirectClient | None = None
        try:
            async with asyncio.timeout(_CONNECT_S):
                connection = await (_local(located.socket_name) if is_local else _remote(address, located.port))
                await connection.greet(located.key)
                return connection
        except (OSError, ValueError, DirectBroken) as error:
            # TimeoutError is an OSError. Containers of one host may share its memory and not its sockets.
            if connection is not None:
                connection.close(at_once=True)
            logger.debug("no direct connection", extra={"address": address, "error": str(error)})
    raise DirectBroken(f"{address} takes no direct connections from here")


async def _local(name: str) -> DirectClient:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        made.connect(f"\0{name}")
    except BaseException:
        made.close()
        raise
    _, connection = await asyncio.get_running_loop().create_unix_connection(DirectClient, sock=made)
    return connection


async def _remote(address: str, port: int) -> DirectClient:
    transport, connection = await asyncio.get_running_loop().create_connection(DirectClient, host_of(address), port)
    connected = transport.get_extra_info("socket")
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    unpace(connected)
    return connection
