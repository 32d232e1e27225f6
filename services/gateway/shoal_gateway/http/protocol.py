"""uvicorn's HTTP protocol with bounds: size of the head, time for the head, errors as JSON."""

from __future__ import annotations

import asyncio
import fcntl
import sys
import termios
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

ABORT = "shoal.abort"
"""Scope extension: a function that drops the connection without waiting for the client."""
WRITE_NOW = "shoal.write_now"
"""Scope extension: a function that writes more of a chunked body unless the client is behind; says whether it did."""
UNSENT = "shoal.unsent"
"""Scope extension: a function that says how many bytes the client has not taken yet; None where it closes."""
MAX_PIPELINED = 8
"""Requests that a client sends before the one before them is answered; the connection ends at more."""
MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers together."""
MAX_HEADERS = 128


class HeadTooLarge(Exception):
    """The parser turns it into an error of its own; `_refuse` knows better."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection.

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

    def connection_made(self, transport: Any) -> None:
        """A client connected."""
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client left, or was cut."""
        self._stop_head_timer()
        running = self._running
        if running is not None and running is not self.cycle and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """A request begins."""
        self._head_bytes = 0
        if self._head_timer is None:
            self._start_head_timer()
        super().on_message_begin()
        # Closing waits for the client to take what is buffered; one that never reads can only be aborted.
        functions: dict[str, Any] = {
            ABORT: self.transport.abort,
            WRITE_NOW: self._write_now,
            UNSENT: self._unsent,
        }
        self.scope["extensions"] = functions

    def on_url(self, url: bytes) -> None:
        """A part of the request line."""
        self._grow(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._grow(len(name) + len(value) + 4)
        if len(self.headers) >= MAX_HEADERS:
            self._is_head_too_large = True
            raise HeadTooLarge
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is over."""
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

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _write_now(self, data: bytes) -> bool:
        cycle = self._running
        if cycle is None or cycle.disconnected or cycle.response_complete or not cycle.chunked_encoding:
            return False
        if self.flow.write_paused or self.transport.is_closing():
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def _unsent(self) -> int | None:
        if self.transport.is_closing():
            return None
        waiting = self.transport.get_write_buffer_size()
        try:
            queue = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        except OSError:
            # Not every system tells what its own buffer holds.
            return waiting
        return waiting + int.from_bytes(queue, sys.byteorder)

    def _grow(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
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
