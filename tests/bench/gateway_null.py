"""The least that streams: a server that writes one prepared event per token, and parses, counts and decides nothing."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import socket

TOKENS = 64
"""Of one answer."""
_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
)


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


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token_s: float) -> None:
    """One connection: any request gets TOKENS events, one write each, `token_s` seconds apart."""
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            await reader.readexactly(length)
            before = _HEAD
            for _ in range(TOKENS):
                writer.write(before + _TOKEN)
                await writer.drain()
                await asyncio.sleep(token_s)
                before = b""
            writer.write(_DONE)
    writer.close()


async def _serve(token_s: float) -> None:
    serve = functools.partial(answer, token_s=token_s)
    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=1024)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    await server.serve_forever()


def main() -> None:
    """Prints its port as a JSON object and serves until it is killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ms-per-token", type=float, default=0.0)
    asyncio.run(_serve(parser.parse_args().ms_per_token / 1000))


if __name__ == "__main__":
    main()
