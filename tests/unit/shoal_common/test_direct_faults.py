"""Whatever goes wrong with a direct connection, its calls end at once; the next ones are made, by gRPC if need be."""

from __future__ import annotations

import asyncio
import ctypes
import os
import platform
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from shoal.common.v1 import direct_service_pb2 as pb
from shoal_common.rpc import Channel, Channels, is_transport_failure
from shoal_common.rpc.direct import client, connection, server, serving, way
from shoal_common.rpc.direct.connection import DirectConnection
from shoal_common.rpc.direct.frames import VERSION, FrameKind, pack_frame, pack_hello
from support.direct_calls import (
    NAME,
    RawCaller,
    Running,
    identity,
    joined,
    listed,
    locating,
    no_complaints,
    running,
    told,
)
from support.nats_server import free_port
from support.waiting import until, until_async


@pytest.fixture(autouse=True)
async def quiet() -> AsyncIterator[None]:
    """Nothing goes on after a test, and nothing is complained of."""
    with no_complaints():
        yield
        await until(lambda: not _own_tasks(), what="tasks of direct calls have ended")


def _own_tasks() -> list[Any]:
    running: list[Any] = [task.get_coro() for task in asyncio.all_tasks()]
    return [one for one in running if "/rpc/" in one.cr_code.co_filename]


def caller_end(probe: Running) -> DirectConnection:
    """The caller's end of the connection."""
    return probe.connection


def server_end(probe: Running) -> DirectConnection:
    """The server's."""
    (end,) = probe.direct_server._connections
    return end


BOTH_ENDS = pytest.mark.parametrize("end_of", [caller_end, server_end])


class Stuck:
    """An act that never answers, or writes for ever."""

    def __init__(self) -> None:
        self.entered, self.left = asyncio.Event(), asyncio.Event()

    async def __call__(self, requests: list[bytes], context: Any) -> bytes:
        self.entered.set()
        try:
            while requests == [b"write"]:
                await context.write(bytes(1 << 18))
            while requests != [b"answer"]:
                await asyncio.Event().wait()
            return b"done"
        finally:
            self.left.set()


async def _unary(probe: Running) -> Any:
    return await probe.stub("unary_unary")(b"", timeout=20)


async def _reads(probe: Running) -> Any:
    return await listed(probe.stub("unary_stream")(b"", timeout=20))


async def _is_written_to(probe: Running) -> Any:
    call = probe.stub("written_stream")(b"write", timeout=20)
    await asyncio.Event().wait() if not await call.read() else None
    try:
        while True:
            await call.read()
    finally:
        call.cancel()


async def _writes(probe: Running) -> Any:
    call = probe.stub("echo_stream")(timeout=20)
    while True:
        await call.write(bytes(1 << 18))


async def _iterates(probe: Running) -> Any:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield bytes(1 << 18)

    return await probe.stub("stream_unary")(endless(), timeout=20)


@BOTH_ENDS
@pytest.mark.parametrize("phase", [_unary, _reads, _is_written_to, _writes, _iterates])
async def test_a_cut_connection_ends_its_calls_at_both_ends_and_the_next_call_has_a_new_one(
    phase: Callable[[Running], Any], end_of: Callable[[Running], DirectConnection]
) -> None:
    act = Stuck()
    async with running(act) as probe:
        first = probe.connection
        calling = asyncio.ensure_future(phase(probe))
        if phase is not _iterates:
            await act.entered.wait()
        else:
            await until(lambda: bool(probe.direct_server._running()))
        transport = end_of(probe)._transport
        assert transport is not None
        transport.abort()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(calling, 5)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert is_transport_failure(caught.value)
        await until(lambda: phase is _iterates or act.left.is_set(), what="the server's call has ended")
        assert await probe.stub("unary_unary")(b"answer", timeout=5) == b"done"
        await probe.channel.settle(5)
        assert probe.connection is not first
        assert await probe.stub("unary_unary")(b"answer", timeout=5) == b"done"


