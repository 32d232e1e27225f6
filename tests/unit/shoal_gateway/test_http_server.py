"""The HTTP listener on a real socket, in front of an application that answers at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from shoal_common.errors import SlowReader
from shoal_gateway.http.exchange import Exchange
from shoal_gateway.http.protocol import MAX_PIPELINED
from shoal_gateway.http.server import HttpServer
from support.waiting import until

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


BODY_BYTES = 24 << 20


@contextlib.asynccontextmanager
async def serving(app: Any) -> AsyncIterator[tuple[str, int]]:
    server = HttpServer(app, listen_address="127.0.0.1:0", head_timeout_s=5.0, stop_grace_s=1.0)
    host, _, port = server.bind().rpartition(":")
    await server.start()
    try:
        yield host, int(port)
    finally:
        await server.stop()


async def test_a_client_that_leaves_is_heard_of_though_it_sent_another_request() -> None:
    begun = 0
    has_begun, has_left = asyncio.Event(), asyncio.Event()

    async def waits(scope: Any, receive: Any, send: Any) -> None:
        nonlocal begun
        begun += 1
        has_begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        has_left.set()

    async with serving(waits) as (host, port):
        _, writer = await asyncio.open_connection(host, port)
        writer.write(HEAD + b"\r\n")
        await asyncio.wait_for(has_begun.wait(), 5)
        writer.write(HEAD + b"\r\n")
        await writer.drain()
        writer.transport.abort()
        await asyncio.wait_for(has_left.wait(), 5)
    assert begun == 1


async def test_requests_behind_each_other_are_answered_in_turn_up_to_a_bound() -> None:
    may_answer = asyncio.Event()

    async def later(scope: Any, receive: Any, send: Any) -> None:
        await may_answer.wait()
        await hello(scope, receive, send)

    async with serving(later) as (host, port):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write((HEAD + b"\r\n") * (1 + MAX_PIPELINED))
        await asyncio.sleep(0.1)
        may_answer.set()
        for _ in range(1 + MAX_PIPELINED):
            assert (await asyncio.wait_for(reader.readuntil(b"Hi"), 5)).startswith(b"HTTP/1.1 200")
        may_answer.clear()
        writer.write((HEAD + b"\r\n") * (2 + MAX_PIPELINED))
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 5) == b""
        may_answer.set()


async def test_a_client_that_reads_slowly_gets_all_and_one_that_reads_nothing_is_cut() -> None:
    cut: list[Exception] = []

    async def much(scope: Any, receive: Any, send: Any) -> None:
        exchange = Exchange(scope, receive, send, max_body_bytes=9, read_timeout_s=9, write_timeout_s=0.5)
        await exchange.begin([(b"content-type", b"text/plain")])
        try:
            # The second waits for what the first has left.
            await exchange.write(b"x" * BODY_BYTES)
            await exchange.write(b"y", is_last=True)
        except SlowReader as error:
            cut.append(error)
            await exchange.abort()

    async with serving(much) as (host, port):
        loop = asyncio.get_running_loop()
        reader, writer = await asyncio.open_connection(host, port, limit=1 << 16)
        writer.write(HEAD + b"\r\n")
        count, began_s = 0, loop.time()
        while piece := await asyncio.wait_for(reader.read(1 << 20), 5):
            count += len(piece)
            if piece.endswith(b"0\r\n\r\n"):
                break
            # All of it takes four times what one write may that makes no progress.
            await asyncio.sleep(max(0.0, began_s + 2.0 * count / BODY_BYTES - loop.time()))
        assert count > BODY_BYTES
        assert not cut
        writer.close()
        _, writer = await asyncio.open_connection(host, port, limit=1 << 16)
        writer.write(HEAD + b"\r\n")
        await until(lambda: bool(cut))
        writer.transport.abort()
