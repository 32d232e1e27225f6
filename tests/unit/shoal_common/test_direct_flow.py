"""Direct connections carry what they should and no more: sizes, credit, crowds, floods, noise."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from shoal_common.rpc import from_rpc_error
from shoal_common.rpc.direct import connection, serving
from shoal_common.rpc.direct.client import DirectClient
from shoal_common.rpc.direct.frames import (
    MAX_MESSAGE_BYTES,
    Ending,
    FrameKind,
    Opening,
    pack_credit,
    pack_frame,
    pack_hello,
)
from shoal_common.rpc.direct.messages import WINDOW_BYTES
from support.direct_calls import NAME, RawCaller, Running, listed, no_complaints, running, told
from support.waiting import until

PART_BYTES = 1 << 16


@pytest.fixture(autouse=True)
async def quiet() -> AsyncIterator[None]:
    with no_complaints():
        yield


async def sized(requests: list[bytes], context: Any) -> bytes:
    """As many bytes as the request says."""
    return bytes(int(requests[0].split(b" ")[0]))


async def test_messages_up_to_the_limit_pass_and_one_byte_more_fails_its_call_only() -> None:
    async with running(sized) as probe:
        before, waits = probe.connection, probe.stub("echo_stream")(timeout=60)
        for size in (0, MAX_MESSAGE_BYTES):
            assert len(await probe.stub("unary_unary")(b"%d" % size, timeout=60)) == size
            assert [len(one) for one in await listed(probe.stub("written_stream")(b"%d" % size, timeout=60))] == [
                5,
                size,
            ]
            assert await probe.stub("unary_unary")(b"0".ljust(max(1, size), b" "), timeout=60) == b""
        over = MAX_MESSAGE_BYTES + 1
        too_large = f"Sent message larger than max ({over} vs. {MAX_MESSAGE_BYTES})"
        for call in (
            probe.stub("unary_unary")(b"%d" % over, timeout=60),
            listed(probe.stub("written_stream")(b"%d" % over, timeout=60)),
            probe.stub("unary_unary")(b"0".ljust(over, b" "), timeout=60),
            listed(probe.stub("unary_stream")(b"0".ljust(over, b" "), timeout=60)),
        ):
            code, details, _ = await told(call)
            assert (code, details.removeprefix("CLIENT: ")) == (grpc.StatusCode.RESOURCE_EXHAUSTED, too_large)
        stream = probe.stub("echo_stream")(timeout=60)
        outcomes = [await told(stream.write(bytes(over))), await told(stream.read()), await told(stream.write(b"0"))]
        assert {outcome[0] for outcome in outcomes} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        # The connection, and a call that ran all the while, are as they were.
        await waits.write(b"3")
        assert await waits.read() == bytes(3)
        assert probe.connection is before


async def test_an_answer_over_the_limit_names_its_reason() -> None:
    async with running(sized) as probe:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await probe.stub("unary_unary")(b"%d" % (MAX_MESSAGE_BYTES + 1), timeout=60)
        assert from_rpc_error(caught.value).reason == "MESSAGE_TOO_LARGE"


async def test_metadata_over_the_limit_fails_its_call_only() -> None:
    from shoal_common.request_scope import request_id

    async with running() as probe:
        request_id.set("x" * 20_000)
        code, _, _ = await told(probe.stub("unary_unary")(b"", timeout=5))
        request_id.set("")
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await probe.stub("unary_unary")(b"a", timeout=5) == b"a"


@pytest.mark.parametrize("size", [0, PART_BYTES])
async def test_a_caller_that_does_not_read_bounds_the_server_and_hinders_nobody(size: int) -> None:
    written = 0

    async def act(requests: list[bytes], context: Any) -> bytes:
        nonlocal written
        while requests == [b"many"] and written < limit * 2:
            await context.write(bytes(size))
            written += 1
        return b"last"

    limit = WINDOW_BYTES // (size + 9) + 1
    async with running(act) as probe:
        call = probe.stub("written_stream")(b"many", timeout=60)
        await until(lambda: written >= limit - 2, what="the window is used")
        assert await probe.stub("unary_unary")(b"one", timeout=5) == b"last"
        assert written <= limit
        assert probe.connection.queued_bytes == 0
        answers = await listed(call)
        assert (len(answers), answers[0], answers[-1]) == (2 * limit + 2, b"first", b"last")


async def test_a_server_that_does_not_read_bounds_its_caller_and_hinders_nobody() -> None:
    may_read = asyncio.Event()

    async def act(requests: list[bytes], context: Any) -> bytes:
        if requests != [b"one"]:
            await may_read.wait()
        return b"%d" % len(requests[0])

    async with running(act) as probe:
        call, written = probe.stub("echo_stream")(timeout=60), 0

        async def write() -> None:
            nonlocal written
            for _ in range(40):
                await call.write(bytes(PART_BYTES))
                written += 1
            await call.done_writing()

        writing = asyncio.ensure_future(write())
        await until(lambda: written >= WINDOW_BYTES // PART_BYTES, what="the window is used")
        assert await probe.stub("unary_unary")(b"one", timeout=5) == b"3"
        assert written <= WINDOW_BYTES // PART_BYTES + 1  # The server has read one, and not returned its credit.
        may_read.set()
        assert await listed(call) == [b"%d" % PART_BYTES] * 40
        await writing


async def test_thousands_of_calls_at_once_are_all_answered() -> None:
    async with running() as probe:
        unary, stream = probe.stub("unary_unary"), probe.stub("unary_stream")
        answers = await asyncio.gather(*(unary(b"%d" % turn, timeout=60) for turn in range(3000)))
        assert answers == [b"%d" % turn for turn in range(3000)]
        streams = await asyncio.gather(*(listed(stream(b"%d" % turn, timeout=60)) for turn in range(1000)))
        assert streams == [[b"first", b"%d" % turn] for turn in range(1000)]
        assert probe.connection._calls == {}


async def test_calls_that_are_too_many_for_a_connection_are_refused_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MAX_CALLS", 3)
    may_end = asyncio.Event()

    async def act(requests: list[bytes], context: Any) -> bytes:
        await may_end.wait()
        return b""

    async with running(act) as probe:
        calls = [asyncio.ensure_future(_awaited(probe.stub("unary_unary")(b"", timeout=20))) for _ in range(3)]
        code, _, _ = await told(probe.stub("unary_unary")(b"", timeout=20))
        may_end.set()
        assert (code, await asyncio.gather(*calls)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, [b""] * 3)


async def _awaited(call: Any) -> Any:
    return await call


def opening(method: str, request: bytes | None, timeout_s: float = 60.0) -> bytes:
    """The payload of OPEN."""
    return Opening(f"/{NAME}/{method}", timeout_s, {}, request).pack()


async def only_raw(probe: Running) -> serving.Serving:
    """The server's end of the connection that a test has made by itself."""
    own = probe.connection._transport.get_extra_info("sockname")  # type: ignore[union-attr]
    await until(lambda: probe.direct_server.connection_count == 2)
    return next(
        one
        for one in probe.direct_server._connections
        if one._transport is not None
        and one._transport.get_extra_info("peername") != own
        and one._transport.get_extra_info("peername")
    )


