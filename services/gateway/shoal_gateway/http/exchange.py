"""One HTTP request and its response, on bare ASGI: bounded body, watched connection, bounded writes."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from types import TracebackType
from typing import Any

import orjson
from shoal_common import request_scope
from shoal_common.errors import InvalidArgument, MeshError, SlowReader

from shoal_gateway.edge.account import Standings
from shoal_gateway.edge.keys import ApiKey
from shoal_gateway.http.errors import error_body, error_headers, is_anthropic, status_of
from shoal_gateway.http.limit_headers import Headers, anthropic_headers, openai_headers
from shoal_gateway.http.protocol import CONNECTION, BoundedProtocol
from shoal_gateway.refusals import BodyTooLarge, SlowWriter

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
_JSON = [(b"content-type", b"application/json")]
_MAX_TURNS = 10
"""So many write timeouts a client that is slow may take for one write."""


class ClientGone(Exception):
    """The connection is closed; nobody reads an answer."""


class Exchange:
    """Reads one request, writes one response. Invariant: the status line is sent at most once.

    max_body_bytes    413 above it
    read_timeout_s    a client that sends nothing of its body for so long is cut
    write_timeout_s   a client that takes nothing for so long is cut, a slow one after _MAX_TURNS times that
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        max_body_bytes: int,
        read_timeout_s: float,
        write_timeout_s: float,
    ) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._max_body_bytes = max_body_bytes
        self._read_timeout_s, self._write_timeout_s = read_timeout_s, write_timeout_s
        # Taken out: through its scope the connection would hold itself.
        self._connection: BoundedProtocol = scope["extensions"].pop(CONNECTION)
        self.write_now: Callable[[bytes], bool] = self._connection.write_now
        """More of a body that has begun, if the client is not behind. False: nothing is written, `write` has to wait.

        Saves the waiting of a stream whose client keeps up, which costs more than the writing.
        """
        self.has_begun = False
        self.route = ""
        """The path as it is served, without version and name of a model."""
        self.key: ApiKey | None = None
        """Whose request it is; None where keys are off, and on paths that are open to all."""
        self.limit_headers: Headers = []
        """What every response says of its key's limits."""

    @property
    def path(self) -> str:
        """The path, unquoted."""
        return str(self._scope["path"])

    @property
    def method(self) -> str:
        """GET, POST, ..."""
        return str(self._scope["method"])

    def header(self, name: bytes) -> bytes:
        """The first header of that lower-case name, or nothing."""
        for key, value in self._scope["headers"]:
            if key == name:
                return bytes(value)
        return b""

    def tell_limits(self, standings: Standings) -> None:
        """Say with the response how the key's limits stand."""
        if is_anthropic(self.path):
            self.limit_headers = anthropic_headers(standings, time.time())
        else:
            self.limit_headers = openai_headers(standings)

    async def body(self) -> bytes:
        """The whole body. Raises BodyTooLarge or ClientGone."""
        length = self.header(b"content-length")
        if length.isdigit() and int(length) > self._max_body_bytes:
            raise self._too_large()
        body = self._connection.body_now()
        if body is not None and len(body) <= self._max_body_bytes:
            return body
        if body is not None:
            raise self._too_large()
        parts: list[bytes] = []
        size = 0
        while True:
            try:
                async with asyncio.timeout(self._read_timeout_s):
                    message = await self._receive()
            except TimeoutError as error:
                raise SlowWriter(f"no more of the body came in {self._read_timeout_s:g} s") from error
            if message["type"] != "http.request":
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            if size > self._max_body_bytes:
                raise self._too_large()
            parts.append(part)
            if not message.get("more_body"):
                return b"".join(parts)

    async def json_object(self) -> tuple[dict[str, Any], int]:
        """The body as a JSON object, and its size in bytes. Raises InvalidArgument, BodyTooLarge or ClientGone."""
        raw = await self.body()
        try:
            value = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise InvalidArgument(f"the body is not valid JSON: {error}", reason="INVALID_JSON") from error
        if not isinstance(value, dict):
            raise InvalidArgument("the body must be a JSON object", reason="INVALID_JSON")
        return value, len(raw)

    def while_connected(self) -> WhileConnected:
        """Give the block up with ClientGone as soon as the client closes the connection. After the body is read."""
        return WhileConnected(self._connection)

    async def respond(self, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        """A whole response at once."""
        fields = [*(headers if headers is not None else _JSON), (b"content-length", str(len(body)).encode())]
        fields += self.limit_headers
        if not any(name == b"x-request-id" for name, _ in fields):
            fields += request_id_headers(_named())
        self.has_begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": fields})
        await self._bounded_send({"type": "http.response.body", "body": body, "more_body": False})

    async def begin(self, headers: Headers, data: bytes = b"") -> None:
        """Status 200, the head of a body that `write` will write, and its first bytes. Raises SlowReader."""
        self.has_begun = True
        headers = headers + self.limit_headers
        if self._connection.begin_now(headers, data):
            return
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        if data:
            await self.write(data)

    async def write(self, data: bytes, *, is_last: bool = False) -> None:
        """More of the body; waits while the client is behind. Raises SlowReader."""
        if self._connection.write_now(data, is_last=is_last):
            return
        if not self._connection.speaks_1_0:
            await self._bounded_send({"type": "http.response.body", "body": data, "more_body": not is_last})
            return
        async with self._patience():
            has_written = await self._connection.write_without_chunks(data, is_last=is_last)
        if not has_written:
            raise ClientGone

    async def abort(self) -> None:
        """Drop the connection, whatever is still unsent."""
        self._connection.abort()
        # The server hears of it on the loop's next turn, and then no longer misses the rest of the response.
        await asyncio.sleep(0)

    def error_body(self, error: MeshError) -> bytes:
        """The error as clients of this path expect it."""
        return error_body(error, self.path)

    async def fail(self, error: MeshError) -> None:
        """The error as a response of its own."""
        _named()
        await self.respond(status_of(error), self.error_body(error), error_headers(error))

    async def _bounded_send(self, message: dict[str, Any]) -> None:
        async with self._patience():
            await self._send(message)

    @contextlib.asynccontextmanager
    async def _patience(self) -> AsyncIterator[None]:
        """Bounds a write. Raises SlowReader or ClientGone."""
        try:
            async with asyncio.timeout(None) as limit:
                patience = _Patience(limit, self._write_timeout_s, self._connection.unsent)
                try:
                    yield
                finally:
                    patience.end()
        except RuntimeError as error:
            # Between a connection's end and the server's hearing of it, its transport refuses what is written.
            if self._connection.unsent() is None:
                raise ClientGone from error
            raise
        except TimeoutError as error:
            raise SlowReader(
                f"the client took nothing for {self._write_timeout_s:g} s", timeout_s=self._write_timeout_s
            ) from error

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"the body is over {self._max_body_bytes} bytes", max_body_bytes=self._max_body_bytes)