async def test_writing_while_the_connection_is_being_lost_is_harmless() -> None:
    async with running(Stuck()) as probe:
        call = probe.stub("echo_stream")(timeout=20)
        held = probe.connection
        transport = held._transport
        assert transport is not None
        transport.abort()
        # Not told yet: it still counts as open, and takes what nobody will get.
        assert (held.is_open, probe.channel.direct) == (True, held)
        late = probe.stub("unary_unary")(b"", timeout=20)
        await told(call.write(b"a"))
        assert (await told(late))[0] is grpc.StatusCode.UNAVAILABLE
        assert (await told(call.read()))[0] is grpc.StatusCode.UNAVAILABLE
        assert (await told(call.write(b"a")))[0] is grpc.StatusCode.UNAVAILABLE
        await call.done_writing()
        assert call.cancel() is False


async def test_a_server_that_comes_back_at_its_address_is_found_again_by_its_new_key() -> None:
    address = f"127.0.0.1:{free_port()}"
    async with running(address=address) as first:
        channel = Channel(address, is_direct=True)
        await channel.settle(5)
        assert channel.direct is not None
        old_key = first.direct_server.key
    stub = channel.unary_unary(f"/{NAME}/unary_unary", identity, identity)
    assert is_transport_failure(await _error(stub(b"a", timeout=5)))
    async with running(address=address) as second:
        assert second.direct_server.key != old_key

        async def is_direct() -> bool:
            await channel.settle(1)
            return channel.direct is not None

        await until_async(is_direct, timeout_s=20)
        assert await stub(b"a", timeout=5) == b"a"
        await channel.close()


