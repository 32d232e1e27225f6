"""The HTTP listener on a real socket, in front of an application that answers at once."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator
from typing import Any

from shoal_common.errors import SlowReader
from shoal_common.request_scope import request_id
from shoal_gateway.http.exchange import ClientGone, Exchange
from shoal_gateway.http.protocol import CONNECTION, MAX_PIPELINED, BoundedProtocol
from shoal_gateway.http.server import HttpServer
from support.waiting import until

HEAD = b"GET / HTTP/1.1\r\nhost: x\r\n"
BODY_BYTES = 24 << 20


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"Hi"})


@contextlib.asynccontextmanager
async def serving(app: Any) -> AsyncIterator[tuple[str, int]]:
    server = HttpServer(app, listen_address="127.0.0.1:0", head_timeout_s=5.0, stop_grace_s=1.0)
    host, _, port = server.bind().rpartition(":")
    await server.start()
    try:
        yield host, int(port)
    finally:
        await server.stop()


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


async def test_a_request_that_waited_behind_another_does_not_take_its_name_over() -> None:
    names: list[str] = []
    may_answer = asyncio.Event()

    async def named(scope: Any, receive: Any, send: Any) -> None:
        names.append(request_id.get())
        request_id.set("the first one's")
        await may_answer.wait()
        await hello(scope, receive, send)

    async with serving(named) as (host, port):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write((HEAD + b"\r\n") * 2)
        await until(lambda: bool(names))
        may_answer.set()
        for _ in range(2):
            await asyncio.wait_for(reader.readuntil(b"Hi"), 5)
        writer.close()
    assert names == ["", ""]


def exchange_of(scope: Any, receive: Any, send: Any) -> Exchange:
    return Exchange(scope, receive, send, max_body_bytes=1 << 20, read_timeout_s=5, write_timeout_s=5)


async def test_the_short_ways_write_what_messages_do() -> None:
    async def echoes(scope: Any, receive: Any, send: Any) -> None:
        exchange = exchange_of(scope, receive, send)
        body = await exchange.body()
        if exchange.path == "/messages":
            head = {"type": "http.response.start", "status": 200, "headers": [(b"x-a", b"b")]}
            await send(head)
            for part in (b"one", body, b""):
                await send({"type": "http.response.body", "body": part, "more_body": bool(part)})
            return
        await exchange.begin([(b"x-a", b"b")], b"one")
        assert exchange.write_now(body)
        await exchange.write(b"", is_last=True)

    async def answer(host: str, port: int, path: str, head: str, body: bytes, pieces: int) -> bytes:
        reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
        begun = f"POST {path} HTTP/{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        for at in range(pieces):
            writer.write(begun if not at else b"")
            writer.write(body[at * len(body) // pieces : (at + 1) * len(body) // pieces])
            await writer.drain()
            await asyncio.sleep(0)
        # Kept or closed, as the request asked for.
        got = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 5)
        closes = b"connection: close" in got
        if closes:
            assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        return b"\r\n".join(line for line in got.split(b"\r\n") if not line.startswith(b"date:"))

    async with serving(echoes) as (host, port):
        for head in ("1.1\r\nhost: x", "1.1\r\nhost: x\r\nconnection: close", "1.1\r\nexpect: 100-continue"):
            for body, pieces in ((b"two", 1), (b"x" * 300_000, 7)):
                said = [await answer(host, port, path, head, body, pieces) for path in ("/messages", "/short")]
                # Whoever has sent the body needs no leave to go on.
                said = [one.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"") for one in said]
                assert said[0] == said[1]
                assert b"one" in said[0]
                assert (b"connection: close" in said[0]) == ("close" in head)


async def test_a_body_of_no_set_length_reaches_a_client_of_http_1_0_without_chunks() -> None:
    big = b"x" * BODY_BYTES
    gone: list[Exception] = []

    async def streams(scope: Any, receive: Any, send: Any) -> None:
        exchange = exchange_of(scope, receive, send)
        await exchange.begin([(b"x-a", b"b")], b"one")
        if exchange.path == "/gone":
            with contextlib.suppress(ClientGone):
                await exchange.write(big)
            try:
                await exchange.write(b"three", is_last=True)
            except ClientGone as error:
                gone.append(error)
            return
        # The third waits for what the second has left.
        for part in (b"two", big, b"three"):
            await exchange.write(part)
        await exchange.write(b"", is_last=True)

    async with serving(streams) as (host, port):
        reader, writer = await asyncio.open_connection(host, port)
        # Asking to keep the connection does not help: only its end tells where the body ends.
        writer.write(b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
        head, _, body = (await asyncio.wait_for(reader.read(-1), 10)).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head
        assert b"connection: close" in head
        assert body == b"onetwo" + big + b"three"
        writer.close()
        _, writer = await asyncio.open_connection(host, port, limit=1 << 16)
        writer.write(b"GET /gone HTTP/1.0\r\n\r\n")
        await asyncio.sleep(0.05)
        writer.transport.abort()
        await until(lambda: bool(gone))


async def test_a_client_that_leaves_ends_the_block_before_and_within_it() -> None:
    ended: list[str] = []
    may_go_on = asyncio.Event()
    has_begun = asyncio.Event()
    connections: list[BoundedProtocol] = []

    async def waits(scope: Any, receive: Any, send: Any) -> None:
        connections.append(scope["extensions"][CONNECTION])
        exchange = exchange_of(scope, receive, send)
        await exchange.body()
        has_begun.set()
        if exchange.path == "/late":
            await may_go_on.wait()
        try:
            with exchange.while_connected():
                await asyncio.Event().wait()
        except ClientGone:
            ended.append(exchange.path)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"Hi"})

    async with serving(waits) as (host, port):
        for path in ("/within", "/late"):
            has_begun.clear()
            _, writer = await asyncio.open_connection(host, port)
            # What follows is read, so that the end behind it is.
            writer.write(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 200000\r\n\r\n".encode())
            writer.write(b"x" * 200_000 + HEAD)
            await asyncio.wait_for(has_begun.wait(), 5)
            writer.transport.abort()
            if path == "/late":
                await until(lambda: connections[-1] not in connections[-1].connections)
            may_go_on.set()
            await until(lambda path=path: path in ended)  # type: ignore[misc]
    assert ended == ["/within", "/late"]


async def test_a_connection_that_was_cut_goes_without_a_collection() -> None:
    seen: list[weakref.ref[BoundedProtocol]] = []

    async def waits(scope: Any, receive: Any, send: Any) -> None:
        seen.append(weakref.ref(scope["extensions"][CONNECTION]))
        exchange = exchange_of(scope, receive, send)
        await exchange.body()
        await exchange.begin([], b"x")
        with contextlib.suppress(ClientGone), exchange.while_connected():
            await asyncio.Event().wait()

    async with serving(waits) as (host, port):
        gc.collect()
        gc.disable()
        try:
            _, writer = await asyncio.open_connection(host, port)
            writer.write(HEAD + b"\r\n")
            await until(lambda: bool(seen))
            writer.transport.abort()
            await until(lambda: seen[0]() is None)
        finally:
            gc.enable()


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