class WhileConnected:
    """Cancels the task inside of the block when the client leaves, and makes ClientGone of that."""

    def __init__(self, connection: BoundedProtocol) -> None:
        self._connection = connection
        self._task: asyncio.Task[Any] | None = None
        self._has_gone = False

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        if not self._connection.watch(self._gone):
            raise ClientGone

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._connection.unwatch()
        task = self._task if self._has_gone and isinstance(error, asyncio.CancelledError) else None
        if task is not None and task.uncancel() == 0:
            raise ClientGone from None

    def _gone(self) -> None:
        self._has_gone = True
        if self._task is not None:
            self._task.cancel()


class _Patience:
    """Ends a wait for a client that took nothing for `seconds`. One that takes something has _MAX_TURNS times as long.

    unsent   bytes that it has not taken yet; None where the connection closes
    """

    def __init__(self, limit: asyncio.Timeout, seconds: float, unsent: Callable[[], int | None]) -> None:
        self._limit, self._seconds, self._unsent = limit, seconds, unsent
        self._loop = asyncio.get_running_loop()
        self._left = unsent()
        self._turns = 1
        self._timer = self._loop.call_later(seconds, self._judge)

    def end(self) -> None:
        """The wait is over."""
        self._timer.cancel()

    def _judge(self) -> None:
        left = self._unsent()
        if left is None or self._left is None or left >= self._left or self._turns == _MAX_TURNS:
            self._limit.reschedule(self._loop.time())
            return
        self._left, self._turns = left, self._turns + 1
        self._timer = self._loop.call_later(self._seconds, self._judge)


def request_id_headers(request_id: str) -> Headers:
    """As OpenAI's clients look for it, and as Anthropic's do."""
    value = request_id.encode()
    return [(b"x-request-id", value), (b"request-id", value)]


def _named() -> str:
    """The request's name; one that never was opened gets it here, for whoever reports what it was answered."""
    if not request_scope.request_id.get():
        request_scope.request_id.set(secrets.token_hex(16))
    return request_scope.request_id.get()


Handler = Callable[[Exchange], Awaitable[None]]
