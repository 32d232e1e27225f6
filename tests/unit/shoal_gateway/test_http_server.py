"""The HTTP listener on a real socket, in front of an application that answers at once."""

from __future__ import annotations

import asyncio
from typing import Any

from shoal_gateway.http.server import HttpServer

HEAD = b"GET / HTTP/1.1\r\nhost: x\r\n"


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"Hi"})


async def test_a_head_that_is_not_complete_in_time_ends_the_connection() -> None:
    app: Any = hello
    server = HttpServer(app, listen_address="127.0.0.1:0", head_timeout_s=0.1, stop_grace_s=1.0)
    host, _, port = server.bind().rpartition(":")
    await server.start()
    try:
        for begun in (b"", HEAD):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(begun)
            assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.close()
        # A second request has as long from its own first byte; between two, no clock runs.
        reader, writer = await asyncio.open_connection(host, int(port))
        for _ in range(2):
            writer.write(HEAD + b"\r\n")
            assert (await asyncio.wait_for(reader.readuntil(b"Hi"), 5)).startswith(b"HTTP/1.1 200")
            await asyncio.sleep(0.2)
        writer.write(HEAD)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
    finally:
        await server.stop()
