"""The calling end of direct connections: finding the server's, connecting, opening calls."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import grpc
from shoal.common.v1 import direct_service_pb2 as pb

from shoal_common.host import host_id, host_of
from shoal_common.rpc.direct.call import DirectCall
from shoal_common.rpc.direct.connection import DirectConnection
from shoal_common.rpc.direct.frames import (
    VERSION,
    DirectBroken,
    Ending,
    FrameKind,
    MessageTooLarge,
    Opening,
    pack_frame,
    pack_hello,
    unpack_credit,
    unpack_hello,
)
from shoal_common.same_host import is_of_our_user

logger = logging.getLogger(__name__)

_CONNECT_S = 1.0
LAST_ID = 2**32 - 1
_MAX_QUEUED_BYTES = 64 << 20


class DirectClient(DirectConnection):
    """One connection. `open` begins calls while it `takes_calls`; they are held weakly, see DirectCall."""

    def __init__(self) -> None:
        super().__init__(is_caller=True)
        self._calls: dict[int, weakref.ref[DirectCall]] = {}
        self._last_id = 0
        self._greeted: asyncio.Future[None] = self._loop.create_future()
        # Its failure need not be heard: a connection may end before anybody greets.
        self._greeted.add_done_callback(lambda greeted: greeted.cancelled() or greeted.exception())
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def takes_calls(self) -> bool:
        """It is open, and has numbers left for calls."""
        return self.is_open and self._last_id < LAST_ID

    @property
    def is_overloaded(self) -> bool:
        """The server has not taken what it was told for a while; new calls would only wait here, and be held here."""
        return self.is_full and self.queued_bytes > _MAX_QUEUED_BYTES

    async def finish(self, grace_s: float) -> None:
        """Close once all calls have ended, after `grace_s` at the latest: then they are cancelled."""
        try:
            if self._calls and grace_s > 0:
                async with asyncio.timeout(grace_s):
                    await self._idle.wait()
        except TimeoutError:
            logger.debug("calls did not end in their grace", extra={"calls": len(self._calls)})
        finally:
            for call in self._running():
                call.cancel()
            self.close()
        await self.closed()

    async def greet(self, key: bytes) -> None:
        """Show the server's key. Raises DirectBroken when it is another server's."""
        self.write(pack_frame(FrameKind.HELLO, 0, pack_hello(key)))
        await self._greeted

    def open(
        self,
        method: str,
        request: Any,
        *,
        serialize: Callable[[Any], bytes] | None,
        deserialize: Callable[[bytes], Any] | None,
        metadata: Mapping[str, str],
        timeout_s: float,
        takes_one: bool,
    ) -> DirectCall:
        """Begin a call. `takes_one`: the method takes one message, `request`; else `request` may be an iterator.

        Raises ValueError for metadata with a NUL, and what `serialize` raises.
        """
        payload = (serialize or bytes)(request) if takes_one else None
        try:
            opening = Opening(method, timeout_s, metadata, payload).pack()
        except MessageTooLarge as error:
            return self._failed(grpc.StatusCode.RESOURCE_EXHAUSTED, f"CLIENT: {error.message}")
        if not self.takes_calls:
            return self._failed(grpc.StatusCode.UNAVAILABLE, "the connection has ended")
        call_id = self._last_id = self._last_id + 1
        call = DirectCall(self, call_id, serialize, deserialize)
        self._calls[call_id] = weakref.ref(call)
        self._idle.clear()
        self.write(pack_frame(FrameKind.OPEN, call_id, opening))
        if not math.isinf(timeout_s):
            call.expires(self._loop.call_later(timeout_s, self._expire, call_id))
        if not takes_one and request is not None:
            call.write_all(request)
        return call

    def forget(self, call_id: int) -> None:
        """A call has ended."""
        self._calls.pop(call_id, None)
        if not self._calls:
            self._idle.set()

    def abandon(self, call_id: int, timer: asyncio.TimerHandle | None) -> None:
        """Nobody has a call any more. From any thread: the collector of garbage has none of its own."""
        with contextlib.suppress(RuntimeError):  # The loop is gone, with all of its calls.
            self._loop.call_soon_threadsafe(self._end_abandoned, call_id, timer)

    def _end_abandoned(self, call_id: int, timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()
        if call_id in self._calls:
            self.forget(call_id)
            self.write(pack_frame(FrameKind.CANCEL, call_id))

    def _failed(self, code: grpc.StatusCode, details: str) -> DirectCall:
        call = DirectCall(self, 0, None, None)
        call.failed(code, details)
        return call

    def _running(self) -> list[DirectCall]:
        return [call for one in self._calls.values() if (call := one()) is not None]

    def _expire(self, call_id: int) -> None:
        call = self._call(call_id)
        if call is not None:
            call.expire()

    def _call(self, call_id: int) -> DirectCall | None:
        held = self._calls.get(call_id)
        return None if held is None else held()

    def _take(self, kind: int, call_id: int, payload: bytes) -> None:
        call = self._call(call_id)
        if call is None:
            self._take_other(kind, call_id, payload)
        elif kind == FrameKind.MESSAGE:
            call.messages.feed(payload)
        elif kind == FrameKind.END:
            call.end(Ending.unpack(payload))
        elif kind == FrameKind.CREDIT:
            call.messages.feed_credit(unpack_credit(payload))
        else:
            raise DirectBroken(f"a frame of kind {kind}")

    def _take_other(self, kind: int, call_id: int, payload: bytes) -> None:
        if not self._greeted.done():
            if kind != FrameKind.HELLO:
                raise DirectBroken("the server does not greet")
            unpack_hello(payload)
            self._frames.open_up()
            self._greeted.set_result(None)
        elif kind != FrameKind.PONG and not 0 < call_id <= self._last_id:
            raise DirectBroken(f"a frame for call {call_id}, which was not opened")
        # Else it crossed the caller's leaving.

    def _ended(self, error: DirectBroken) -> None:
        if not self._greeted.done():
            self._greeted.set_exception(error)
        for call in self._running():
            call.failed(grpc.StatusCode.UNAVAILABLE, error.message)


async def connect(address: str, located: pb.LocateResponse) -> DirectClient:
    """A connection to the server that said so at `address`. Raises DirectBroken."""
    if located.version != VERSION:
        raise DirectBroken(f"version {located.version} of the framing, here it is {VERSION}")
    is_near = bool(located.host_id) and located.host_id == host_id()
    for is_local in (True, False) if is_near and located.socket_name else (False,):
        connection = DirectClient()
        try:
            async with asyncio.timeout(_CONNECT_S):
                if is_local:
                    await _to_local(connection, located.socket_name)
                else:
                    await _to_port(connection, host_of(address), located.port)
                await connection.greet(located.key)
                return connection
        except (OSError, ValueError, OverflowError, DirectBroken) as error:
            # TimeoutError is an OSError. Containers of one host may share its memory and not its sockets.
            connection.close(at_once=True)
            logger.debug("no direct connection", extra={"address": address, "error": str(error)})
        except BaseException:
            connection.close(at_once=True)
            raise
    raise DirectBroken(f"{address} takes no direct connections from here")


async def _to_port(connection: DirectClient, host: str, port: int) -> None:
    await asyncio.get_running_loop().create_connection(lambda: connection, host, port)


async def _to_local(connection: DirectClient, name: str) -> None:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        made.connect(f"\0{name}")
        # A name is free for anybody once its server is gone.
        if not is_of_our_user(made):
            raise PermissionError("the socket is of another user's process")
        await asyncio.get_running_loop().create_unix_connection(lambda: connection, sock=made)
    except BaseException:
        made.close()
        raise
