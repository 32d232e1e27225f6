"""The load of the gateway's bench: streams in a closed loop over raw sockets, the same for every server."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from dataclasses import dataclass, field
from typing import Any, cast

_END = b"0\r\n\r\n"
_DONE = b"data: [DONE]\n\n"
_EVENT = b"data: {"
_OK = b"HTTP/1.1 200"


def request_bytes(host: str, body: dict[str, Any]) -> bytes:
    """A whole POST to Chat Completions."""
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


@dataclass(slots=True)
class Tally:
    """What came since it was made."""

    answers: int = 0
    """Those that ended, and the events that they were in all."""
    answer_events: int = 0
    events: int = 0
    ttft_s: list[float] = field(default_factory=list)


class Stream(asyncio.Protocol):
    """One connection: a request, its answer to the end, the next request, until told to stop."""

    def __init__(self, request: bytes, tally: Tally) -> None:
        self._request, self.tally = request, tally
        self._tail = b""
        self._is_first = True
        self._events = 0
        self._asked_s = 0.0
        self.is_stopping = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        self._transport = cast(asyncio.Transport, transport)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        """The server hung up, or we did."""
        if not self.ended.done():
            self.ended.set_exception(RuntimeError(f"the connection broke: {exc}"))

    def data_received(self, data: bytes) -> None:
        """Count, and look for the end."""
        count = data.count(_EVENT)
        if self._is_first and count:
            self._is_first = False
            self.tally.ttft_s.append(time.perf_counter() - self._asked_s)
        self.tally.events += count
        self._events += count
        self._tail = data if len(data) > 64 else (self._tail + data)[-64:]
        if not self._tail.endswith(_END):
            # An error has a length and no chunks: what is no stream is not waited for.
            if self._is_first and not data.startswith(_OK):
                self._fail(data)
            return
        if _DONE not in self._tail:
            self._fail(data)
            return
        self.tally.answers += 1
        self.tally.answer_events += self._events
        if self.is_stopping:
            self.ended.set_result(None)
            self._transport.abort()
        else:
            self._ask()

    def _ask(self) -> None:
        self._is_first = True
        self._events = 0
        self._tail = b""
        self._asked_s = time.perf_counter()
        self._transport.write(self._request)

    def _fail(self, data: bytes) -> None:
        if not self.ended.done():
            self.ended.set_exception(RuntimeError(f"not the answer that was asked for: {data[-500:]!r}"))
        self._transport.abort()


class Load:
    """`count` streams against one server. `async with Load(...) as load`: they run inside the block."""

    def __init__(self, address: str, body: dict[str, Any], count: int) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._request = request_bytes(address, body)
        self._count = count
        self._streams: list[Stream] = []
        self.tally = Tally()

    async def __aenter__(self) -> Load:
        loop = asyncio.get_running_loop()
        for _ in range(self._count):
            _, stream = await loop.create_connection(lambda: Stream(self._request, self.tally), self._host, self._port)
            self._streams.append(stream)
        return self

    def reset(self) -> Tally:
        """Count anew; returns the new counts, which grow on."""
        self.tally = Tally()
        for stream in self._streams:
            stream.tally = self.tally
        return self.tally

    async def __aexit__(self, *_: object) -> None:
        for stream in self._streams:
            stream.is_stopping = True
        async with asyncio.timeout(30):
            await asyncio.gather(*(stream.ended for stream in self._streams))
