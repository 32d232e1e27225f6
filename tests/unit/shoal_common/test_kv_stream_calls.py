"""Calls by the byte stream: they answer and fail as by gRPC, by TCP and by the socket of the host."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from shoal.kv_cache.v1 import kv_cache_service_pb2 as cache_pb
from shoal_common.errors import DeadlineExceeded, Internal, InvalidArgument, MeshError
from shoal_common.kv_transport import (
    BegunCall,
    StreamBroken,
    StreamCall,
    StreamCaller,
    StreamUnreachable,
    local_address,
)
from support.kv_ways import Holder, call_by_stream, double, holder
from support.waiting import until

BY_TCP_OR_UNIX = pytest.mark.parametrize("is_local", [False, True], ids=["tcp", "unix"])


@pytest.fixture
async def caller() -> StreamCaller:
    return StreamCaller()


@BY_TCP_OR_UNIX
async def test_calls_by_the_stream_answer_and_fail_as_by_grpc(caller: StreamCaller, is_local: bool) -> None:
    calls = {"Double": StreamCall(cache_pb.ReleaseRequest, double)}
    async with holder(None, calls=calls, max_connections=64) as held:
        address = _address(held, is_local=is_local)
        assert await asyncio.gather(*(call_by_stream(caller, address, str(turn)) for turn in range(20))) == [
            str(turn) * 2 for turn in range(20)
        ]
        for text, method, code in (("", "Double", "INVALID_ARGUMENT"), ("x", "Other", "UNIMPLEMENTED")):
            with pytest.raises(MeshError) as caught:
                await call_by_stream(caller, address, text, method=method)
            assert caught.value.code == code
        with pytest.raises(Internal, match="internal error"):
            await call_by_stream(caller, address, "bug")
        with pytest.raises(DeadlineExceeded):
            await call_by_stream(caller, address, "slow", timeout_s=0.05)
        assert await call_by_stream(caller, address, "x" * 3_000_000) == "x" * 6_000_000
    caller.close()


@BY_TCP_OR_UNIX
async def test_a_call_outlives_the_end_of_an_idle_connection_and_not_that_of_the_server(
    caller: StreamCaller, is_local: bool
) -> None:
    calls = {"Double": StreamCall(cache_pb.ReleaseRequest, double)}
    async with holder(None, calls=calls, idle_s=0.05) as held:
        address = _address(held, is_local=is_local)
        assert await call_by_stream(caller, address, "x") == "xx"
        await until(lambda: held.stream.connection_count == 0, what="the idle connection ends")
        assert await call_by_stream(caller, address, "y") == "yy"
    with pytest.raises((StreamUnreachable, StreamBroken)):
        await call_by_stream(caller, address, "z")
    caller.close()


@BY_TCP_OR_UNIX
async def test_what_needs_no_waiting_is_answered_before_the_handler_is_asked(
    caller: StreamCaller, is_local: bool
) -> None:
    calls = {"Double": StreamCall(cache_pb.ReleaseRequest, double, _at_once)}
    async with holder(None, calls=calls) as held:
        address = _address(held, is_local=is_local)
        for text, answer in (("now", "at once"), ("later", "laterlater"), ("now", "at once")):
            assert await call_by_stream(caller, address, text) == answer
        with pytest.raises(InvalidArgument, match="never"):
            await call_by_stream(caller, address, "never")
        with pytest.raises(Internal, match="internal error"):
            await call_by_stream(caller, address, "broken")
        assert await call_by_stream(caller, address, "now") == "at once"
    caller.close()


def _at_once(request: cache_pb.ReleaseRequest) -> cache_pb.ReleaseRequest | None:
    if request.lease_id == "never":
        raise InvalidArgument.at("lease_id", "never")
    if request.lease_id == "broken":
        raise ZeroDivisionError
    return cache_pb.ReleaseRequest(lease_id="at once") if request.lease_id == "now" else None


@BY_TCP_OR_UNIX
async def test_an_answer_is_there_when_its_call_has_begun_or_comes_when_it_is_finished(
    caller: StreamCaller, is_local: bool
) -> None:
    may_answer = threading.Event()

    async def later(request: cache_pb.ReleaseRequest) -> cache_pb.ReleaseRequest:
        await asyncio.to_thread(may_answer.wait, 20)
        return cache_pb.ReleaseRequest(lease_id="later")

    def begin(text: str) -> BegunCall[cache_pb.ReleaseRequest]:
        asked = cache_pb.ReleaseRequest(lease_id=text)
        return caller.begin(address, "Double", asked, cache_pb.ReleaseRequest, timeout_s=10)

    with _holder_elsewhere({"Double": StreamCall(cache_pb.ReleaseRequest, later, _at_once)}) as addresses:
        address = addresses[is_local]
        count = 0
        # The first finds no connection, and a busy machine may take longer than the loop stands still for.
        for _ in range(200):
            begun = begin("now")
            count += begun.is_answered
            if not begun.is_answered:
                await caller.finish(begun)
            assert begun.answer().lease_id == "at once"
        assert count
        waiting = begin("x")
        assert not waiting.is_answered
        may_answer.set()
        await caller.finish(waiting)
        assert waiting.answer().lease_id == "later"
    # It has let go of the connection.
    gone = begin("now")
    assert not gone.is_answered
    with pytest.raises((StreamBroken, StreamUnreachable)):
        await caller.finish(gone)
    caller.close()


@contextmanager
def _holder_elsewhere(calls: dict[str, StreamCall]) -> Iterator[tuple[str, str]]:
    """Its addresses, by TCP and by the socket; served by an event loop of its own."""
    addresses: list[tuple[str, str]] = []
    is_up, is_over = threading.Event(), threading.Event()

    async def serve() -> None:
        async with holder(None, calls=calls) as held:
            addresses.append((_address(held), _address(held, is_local=True)))
            is_up.set()
            await asyncio.to_thread(is_over.wait, 60)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert is_up.wait(20)
        yield addresses[0]
    finally:
        is_over.set()
        thread.join(20)


async def test_processes_of_other_users_are_cut_off_the_socket_for_calls() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can run a process as another user")
    calls = {"Double": StreamCall(cache_pb.ReleaseRequest, double)}
    async with holder(None, calls=calls) as held:
        for user, expected in ((65534, b"cut"), (0, b"kept")):
            program = _CONNECT.format(name=held.stream.call_socket)
            running = await asyncio.create_subprocess_exec(
                "/usr/bin/env", "python3", "-I", "-c", program, stdout=asyncio.subprocess.PIPE, user=user
            )
            said, _ = await asyncio.wait_for(running.communicate(), 20)
            assert said.strip() == expected


async def test_no_more_connections_than_may_be_call_by_the_socket(caller: StreamCaller) -> None:
    calls = {"Double": StreamCall(cache_pb.ReleaseRequest, double)}
    async with holder(None, calls=calls, max_connections=2) as held:
        address = _address(held, is_local=True)
        slow = [asyncio.create_task(call_by_stream(caller, address, "slow", timeout_s=5)) for _ in range(2)]
        await until(lambda: held.stream.connection_count == 2, what="both are connected")
        with pytest.raises(StreamBroken):
            await call_by_stream(caller, address, "x")
        assert held.stream.refused_count == 1
        for one in slow:
            one.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
    caller.close()


# Half a second of silence passes for being kept.
_CONNECT = """
import socket
one = socket.socket(socket.AF_UNIX)
one.connect(chr(0) + "{name}")
one.settimeout(0.5)
try:
    print("cut" if one.recv(1) == b"" else "spoken to")
except TimeoutError:
    print("kept")
except ConnectionError:
    print("cut")
"""


def _address(held: Holder, *, is_local: bool = False) -> str:
    return local_address(held.stream.call_socket) if is_local else f"127.0.0.1{held.stream.address}"
