"""The least that streams: a server that writes one prepared event per token, and parses, counts and decides nothing."""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
from typing import cast

import uvloop

TOKENS = 64
"""Of one answer."""
_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
)
_END = b"\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event() -> bytes:
    """One token as Chat Completions streams it."""
    value = {
        "id": "chatcmpl-0123456789abcdef0123456789abcdef",
        "object": "chat.completion.chunk",
        "created": 1700000000,
        "model": "deepseek-flash",
        "system_fingerprint": None,
        "choices": [{"index": 0, "delta": {"content": " harbour"}, "logprobs": None, "finish_reason": None}],
        "usage": None,
    }
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


_TOKEN = chunk(event())
_DONE = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class NullServer(asyncio.Protocol):
    """One connection: any request gets TOKENS events, `step_tokens` in one write every `step_s` seconds."""

    def __init__(self, step_s: float, step_tokens: int) -> None:
        self._step_s, self._step_tokens = step_s, step_tokens
        self._loop = asyncio.get_running_loop()
        self._received = b""
        self._left = 0
        self._is_gone = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client connected."""
        self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        """It left."""
        self._is_gone = True

    def data_received(self, data: bytes) -> None:
        """A request is complete when as much came as its head says."""
        self._received += data
        head, end, body = self._received.partition(_END)
        if not end or len(body) < int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]):
            return
        self._received = b""
        self._left = TOKENS
        self._write(_HEAD)

    def _write(self, before: bytes = b"") -> None:
        if self._is_gone:
            return
        count = min(self._left, self._step_tokens)
        self._left -= count
        self._transport.write(before + _TOKEN * count + (b"" if self._left else _DONE))
        if not self._left:
            return
        if self._step_s:
            self._loop.call_later(self._step_s, self._write)
        else:
            self._loop.call_soon(self._write)


async def _serve(step_s: float, step_tokens: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: NullServer(step_s, step_tokens), "127.0.0.1", 0, backlog=1024)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    await server.serve_forever()


def main() -> None:
    """Prints its port as a JSON object and serves until it is killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--step-tokens", type=int, default=1)
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(args.step_ms / 1000, args.step_tokens))


if __name__ == "__main__":
    main()
