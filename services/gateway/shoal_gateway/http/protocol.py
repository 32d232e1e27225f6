"""uvicorn's HTTP protocol with bounds: size of the head, time for the head, errors as JSON."""

from __future__ import annotations

import asyncio
import fcntl
import sys
import termios
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

CONNECTION = "shoal.connection"
"""Scope extension: the BoundedProtocol itself, for the short ways past ASGI's messages."""
MAX_PIPELINED = 8
"""Requests that a client sends before the one before them is answered; the connection ends at more."""
MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers together."""
MAX_HEADERS = 128


class HeadTooLarge(Exception):
    """The parser turns it into an error of its own; `_refuse` knows better."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection.

    Beside ASGI's messages it has shorter ways for the request that is being answered: a body that is here already, a
    response to a client that keeps up. They do what the messages would and say where only the messages can; a message,
    a timer around it and a task that waits for the client to leave cost more than the rest of a short request.

    head_timeout_s   from a request's first byte (or the connection, for the first request) to the end of its headers
    """

    def __init__(self, *args: Any, head_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timeout_s = head_timeout_s
        self._head_bytes = 0
        self._is_head_too_large = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None
        """The request that is being answered; `cycle` is the newest, which may wait behind it."""
        self._is_in_head = False
        self._on_gone: Callable[[], None] | None = None
        self._has_chunks = True
        """The answer that has begun is chunked; HTTP/1.0 knows no chunks, its body ends with the connection."""

    def connection_made(self, transport: Any) -> None:
        """A client connected."""
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client left, or was cut."""
        self._stop_head_timer()
        # uvicorn leaves it where the connection broke, and with it the buffers until it rings.
        self._unset_keepalive_if_required()
        running = self._running
        if running is not None and running is not self.cycle and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        super().connection_lost(exc)
        on_gone, self._on_gone = self._on_gone, None
        if on_gone is not None:
            on_gone()

    def data_received(self, data: bytes) -> None:
        """More of a request, or of several."""
        super().data_received(data)
        # Most heads come in one piece and need no timer.
        if self._is_in_head and self._head_timer is None:
            self._start_head_timer()

    def on_message_begin(self) -> None:
        """A request begins."""
        self._head_bytes = 0
        self._is_in_head = True
        super().on_message_begin()
        extensions: dict[str, Any] = {CONNECTION: self}
        self.scope["extensions"] = extensions

    def on_url(self, url: bytes) -> None:
        """A part of the request line."""
        self._head_bytes += len(url)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > MAX_HEAD_BYTES or len(self.headers) >= MAX_HEADERS:
            self._refuse_head()
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """The head is over."""
        self._is_in_head = False
        self._stop_head_timer()
        super().on_headers_complete()
        if len(self.pipeline) > MAX_PIPELINED:
            self.transport.abort()
        elif self.pipeline:
            # Who stops reading does not hear that the client leaves.
            self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request, and close."""
        status, code = (b"431 Request Header Fields Too Large", "headers_too_large")
        if not self._is_head_too_large:
            status, code = b"400 Bad Request", "invalid_http"
        else:
            msg = f"the head of the request is over {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} headers"
        error = {"message": msg, "type": "invalid_request_error", "param": None, "code": code}
        body = orjson.dumps({"error": error})
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, len(body)) + body)
        self.transport.close()

    def body_now(self) -> bytes | None:
        """The whole body, if it is here and nobody has asked for it."""
        cycle = self._running
        if cycle is None or cycle.more_body or cycle.disconnected:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        cycle.message_event.clear()
        return body

    def watch(self, on_gone: Callable[[], None]) -> bool:
        """Call `on_gone` once the client has left. False: it has already, and will not be called."""
        if self._running is None or self._running.disconnected:
            return False
        self._on_gone = on_gone
        # Who stops reading does not hear that the client leaves.
        self.flow.resume_reading()
        return True

    def unwatch(self) -> None:
        """No longer."""
        self._on_gone = None

    def begin_now(self, headers: Sequence[tuple[bytes, bytes]], data: bytes) -> bool:
        """Status 200 and the first of a body of no set length, unless the client is behind; says whether it did.

        headers   the server's own, which need no check; none that frames the body or ends the connection
        """
        cycle = self._running
        if cycle is None or cycle.response_started or cycle.scope["method"] == "HEAD" or not self._can_write(cycle):
            return False
        cycle.response_started = cycle.chunked_encoding = True
        cycle.waiting_for_100_continue = False
        head = bytearray(STATUS_LINE[200])
        for name, value in (*cycle.default_headers, *headers):
            head += b"%b: %b\r\n" % (name, value)
        if not cycle.keep_alive:
            head += b"connection: close\r\n"
        self._has_chunks = not self.speaks_1_0
        head += b"transfer-encoding: chunked\r\n\r\n" if self._has_chunks else b"\r\n"
        self.transport.write(bytes(head) + self._chunk(data))
        return True

    def write_now(self, data: bytes, *, is_last: bool = False) -> bool:
        """More of a body that has begun, unless the client is behind; says whether it did. Once per token of one."""
        cycle = self._running
        if cycle is None or not cycle.chunked_encoding or not self._can_write(cycle):
            return False
        chunk = self._chunk(data)
        self.transport.write(chunk + b"0\r\n\r\n" if is_last and self._has_chunks else chunk)
        if is_last:
            cycle.response_complete = True
            cycle.message_event.set()
            if not cycle.keep_alive:
                self.transport.close()
            cycle.on_response()
        return True

    @property
    def speaks_1_0(self) -> bool:
        """The request that is being answered is one of HTTP/1.0."""
        return self._running is not None and self._running.scope["http_version"] == "1.0"

    async def write_without_chunks(self, data: bytes, *, is_last: bool = False) -> bool:
        """As `write_now`, once the client has taken what was written before. False: it has left.

        For HTTP/1.0; to all others ASGI's messages write the same, and would put it into chunks here.
        """
        if self.flow.write_paused:
            await self.flow.drain()
        return self.write_now(data, is_last=is_last)

    def abort(self) -> None:
        """Drop the connection: closing waits for the client to take what is buffered, and one may never read."""
        self.transport.abort()

    def unsent(self) -> int | None:
        """Bytes that the client has not taken yet; None where the connection closes."""
        if self.transport.is_closing():
            return None
        waiting = self.transport.get_write_buffer_size()
        try:
            queue = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        except OSError:
            # Not every system tells what its own buffer holds.
            return waiting
        return waiting + int.from_bytes(queue, sys.byteorder)

    def _chunk(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if data and self._has_chunks else data

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _can_write(self, cycle: RequestResponseCycle) -> bool:
        """Its answer is wanted, and the client has taken what was written before."""
        is_over = cycle.disconnected or cycle.response_complete
        return not (is_over or self.flow.write_paused or self.transport.is_closing())

    def _refuse_head(self) -> NoReturn:
        self._is_head_too_large = True
        raise HeadTooLarge

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self._head_timeout_s, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        self.transport.close()
