"""Unary calls by the byte stream: a fifth of gRPC's time."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import ssl
import time
from collections.abc import Callable
from typing import Generic, TypeVar, cast

from google.protobuf.message import DecodeError, Message
from google.rpc import status_pb2

from shoal_common.errors import DeadlineExceeded
from shoal_common.kv_transport.local_calls import connected_to, is_local
from shoal_common.kv_transport.stream_client import StreamUnreachable
from shoal_common.kv_transport.stream_frames import (
    Call,
    FrameBuffer,
    FrameKind,
    StreamBroken,
    pack_frame,
)
from shoal_common.request_scope import REQUEST_ID_KEY, request_id
from shoal_common.rpc.status import from_status
from shoal_common.telemetry import inject

_IDLE_S = 60.0
_MAX_IDLE = 8
_CONNECT_S = 1.0
_AT_ONCE_MS = 1
_MAX_PIECES = 8
"""Of an answer; one that comes in more is left to the event loop."""
_RECEIVED_BYTES = 256 << 10

Answer = TypeVar("Answer", bound=Message)


class BegunCall(Generic[Answer]):
    """A call that was sent. Whoever began it asks for `answer` at once if `is_answered`, else awaits `finish`."""

    def __init__(
        self, address: str, method: str, frame: bytes, answer_type: type[Answer], *, timeout_s: float, ends_s: float
    ) -> None:
        self.address, self.method, self.frame, self.timeout_s, self.ends_s = address, method, frame, timeout_s, ends_s
        self._answer_type = answer_type
        self.connection: _Connection | None = None
        self.answered: tuple[FrameKind, bytes] | None = None

    @property
    def is_answered(self) -> bool:
        """Whether the answer has come."""
        return self.answered is not None

    def answer(self) -> Answer:
        """What the holder said. Raises StreamBroken, or what the method raised."""
        assert self.answered is not None
        kind, body = self.answered
        try:
            if kind is FrameKind.ANSWER:
                return self._answer_type.FromString(body)
            if kind is FrameKind.ERROR:
                raise from_status(status_pb2.Status.FromString(body))
        except DecodeError as error:
            raise StreamBroken(f"{self.method} was answered by nonsense") from error
        raise StreamBroken(f"{kind.name} came where an answer was due")


class StreamCaller:
    """Calls methods that a holder's StreamServer serves. One event loop owns it.

    A holder that has what is asked for at hand answers in less time than an event loop takes to be told of it. So on
    connections without TLS the loop stands still for that answer, for a millisecond at most.
    """

    def __init__(
        self, *, ssl_context: ssl.SSLContext | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ssl, self._clock = ssl_context, clock
        self._idle: dict[str, list[tuple[float, _Connection]]] = {}

    async def call(
        self, address: str, method: str, request: Message, answer_type: type[Answer], *, timeout_s: float
    ) -> Answer:
        """The answer of the holder at host:port, or at a `local_address`. As `begin`, to its end."""
        begun = self.begin(address, method, request, answer_type, timeout_s=timeout_s)
        if not begun.is_answered:
            await self.finish(begun)
        return begun.answer()

    def begin(
        self, address: str, method: str, request: Message, answer_type: type[Answer], *, timeout_s: float
    ) -> BegunCall[Answer]:
        """Sends the call if a connection is idle, and looks for its answer for a moment. Raises nothing.

        Safe only for idempotent methods: a connection that broke while idle is tried once more.
        """
        metadata = inject()
        if request_id.get():
            metadata[REQUEST_ID_KEY] = request_id.get()
        call = Call(method, timeout_s, metadata, request.SerializeToString())
        frame = pack_frame(FrameKind.CALL, call.pack())
        begun = BegunCall(address, method, frame, answer_type, timeout_s=timeout_s, ends_s=self._clock() + timeout_s)
        connection = self._idle_one(address)
        if connection is not None:
            begun.connection = connection
            try:
                begun.answered = connection.exchange_at_once(frame)
            except StreamBroken:
                # Most likely the holder let an idle connection go, or was started anew: `finish` makes a new one.
                connection.close()
                begun.connection = None
            if begun.answered is not None:
                self._put_back(address, connection)
        return begun

    async def finish(self, begun: BegunCall[Answer]) -> None:
        """Waits until it is answered, for the rest of its time. If it is cancelled, so is the call.

        Raises StreamUnreachable, StreamBroken, DeadlineExceeded.
        """
        try:
            async with asyncio.timeout(max(0.0, begun.ends_s - self._clock())):
                if begun.connection is not None:
                    try:
                        begun.answered = await self._use(begun.connection, begun.address, None)
                        return
                    except StreamBroken:
                        pass
                begun.answered = await self._use(await self._connected(begun.address), begun.address, begun.frame)
        except TimeoutError as error:
            seconds = begun.timeout_s
            raise DeadlineExceeded(f"{begun.method} was not answered in {seconds} s", timeout_s=seconds) from error

    def close(self) -> None:
        """Close what is idle. Safe to repeat."""
        idle, self._idle = self._idle, {}
        for connections in idle.values():
            for _, connection in connections:
                connection.close()

    async def _use(self, connection: _Connection, address: str, frame: bytes | None) -> tuple[FrameKind, bytes]:
        """frame: None where it was sent already."""
        try:
            if frame is not None:
                connection.send(frame)
            answered = await connection.answered()
        except BaseException:
            connection.close()
            raise
        self._put_back(address, connection)
        return answered

    def _put_back(self, address: str, connection: _Connection) -> None:
        waiting = self._idle.setdefault(address, [])
        waiting.append((self._clock(), connection))
        if len(waiting) > _MAX_IDLE:
            waiting.pop(0)[1].close()

    def _idle_one(self, address: str) -> _Connection | None:
        waiting = self._idle.get(address)
        while waiting:
            since_s, connection = waiting.pop()
            if since_s >= self._clock() - _IDLE_S and connection.is_open:
                return connection
            connection.close()
        return None

    async def _connected(self, address: str) -> _Connection:
        host, _, port = address.rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_S):
                if is_local(address):
                    made = connected_to(address)
                    _, connection = await loop.create_unix_connection(lambda: _Connection(loop), sock=made)
                else:
                    _, connection = await loop.create_connection(
                        lambda: _Connection(loop), host.strip("[]"), int(port), ssl=self._ssl
                    )
        except (OSError, ValueError) as error:
            # TimeoutError is an OSError.
            raise StreamUnreachable(f"{address}: {error}", address=address) from error
        return connection


class _Connection(asyncio.Protocol):
    """One exchange at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._frames = FrameBuffer()
        self._answer: asyncio.Future[tuple[FrameKind, bytes]] | None = None
        self._socket: socket.socket | None = None
        self._arrivals = select.poll()
        self.is_open = False

    def exchange_at_once(self, frame: bytes) -> tuple[FrameKind, bytes] | None:
        """Send a frame and look for the next one, here and now. None: it is not there yet. Raises StreamBroken."""
        self.send(frame)
        if self._socket is None:
            return None
        try:
            # Past the event loop, which reads what is left to read when it runs again.
            for _ in range(_MAX_PIECES):
                if not self._arrivals.poll(_AT_ONCE_MS):
                    break
                data = self._socket.recv(_RECEIVED_BYTES)
                if not data:
                    raise StreamBroken("the connection ended")
                answered = self._frames.feed(data)
                if answered is not None:
                    self._answer = None
                    return answered
        except BlockingIOError:
            pass
        except OSError as error:
            raise StreamBroken(f"the connection ended: {error}") from error
        return None

    def send(self, frame: bytes) -> None:
        """Send a frame; its answer is awaited by `answered`. Raises StreamBroken."""
        if self._transport is None or not self.is_open:
            raise StreamBroken("the connection has ended")
        self._answer = self._loop.create_future()
        sent = 0
        if self._socket is not None and not self._transport.get_write_buffer_size():
            try:
                sent = self._socket.send(frame)
            except BlockingIOError:
                pass
            except OSError as error:
                raise StreamBroken(f"the connection ended: {error}") from error
        if sent < len(frame):
            self._transport.write(frame[sent:])

    async def answered(self) -> tuple[FrameKind, bytes]:
        """The next frame. Raises StreamBroken."""
        assert self._answer is not None
        return await self._answer

    def close(self) -> None:
        """End the connection. Safe to repeat."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()
        self._close_socket()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.is_open = cast(asyncio.Transport, transport), True
        if transport.get_extra_info("ssl_object") is None:
            # One of our own, on the same connection: the transport's is not for others to read from.
            self._socket = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
            self._socket.setblocking(False)
            self._arrivals.register(self._socket, select.POLLIN)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._close_socket()
        self._fail(StreamBroken(f"the connection ended: {error or 'closed by the peer'}"))

    def data_received(self, data: bytes) -> None:
        try:
            frame = self._frames.feed(data)
            if frame is None:
                return
            if self._answer is None or self._answer.done():
                raise StreamBroken("more came than was asked for")
            self._answer.set_result(frame)
        except StreamBroken as error:
            self._fail(error)
            self.close()

    def _fail(self, error: StreamBroken) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._arrivals.unregister(self._socket)
            self._socket.close()
            self._socket = None