@pytest.mark.parametrize(
    "flood",
    [
        pack_frame(FrameKind.PING, 0) * 7000,
        None,
    ],
    ids=["pings", "calls"],
)
async def test_a_caller_that_never_reads_is_not_written_to_without_end_and_is_cut(
    flood: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_CHOKED_BYTES", 2 << 20)
    async with running(sized) as probe:
        raw = await RawCaller.to(probe.direct_server)
        raw.writer.transport.pause_reading()  # type: ignore[attr-defined]
        end = await only_raw(probe)
        call_id = 0
        while not end._is_choked:
            if flood is not None:
                raw.writer.write(flood)
            else:
                for _ in range(10):
                    call_id += 1
                    raw.send(FrameKind.OPEN, call_id, opening("unary_unary", b"100000"))
            await asyncio.sleep(0)
            assert end.queued_bytes < 16 << 20
        if flood is not None:
            # And it takes no more from it, however much there is.
            queued_bytes = end.queued_bytes
            for _ in range(20):
                raw.writer.write(flood)
                await asyncio.sleep(0)
            assert end.queued_bytes <= queued_bytes
        monkeypatch.setattr(connection, "SILENCE_S", 0.05)
        end._look()
        await until(lambda: probe.direct_server.connection_count == 1, what="the connection is cut")
        assert await probe.stub("unary_unary")(b"1", timeout=5) == bytes(1)
        raw.close()


async def test_a_choked_caller_that_reads_again_gets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_CHOKED_BYTES", 2 << 20)
    async with running(sized) as probe:
        raw = await RawCaller.to(probe.direct_server)
        end = await only_raw(probe)
        call_id = 0
        while not end._is_choked:
            call_id += 1
            raw.send(FrameKind.OPEN, call_id, opening("unary_unary", b"200000"))
            await asyncio.sleep(0)
        call_id += 1
        raw.send(FrameKind.OPEN, call_id, opening("unary_unary", b"1"))
        endings: set[int] = set()
        while len(endings) < call_id:
            frame = await raw.frame()
            assert frame is not None
            if frame[0] == FrameKind.END:
                endings.add(frame[1])
        raw.close()


BAD_FRAMES = {
    "no greeting": [(FrameKind.PING, 0, b"")],
    "a message without a call": [(FrameKind.MESSAGE, 1, b"")],
    "credit without a call": [(FrameKind.CREDIT, 9, pack_credit(1))],
    "call 0": [(FrameKind.OPEN, 0, opening("unary_unary", b""))],
    "a frame for the connection": [(FrameKind.MESSAGE, 0, b"")],
    "a call twice": [(FrameKind.OPEN, 1, opening("echo_stream", None))] * 2,
    "a call before": [(FrameKind.OPEN, one, opening("echo_stream", None)) for one in (2, 1)],
    "an opening that is none": [(FrameKind.OPEN, 1, b"\xff" * 5)],
    "a message for a unary call": [
        (FrameKind.OPEN, 1, opening("unary_stream", b"5")),
        (FrameKind.MESSAGE, 1, b""),
    ],
    "a message after the last": [
        (FrameKind.OPEN, 1, opening("stream_unary", None)),
        (FrameKind.HALF_CLOSE, 1, b""),
        (FrameKind.MESSAGE, 1, b""),
    ],
    "credit that is none": [(FrameKind.OPEN, 1, opening("echo_stream", None)), (FrameKind.CREDIT, 1, b"1")],
    "the end of a call": [(FrameKind.OPEN, 1, opening("echo_stream", None)), (FrameKind.END, 1, Ending(0).pack())],
    "more than there is credit for": [
        (FrameKind.OPEN, 1, opening("echo_stream", None)),
        *[(FrameKind.MESSAGE, 1, bytes(1 << 19))] * 4,
    ],
    "more empty messages than there is credit for": [
        (FrameKind.OPEN, 1, opening("echo_stream", None)),
        (FrameKind.MESSAGE, 1, b"stop"),
        *[(FrameKind.MESSAGE, 1, b"")] * (WINDOW_BYTES // 9 + 1),
    ],
}


@pytest.mark.parametrize("name", BAD_FRAMES)
async def test_a_caller_that_breaks_the_rules_is_hung_up_on_and_its_calls_end(name: str) -> None:
    async def act(requests: list[bytes], context: Any) -> bytes:
        if len(requests[0]) > 1:
            await asyncio.Event().wait()
        return requests[0]

    async with running(act) as probe:
        key = probe.direct_server.key
        raw = RawCaller(*await asyncio.open_connection("127.0.0.1", probe.direct_server.port))
        if name != "no greeting":
            raw.send(FrameKind.HELLO, 0, pack_hello(key))
        for kind, call_id, payload in BAD_FRAMES[name]:
            raw.send(kind, call_id, payload)
        await raw.hung_up()
        await until(lambda: probe.direct_server.connection_count == 1 and not probe.direct_server._running())
        assert await probe.stub("unary_unary")(b"a", timeout=5) == b"a"
        raw.close()


async def test_a_call_of_another_kind_is_unimplemented() -> None:
    async with running() as probe:
        raw = await RawCaller.to(probe.direct_server)
        raw.send(FrameKind.OPEN, 1, opening("unary_unary", None))
        raw.send(FrameKind.OPEN, 2, opening("echo_stream", b"a"))
        await raw.frame()
        for call_id in (1, 2):
            kind, ended, payload = await raw.frame() or (0, 0, b"")
            assert (kind, ended, Ending.unpack(payload).code) == (FrameKind.END, call_id, 12)
        raw.close()


async def test_a_call_that_is_cancelled_before_it_begins_leaves_nothing() -> None:
    async with running(sized) as probe:
        raw = await RawCaller.to(probe.direct_server)
        end = await only_raw(probe)
        for call_id, timeout_s in enumerate((60.0, 0.0, -1.0, float("inf")), 1):
            raw.send(FrameKind.OPEN, call_id, opening("unary_unary", b"1", timeout_s))
            raw.send(FrameKind.CANCEL, call_id)
            raw.send(FrameKind.CANCEL, call_id)
        raw.send(FrameKind.OPEN, 5, opening("unary_unary", b"1"))
        assert [((await raw.frame()) or (0, 0))[:2] for _ in range(3)] == [
            (FrameKind.HELLO, 0),
            (FrameKind.MESSAGE, 5),
            (FrameKind.END, 5),
        ]
        assert (end._calls, end.tasks()) == ({}, [])
        raw.close()


def noise(chance: random.Random, greeting: bytes) -> bytes:
    """Bytes, or frames with good, damaged, or misplaced payloads."""
    good = [
        pack_frame(FrameKind.OPEN, 1, opening("echo_stream", None)),
        pack_frame(FrameKind.OPEN, 2, opening("unary_unary", b"x" * 50)),
        pack_frame(FrameKind.OPEN, 3, opening("written_stream", b"x")),
        pack_frame(FrameKind.MESSAGE, 1, b"abc"),
        pack_frame(FrameKind.CREDIT, 1, pack_credit(100)),
        pack_frame(FrameKind.HALF_CLOSE, 1),
        pack_frame(FrameKind.CANCEL, 2),
        pack_frame(FrameKind.END, 1, Ending(5, "gone", b"abc").pack()),
        pack_frame(FrameKind.PING, 0),
        pack_frame(FrameKind.PONG, 0),
    ]
    kind = chance.randrange(4)
    if kind == 0:
        return chance.randbytes(chance.randrange(1, 200))
    if kind == 1:
        return greeting + chance.randbytes(chance.randrange(1, 200))
    if kind == 2:
        chance.shuffle(good)
        return greeting + b"".join(good[: chance.randrange(1, 9)])
    whole = bytearray(greeting + b"".join(good))
    for _ in range(chance.randrange(1, 4)):
        whole[chance.randrange(len(greeting), len(whole))] ^= 1 << chance.randrange(8)
    return bytes(whole[: chance.randrange(len(greeting), len(whole))])


@pytest.mark.parametrize("seed", range(4))
async def test_noise_at_the_server_ends_its_connection_and_nothing_else(seed: int) -> None:
    chance = random.Random(seed)
    async with running() as probe:
        greeting = pack_frame(FrameKind.HELLO, 0, pack_hello(probe.direct_server.key))
        for _ in range(25):
            reader, writer = await asyncio.open_connection("127.0.0.1", probe.direct_server.port)
            sent = noise(chance, greeting)
            # It may hang up at any time.
            with contextlib.suppress(OSError, RuntimeError):
                while sent:
                    size = chance.randrange(1, len(sent) + 1)
                    writer.write(sent[:size])
                    sent = sent[size:]
                    await asyncio.sleep(0)
                writer.write_eof()
                async with asyncio.timeout(10):
                    while await reader.read(1 << 16):
                        pass
            writer.close()
        await until(lambda: probe.direct_server.connection_count == 1 and not probe.direct_server._running())
        assert await probe.stub("unary_unary")(b"a", timeout=5) == b"a"


@pytest.mark.parametrize("seed", range(4))
async def test_noise_at_the_caller_ends_its_calls_and_nothing_else(seed: int) -> None:
    chance = random.Random(seed)
    greeting = pack_frame(FrameKind.HELLO, 0, pack_hello(bytes(16)))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(greeting)
        await reader.read(1000)
        writer.write(noise(chance, b""))
        writer.write_eof()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    for _ in range(25):
        _, client = await asyncio.get_running_loop().create_connection(DirectClient, "127.0.0.1", port)
        await client.greet(bytes(16))
        calls = [
            client.open(
                "/a/b", request, serialize=None, deserialize=None, metadata={}, timeout_s=10.0, takes_one=takes_one
            )
            for request, takes_one in ((b"a", True), (None, False), (iter([b"a", b"b"]), False))
        ]
        async with asyncio.timeout(5):
            for call in calls:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await listed(call)
        assert client._calls == {}
        await client.closed()
    server.close()