async def _error(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


class Silent:
    """Listens, takes connections and says nothing, or something wrong."""

    def __init__(self, says: bytes = b"") -> None:
        self._says = says
        self.taken = self.left = 0
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Silent:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.taken += 1
        self._writers.append(writer)
        writer.write(self._says)
        await reader.read()
        self.left += 1


def _absent(told: pb.LocateResponse) -> pb.LocateResponse | None:
    return None


def _changed(**fields: Any) -> Callable[[pb.LocateResponse], pb.LocateResponse]:
    def change(told: pb.LocateResponse) -> pb.LocateResponse:
        told.MergeFrom(pb.LocateResponse(**fields))
        return told

    return change


def _port(**fields: Any) -> Callable[[pb.LocateResponse], pb.LocateResponse]:
    return _changed(socket_name="shoal-direct-nobody", **fields)


@pytest.mark.parametrize(
    "answer",
    [
        _absent,
        _changed(version=VERSION + 1),
        _changed(key=b"k" * 16),
        _changed(key=b"short"),
        _changed(key=b"k" * 99),
        _port(port=1),
        _port(port=2**32 - 1),
        _port(host_id="another host", port=1),
        _changed(socket_name="a\0b" * 90, port=1),
    ],
    ids=["absent", "version", "key", "short key", "long key", "refused", "no port", "another host", "bad name"],
)
async def test_calls_stay_with_grpc_where_there_is_no_direct_way(
    answer: Callable[[pb.LocateResponse], pb.LocateResponse | None],
) -> None:
    async with locating(answer) as (running_server, address):
        channel = Channel(address, is_direct=True)
        await channel.settle(5)
        assert channel.direct is None
        stub = channel.unary_unary(f"/{NAME}/unary_unary", identity, identity)
        assert await stub(b"a", timeout=5) == b"a"
        found = channel._way
        assert found is not None
        # And nobody looks again at once.
        assert found._search is None
        assert found._next_s > asyncio.get_running_loop().time() + 20
        direct = running_server._direct
        assert direct is not None
        await until(lambda: direct.connection_count == 0)
        await channel.close()


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["nothing", "something else"])
async def test_a_port_of_somebody_else_is_left(says: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_CONNECT_S", 0.05)
    async with Silent(says) as silent, locating(_port(port=silent.port)) as (_, address):
        channel = Channel(address, is_direct=True)
        stub = channel.unary_unary(f"/{NAME}/unary_unary", identity, identity)
        assert await stub(b"a", timeout=5) == b"a"
        await channel.settle(5)
        assert (channel.direct, silent.taken) == (None, 1)
        assert await stub(b"a", timeout=5) == b"a"
        await channel.close()


async def test_a_channel_that_is_closed_while_it_looks_leaves_no_connection() -> None:
    async with Silent() as silent, locating(_port(port=silent.port)) as (_, address):
        channel = Channel(address, is_direct=True)
        assert channel.direct is None
        await until(lambda: silent.taken == 1)
        await channel.close()
        await until(lambda: silent.left == 1, what="the connection is hung up")


_SETRESUID = {"x86_64": 117, "aarch64": 147}.get(platform.machine())


def as_user(uid: int, do: Callable[[], Any]) -> Any:
    """What `do` gives in a thread of another user."""
    # The system's own call: of this thread alone.
    system = ctypes.CDLL(None, use_errno=True)
    assert system.syscall(_SETRESUID, -1, uid, -1) == 0
    try:
        return do()
    finally:
        system.syscall(_SETRESUID, -1, 0, -1)


@pytest.mark.skipif(os.geteuid() != 0 or _SETRESUID is None, reason="only root can be somebody else")
async def test_another_users_process_is_not_taken_by_the_socket_of_the_host() -> None:
    def connect(name: str) -> bytes:
        with socket.socket(socket.AF_UNIX) as made:
            made.settimeout(10)
            made.connect(f"\0{name}")
            try:
                made.sendall(greeting)
                return made.recv(1)
            except OSError:
                return b""

    async with running() as probe:
        name = probe.direct_server.socket_name
        greeting = pack_frame(FrameKind.HELLO, 0, pack_hello(probe.direct_server.key))
        assert await asyncio.to_thread(as_user, 65_534, lambda: connect(name)) == b""
        assert await asyncio.to_thread(as_user, 0, lambda: connect(name)) != b""


@pytest.mark.skipif(os.geteuid() != 0 or _SETRESUID is None, reason="only root can be somebody else")
async def test_another_users_process_at_a_servers_old_name_is_told_nothing() -> None:
    name = f"shoal-direct-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(f"\0{name}")
        other.settimeout(10)
        await asyncio.to_thread(as_user, 65_534, other.listen)
        async with locating(_changed(socket_name=name)) as (_, address):
            channel = Channel(address, is_direct=True)
            await channel.settle(5)
            assert channel.direct is not None
            assert await channel.unary_unary(f"/{NAME}/unary_unary", identity, identity)(b"a", timeout=5) == b"a"
            accepted, _ = await asyncio.to_thread(other.accept)
            with accepted:
                assert await asyncio.to_thread(accepted.recv, 1) == b""
            await channel.close()


async def test_where_the_socket_of_the_host_is_not_open_to_a_caller_it_comes_by_tcp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running() as probe:
        assert family_of(probe) == socket.AF_UNIX
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    async with running() as probe:
        assert family_of(probe) == socket.AF_INET
        assert await probe.stub("unary_unary")(b"a", timeout=5) == b"a"


def family_of(probe: Running) -> int:
    """Of the connection's socket."""
    transport = probe.connection._transport
    assert transport is not None
    return int(transport.get_extra_info("socket").family)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is noticed soon."""
    monkeypatch.setattr(connection, "PING_S", 0.1)
    monkeypatch.setattr(connection, "SILENCE_S", 0.3)
    monkeypatch.setattr(connection, "_LATE_S", 0.15)
    monkeypatch.setattr(connection, "_DOUBT_S", 0.02)


@pytest.mark.usefixtures("soon")
async def test_a_connection_without_calls_lives_by_its_signs_of_life() -> None:
    async with running() as probe:
        held, heard = probe.connection, 0
        taken = held._take_other

        def count(kind: int, call_id: int, payload: bytes) -> None:
            nonlocal heard
            heard += kind == FrameKind.PONG
            taken(kind, call_id, payload)

        held._take_other = count  # type: ignore[method-assign]
        await until(lambda: heard >= 8, what="eight signs of life, more than a silence long")
        assert probe.connection is held


@pytest.mark.usefixtures("soon")
async def test_a_caller_that_only_reads_is_not_taken_for_silent() -> None:
    async def talk(requests: list[bytes], context: Any) -> bytes:
        # Twice as long as a silent caller would have, and never so quiet that the caller asks.
        for _ in range(60):
            await context.write(b"beat")
            await asyncio.sleep(0.02)
        return b"end"

    async with running(talk) as probe:
        held = probe.connection
        answers = await listed(probe.stub("unary_stream")(b"", timeout=10))
        assert answers == [b"first", *[b"beat"] * 60, b"end"]
        assert probe.connection is held


@pytest.mark.usefixtures("soon")
async def test_a_server_that_falls_silent_is_given_up_and_its_calls_end() -> None:
    act = Stuck()
    async with running(act) as probe:
        calling = asyncio.ensure_future(_unary(probe))
        await act.entered.wait()
        held = probe.connection
        transport = server_end(probe)._transport
        assert transport is not None
        # As one that was stopped: its host still takes what is sent.
        transport.pause_reading()
        error = await asyncio.wait_for(_error(calling), 5)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert not held.is_open
        transport.resume_reading()
        await asyncio.wait_for(act.left.wait(), 5)


@pytest.mark.usefixtures("soon")
async def test_a_caller_that_falls_silent_is_given_up_and_its_calls_end() -> None:
    act = Stuck()
    async with running(act) as probe:
        raw = await RawCaller.to(probe.direct_server)
        await raw.frame()
        await until(lambda: probe.direct_server.connection_count == 2)
        await raw.hung_up()
        assert probe.direct_server.connection_count == 1
        raw.close()


@pytest.mark.usefixtures("soon")
async def test_a_process_that_stood_still_itself_does_not_judge_its_peers() -> None:
    async with running() as probe:
        held = probe.connection
        for _ in range(2):
            time.sleep(0.7)  # noqa: ASYNC251
            for _ in range(5):
                await asyncio.sleep(0)
            assert await probe.stub("unary_unary")(b"a", timeout=5) == b"a"
        assert probe.connection is held


async def test_a_stranger_that_never_greets_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_HELLO_S", 0.05)
    async with running() as probe:
        raw = RawCaller(*await asyncio.open_connection("127.0.0.1", probe.direct_server.port))
        await raw.hung_up()
        raw.close()


async def test_connections_over_the_limit_are_refused_and_calls_stay_with_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as probe:
        monkeypatch.setattr(server, "MAX_CONNECTIONS", 1)
        second = Channel(probe.address, is_direct=True)
        await second.settle(5)
        assert second.direct is None
        assert await second.unary_unary(f"/{NAME}/unary_unary", identity, identity)(b"a", timeout=5) == b"a"
        assert probe.metric("rpc_direct_connections") == 1
        await second.close()


async def test_a_connection_whose_numbers_are_used_up_is_replaced_and_its_calls_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    act = Stuck()
    async with running(act) as probe:
        monkeypatch.setattr(client, "LAST_ID", 2)
        first = probe.connection
        calling = asyncio.ensure_future(told(_unary(probe)))
        await act.entered.wait()
        assert await probe.stub("unary_unary")(b"answer", timeout=5) == b"done"
        await probe.channel.settle(5)
        assert probe.connection is not first
        assert await probe.stub("unary_unary")(b"answer", timeout=5) == b"done"
        assert (first.is_open, calling.done()) == (True, False)
        calling.cancel()
        assert await calling is asyncio.CancelledError
        await until(lambda: not first.is_open, what="the first connection has ended with its last call")


async def test_a_connection_that_takes_nothing_is_not_given_more_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as probe:
        held = probe.connection
        transport = server_end(probe)._transport
        assert transport is not None
        transport.pause_reading()
        monkeypatch.setattr(client, "_MAX_QUEUED_BYTES", 4 << 20)
        waiting = []
        while not held.is_overloaded:
            waiting.append(asyncio.ensure_future(_awaited(probe.stub("unary_unary")(bytes(1 << 20), timeout=20))))
            await asyncio.sleep(0)
        assert await probe.stub("unary_unary")(b"by gRPC", timeout=5) == b"by gRPC"
        transport.resume_reading()
        assert [len(one) for one in await asyncio.gather(*waiting)] == [1 << 20] * len(waiting)
        assert probe.connection is held


async def _awaited(call: Any) -> Any:
    return await call


async def test_dropped_and_rebuilt_channels_end_their_connections_after_their_calls() -> None:
    may_end = asyncio.Event()

    async def act(requests: list[bytes], context: Any) -> bytes:
        await may_end.wait()
        return b"done"

    async with running(act, is_direct=False) as probe:
        channels = Channels(is_direct=True)
        first = channels.get(probe.address)
        await first.settle(5)
        calling = asyncio.ensure_future(
            _awaited(first.unary_unary(f"/{NAME}/unary_unary", identity, identity)(b"", timeout=20))
        )
        await until(lambda: bool(probe.direct_server._running()))
        second = channels.rebuild(first)
        await second.settle(5)
        assert probe.direct_server.connection_count == 2
        may_end.set()
        assert await calling == b"done"
        await until(lambda: probe.direct_server.connection_count == 1)
        channels.drop(probe.address)
        await until(lambda: probe.direct_server.connection_count == 0)
        # Closing while a retired channel still waits for its calls cuts them.
        third = channels.get(probe.address)
        await third.settle(5)
        may_end.clear()
        calling = asyncio.ensure_future(
            told(third.unary_unary(f"/{NAME}/unary_unary", identity, identity)(b"", timeout=20))
        )
        await until(lambda: bool(probe.direct_server._running()))
        channels.drop(probe.address)
        await asyncio.sleep(0)
        await channels.close()
        assert await calling is asyncio.CancelledError
        await until(lambda: probe.direct_server.connection_count == 0)


async def test_a_stream_that_its_caller_lets_go_of_ends_at_the_server() -> None:
    act = Stuck()
    async with running(act) as probe:
        async for one in probe.stub("unary_stream")(b"", timeout=float("inf")):
            assert one == b"first"
            break
        await asyncio.wait_for(act.left.wait(), 5)
        assert probe.connection._calls == {}


async def test_the_next_request_of_a_call_that_has_ended_is_not_waited_for() -> None:
    left = asyncio.Event()

    async def requests() -> AsyncIterator[bytes]:
        try:
            yield b"a"
            await asyncio.Event().wait()
        finally:
            left.set()

    async with running() as probe:
        code, _, _ = await told(probe.stub("stream_unary")(requests(), timeout=0.05))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        await asyncio.wait_for(left.wait(), 5)


async def test_what_came_and_was_not_read_is_not_read_after_the_caller_has_left() -> None:
    async with running() as probe:
        call = probe.stub("echo_stream")(timeout=20)
        for one in (b"a", b"b"):
            await call.write(one)
        assert await call.read() == b"a"
        await until(lambda: bool(call.messages._received), what="the second has come")
        assert call.cancel() is True
        assert await told(call.read()) is asyncio.CancelledError


async def test_a_method_that_does_not_heed_its_cancellation_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "_CANCEL_S", 0.05)
    may_end, entered = asyncio.Event(), asyncio.Event()

    async def act(requests: list[bytes], context: Any) -> bytes:
        entered.set()
        while not may_end.is_set():
            try:
                await may_end.wait()
            except asyncio.CancelledError:
                continue
        return b""

    async with running(act) as probe:
        calling = asyncio.ensure_future(told(_unary(probe)))
        await entered.wait()
        async with asyncio.timeout(5):
            await probe.direct_server.stop(0)
        assert (await calling)[0] is grpc.StatusCode.UNAVAILABLE
        may_end.set()


async def test_a_server_without_a_port_for_direct_calls_serves_by_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_port(self: Any, host: str) -> None:
        raise OSError("no port is free")

    monkeypatch.setattr(server.DirectServer, "start", no_port)
    async with running(joined, is_direct=False) as probe:
        channel = Channel(probe.address, is_direct=True)
        await channel.settle(5)
        assert channel.direct is None
        assert await channel.unary_unary(f"/{NAME}/unary_unary", identity, identity)(b"a", timeout=5) == b"a"
        await channel.close()


async def test_a_search_belongs_to_no_callers_trace() -> None:
    seen: list[str] = []

    async def locate(timeout_s: float) -> pb.LocateResponse:
        from shoal_common.request_scope import request_id

        seen.append(request_id.get())
        raise asyncio.CancelledError

    from shoal_common.request_scope import request_id

    request_id.set("r-1")
    looking = way.DirectWay("127.0.0.1:1", locate)
    await looking.settle(5)
    request_id.set("")
    assert seen == [""]
    await looking.close(0)
