"""Pulls by every way: equal bytes, aligned, checked; a holder that fails is a typed error in time."""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import pytest
from shoal.common.v1 import kv_transport_pb2 as pb
from shoal.kv_cache.v1 import kv_cache_service_pb2 as cache_pb
from shoal_common.errors import (
    ChecksumMismatch,
    DataLoss,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    MeshError,
    NotFound,
)
from shoal_common.kv_transport import (
    BegunCall,
    KvPuller,
    SharedArena,
    SlabArena,
    StreamBroken,
    StreamCall,
    StreamCaller,
    StreamUnreachable,
    checksum_of,
    local_address,
    stream_address,
)
from shoal_common.kv_transport.destinations import DestinationPool
from shoal_common.kv_transport.same_host import unpace
from shoal_common.kv_transport.stream_frames import DataHead, FrameKind, Pull, pack_frame
from shoal_common.rpc.channels import Channel
from support.kv_ways import GRPC, SHM, TCP, Holder, block_of, holder, mutual_tls, run_of
from support.waiting import until

Kinds: TypeAlias = "tuple[pb.TransportKind.ValueType, ...]"
WAYS = [pytest.param((SHM, TCP, GRPC), id="shm"), pytest.param((TCP, GRPC), id="tcp"), pytest.param((GRPC,), id="grpc")]
BY_TCP_OR_UNIX = pytest.mark.parametrize("is_local", [False, True], ids=["tcp", "unix"])


def address_of(view: memoryview) -> int:
    """Where it lies; views that are read-only hide it from ctypes' own from_buffer."""
    import numpy as np

    return int(np.frombuffer(view, np.uint8).ctypes.data)


@contextmanager
def puller_of(kinds: Kinds, **more: object) -> Iterator[KvPuller]:
    made = KvPuller(kinds, **more)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()


def stored(arena: SlabArena, data: list[bytes]) -> tuple[list[int], list[int]]:
    return [checksum_of(one) for one in data], [arena.store(one) for one in data]


@pytest.mark.parametrize("kinds", WAYS)
@pytest.mark.parametrize("size", [1000, 4096, 300_000], ids=["part of a slab", "a slab", "many slabs"])
async def test_runs_come_as_they_were_stored_and_aligned(kinds: Kinds, size: int) -> None:
    with SlabArena(24 << 20, slab_bytes=4096) as arena, puller_of(kinds) as puller:
        # Holes in front, so that not all slabs follow each other.
        for first in [arena.allocate(4096) for _ in range(9)][::2]:
            arena.free(first)
        blocks = [os.urandom(size) for _ in range(20)]
        snapshot = [os.urandom(70_000)]
        async with holder(arena) as held:
            with held.exports.opened(puller.offer) as export:
                runs = [export.add_run(run_of(size), *stored(arena, blocks))]
                runs.append(export.add_run(run_of(70_000), *stored(arena, snapshot)))
                assert export.grant.kind == kinds[0]
                pulled = await puller.pull_runs(export.grant, runs, held.channel, timeout_s=10)
        assert pulled == blocks + snapshot
        assert all(address_of(view) % 64 == 0 and view.readonly for view in pulled)
        # Counted when all is sent, which may be after it has come.
        await until(lambda: (held.stream.sent_bytes > 0) == (kinds[0] == TCP), what="the way that was granted")


@pytest.mark.parametrize("kinds", WAYS)
async def test_many_megabytes_come_through_several_threads_or_many_packets(kinds: Kinds) -> None:
    with SlabArena(24 << 20, slab_bytes=113_920) as arena, puller_of(kinds) as puller:
        blocks = [os.urandom(113_920) for _ in range(100)]
        async with holder(arena) as held:
            with held.exports.opened(puller.offer) as export:
                run = export.add_run(run_of(113_920), *stored(arena, blocks))
                for _ in range(2):
                    assert await puller.pull_runs(export.grant, [run], held.channel, timeout_s=20) == blocks


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl")
async def test_a_stream_with_mutual_tls_gives_the_same_bytes_and_calls_and_refuses_strangers(tmp_path: Path) -> None:
    server, client = mutual_tls(tmp_path)
    blocks = [os.urandom(50_000) for _ in range(30)]
    calls = {"Double": StreamCall(cache_pb.ReleaseRequest, _double)}
    with SlabArena(4 << 20, slab_bytes=4096) as arena, puller_of((TCP,), ssl_context=client) as puller:
        async with holder(arena, ssl_context=server, calls=calls) as held:
            with held.exports.opened(puller.offer) as export:
                run = export.add_run(run_of(50_000), *stored(arena, blocks))
                assert await puller.pull_runs(export.grant, [run], held.channel, timeout_s=10) == blocks
            address = stream_address(export.grant, held.channel)
            caller = StreamCaller(ssl_context=client)
            assert await _call(caller, address, "x") == "xx"
            caller.close()
            plain = StreamCaller()
            with pytest.raises(StreamBroken):
                await _call(plain, address, "x")


@pytest.mark.parametrize("kinds", WAYS)
async def test_a_flipped_bit_is_a_checksum_mismatch_that_names_the_payload(kinds: Kinds) -> None:
    with SlabArena(4 << 20, slab_bytes=4096) as arena, puller_of(kinds) as puller:
        blocks = [os.urandom(4096) for _ in range(20)]
        async with holder(arena) as held:
            with held.exports.opened(puller.offer) as export:
                checksums, firsts = stored(arena, blocks)
                arena.write(firsts[13], 77, bytes([blocks[13][77] ^ 1]))
                run = export.add_run(run_of(4096, position_begin=256), checksums, firsts)
                with pytest.raises(ChecksumMismatch) as caught:
                    await puller.pull_runs(export.grant, [run], held.channel, timeout_s=10)
                assert caught.value.metadata["payload_id"] == "13"
                assert caught.value.metadata["position_end"] == str(256 + 14 * 128)
                # And the way still works.
                arena.write(firsts[13], 77, blocks[13][77:78])
                assert await puller.pull_runs(export.grant, [run], held.channel, timeout_s=10) == blocks


async def test_an_unknown_export_or_payload_is_not_found_and_the_connection_goes_on() -> None:
    with SlabArena(1 << 20, slab_bytes=64) as arena, puller_of((TCP,)) as puller:
        async with holder(arena) as held:
            with held.exports.opened(puller.offer) as export:
                run = export.add_run(run_of(64), *stored(arena, [b"x" * 64]))
                wrong = pb.TransportGrant()
                wrong.CopyFrom(export.grant)
                wrong.export_id = "0" * 32
                with pytest.raises(NotFound) as caught:
                    await puller.pull_runs(wrong, [run], held.channel, timeout_s=10)
                assert caught.value.reason == "UNKNOWN_EXPORT"
                beyond = pb.PayloadRun()
                beyond.CopyFrom(run)
                beyond.first_payload_id = 7
                with pytest.raises(NotFound):
                    await puller.pull_runs(export.grant, [beyond], held.channel, timeout_s=10)
                assert await puller.pull_runs(export.grant, [run], held.channel, timeout_s=10) == [b"x" * 64]
            with pytest.raises(NotFound):
                await puller.pull_runs(export.grant, [run], held.channel, timeout_s=10)
            assert held.stream.connection_count == 1


@pytest.mark.parametrize("slabs", [[0], [0, 999], []], ids=["too few", "outside of the arena", "none"])
async def test_a_grant_that_does_not_fit_its_arena_is_data_loss(slabs: list[int]) -> None:
    with SlabArena(64 << 10, slab_bytes=64) as arena, puller_of((SHM,)) as puller:
        async with holder(arena) as held:
            with held.exports.opened(puller.offer) as export:
                run = export.add_run(run_of(64), *stored(arena, [b"x" * 64, b"y" * 64]))
                del run.slabs[:]
                run.slabs.extend(slabs)
                with pytest.raises(DataLoss):
                    await puller.pull_runs(export.grant, [run], held.channel, timeout_s=10)


async def test_single_payloads_of_a_hand_over_come_by_every_way() -> None:
    data = [os.urandom(size) for size in (1, 113_920, 64, (1 << 20) + 7)]
    for kinds in ((SHM, TCP, GRPC), (TCP, GRPC), (GRPC,)):
        with SharedArena(4 << 20) as arena, puller_of(kinds) as puller:
            async with holder(arena) as held:
                with held.exports.opened(puller.offer) as export:
                    payloads = [export.add(block_of(len(one)), one) for one in data]
                    assert export.grant.kind == kinds[0]
                    pulled = await puller.pull(export.grant, payloads[::-1], held.channel, timeout_s=10)
                    assert pulled == data[::-1]


async def test_a_stream_that_is_unreachable_is_left_for_grpc_and_not_tried_again_at_once() -> None:
    with SlabArena(1 << 20, slab_bytes=64) as arena, puller_of((TCP, GRPC)) as puller:
        async with holder(arena) as held:
            with held.exports.opened(puller.offer) as export:
                run = export.add_run(run_of(64), *stored(arena, [b"x" * 64]))
                held.stream.close()
                began_s = time.monotonic()
                for _ in range(3):
                    assert await puller.pull_runs(export.grant, [run], held.channel, timeout_s=10) == [b"x" * 64]
                assert time.monotonic() - began_s < 5


async def test_memory_that_is_not_shared_after_all_is_pulled_by_the_stream() -> None:
    with SlabArena(1 << 20, slab_bytes=64) as arena, puller_of((SHM, TCP, GRPC)) as puller:
        async with holder(arena) as held:
            with held.exports.opened(puller.offer) as export:
                run = export.add_run(run_of(64), *stored(arena, [b"x" * 64]))
                grant = pb.TransportGrant()
                grant.CopyFrom(export.grant)
                grant.arena_nonce = bytes(16)
                assert await puller.pull_runs(grant, [run], held.channel, timeout_s=10) == [b"x" * 64]
                await until(lambda: held.stream.sent_bytes == 64, what="it is counted")


@contextmanager
def fake_holder(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """A stream that does what `serve` does to each connection; its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while True:
                try:
                    accepted, _ = listener.accept()
                except OSError:
                    return
                with accepted:
                    serve(accepted)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def run_from(address: str, count: int = 1, size: int = 1 << 20) -> tuple[pb.TransportGrant, list[pb.PayloadRun]]:
    grant = pb.TransportGrant(kind=TCP, export_id="e", stream_address=address)
    run = pb.PayloadRun(first_payload_id=0, positions=128, size_bytes=size, checksums=[1] * count)
    return grant, [run]


async def test_a_holder_killed_in_mid_stream_is_broken_at_once() -> None:
    def send_half(accepted: socket.socket) -> None:
        accepted.recv(1 << 16)
        accepted.sendall(pack_frame(FrameKind.DATA, DataHead(0, 1, 1 << 20).pack()) + bytes(1 << 19))

    with fake_holder(send_half) as address, puller_of((TCP,)) as puller:
        grant, runs = run_from(address)
        began_s = time.monotonic()
        with pytest.raises(StreamBroken):
            await puller.pull_runs(grant, runs, Channel(address), timeout_s=30)
        assert time.monotonic() - began_s < 10


async def test_a_holder_that_stalls_is_given_up_at_the_deadline_or_when_the_caller_leaves() -> None:
    asked, left = threading.Event(), threading.Event()

    def stall(accepted: socket.socket) -> None:
        accepted.recv(1 << 16)
        asked.set()
        accepted.sendall(pack_frame(FrameKind.DATA, DataHead(0, 1, 1 << 20).pack()) + bytes(100))
        accepted.recv(1)  # until the puller has gone
        left.set()

    with fake_holder(stall) as address, puller_of((TCP,)) as puller:
        grant, runs = run_from(address)
        with pytest.raises(DeadlineExceeded):
            await puller.pull_runs(grant, runs, Channel(address), timeout_s=0.2)
        assert await asyncio.to_thread(left.wait, 5)
        asked.clear()
        left.clear()
        pulling = asyncio.create_task(puller.pull_runs(grant, runs, Channel(address), timeout_s=60))
        assert await asyncio.to_thread(asked.wait, 5)
        pulling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pulling
        assert await asyncio.to_thread(left.wait, 5)


@pytest.mark.parametrize("ends", [True, False], ids=["ends", "stalls"])
async def test_a_holder_that_fails_on_a_connection_used_before_is_a_typed_error_in_time(ends: bool) -> None:
    whole = bytes(1 << 20)

    def serve(accepted: socket.socket) -> None:
        accepted.recv(1 << 16)
        head = pack_frame(FrameKind.DATA, DataHead(0, 1, 1 << 20).pack())
        accepted.sendall(head + whole)
        if accepted.recv(1 << 16):
            accepted.sendall(head + bytes(100))
            if not ends:
                accepted.recv(1)

    with fake_holder(serve) as address, puller_of((TCP,)) as puller:
        grant, runs = run_from(address)
        runs[0].checksums[0] = checksum_of(whole)
        assert await puller.pull_runs(grant, runs, Channel(address), timeout_s=10) == [whole]
        if ends:
            # Once more, on a new connection.
            assert await puller.pull_runs(grant, runs, Channel(address), timeout_s=10) == [whole]
        else:
            with pytest.raises(DeadlineExceeded):
                await puller.pull_runs(grant, runs, Channel(address), timeout_s=0.2)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64),
        pack_frame(FrameKind.DATA, DataHead(5, 1, 1 << 20).pack()),
        pack_frame(FrameKind.DATA, DataHead(0, 2, 1 << 20).pack()),
        pack_frame(FrameKind.DATA, DataHead(0, 1, 1 << 19).pack()),
        pack_frame(FrameKind.DATA, b"short"),
        pack_frame(FrameKind.ANSWER, b""),
        pack_frame(FrameKind.DATA, DataHead(0, 1, 1 << 20).pack())[:-1] + b"\xff",
    ],
    ids=["http", "other payload", "too many", "other size", "short head", "answer", "damaged head"],
)
async def test_nonsense_from_a_holder_is_a_typed_error(answer: bytes) -> None:
    def serve(accepted: socket.socket) -> None:
        accepted.recv(1 << 16)
        accepted.sendall(answer)

    with fake_holder(serve) as address, puller_of((TCP,)) as puller:
        grant, runs = run_from(address)
        with pytest.raises((DataLoss, StreamBroken)):
            await puller.pull_runs(grant, runs, Channel(address), timeout_s=10)


async def test_who_does_not_read_what_it_asked_for_is_cut() -> None:
    with SlabArena(64 << 20, slab_bytes=1 << 20) as arena:
        # The kernel buffers some of it; the rest has to wait for a reader that never comes.
        async with holder(arena, io_timeout_s=0.2, slowest_bytes_per_s=1e9) as held:
            with held.exports.opened(pb.TransportOffer(kinds=[TCP])) as export:
                export.add_run(run_of(1 << 20), [0] * 60, [arena.allocate(1 << 20) for _ in range(60)])
                host, _, port = stream_address(export.grant, held.channel).rpartition(":")
                with socket.create_connection((host, int(port))) as reader:
                    reader.sendall(pack_frame(FrameKind.PULL, Pull(export.export_id, ((0, 60),)).pack()))
                    await until(lambda: held.stream.cut_count == 1, what="the reader is cut", timeout_s=20)


@pytest.mark.parametrize("sent", [b"", b"SH", b"GET / HTTP/1.1\r\n\r\n" * 4], ids=["nothing", "a bit", "http"])
async def test_who_does_not_ask_properly_is_cut(sent: bytes) -> None:
    async with holder(None, io_timeout_s=0.2) as held:
        with socket.create_connection(("127.0.0.1", int(held.stream.address[1:]))) as stranger:
            stranger.sendall(sent)
            stranger.settimeout(10)
            with pytest.raises(ConnectionResetError) if len(sent) > 24 else _nothing():
                assert await asyncio.to_thread(stranger.recv, 1) == b""
                raise ConnectionResetError


@contextmanager
def _nothing() -> Iterator[None]:
    try:
        yield
    except ConnectionResetError:
        return


async def test_connections_are_bounded_and_what_comes_on_top_goes_by_grpc_or_waits_for_its_turn() -> None:
    async with holder(None, max_connections=2) as held:
        port = int(held.stream.address[1:])
        kept = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
        await until(lambda: held.stream.connection_count == 2, what="two connections")
        third = socket.create_connection(("127.0.0.1", port))
        third.settimeout(10)
        assert await asyncio.to_thread(third.recv, 1) == b""
        assert held.stream.refused_count == 1
        for one in (*kept, third):
            one.close()


async def _double(request: cache_pb.ReleaseRequest) -> cache_pb.ReleaseRequest:
    if not request.lease_id:
        raise InvalidArgument.at("lease_id", "must not be empty", reason="EMPTY")
    if request.lease_id == "bug":
        raise ZeroDivisionError
    if request.lease_id == "slow":
        await asyncio.sleep(3600)
    return cache_pb.ReleaseRequest(lease_id=request.lease_id * 2)


async def _call(caller: StreamCaller, address: str, text: str, *, method: str = "Double", timeout_s: float = 5) -> str:
    request = cache_pb.ReleaseRequest(lease_id=text)
    answer = await caller.call(address, method, request, cache_pb.ReleaseRequest, timeout_s=timeout_s)
    return answer.lease_id


@pytest.fixture
async def caller() -> StreamCaller:
    return StreamCaller()


@BY_TCP_OR_UNIX
async def test_calls_by_the_stream_answer_and_fail_as_by_grpc(caller: StreamCaller, is_local: bool) -> None:
    calls = {"Double": StreamCall(cache_pb.ReleaseRequest, _double)}
    async with holder(None, calls=calls, max_connections=64) as held:
        address = _address(held, is_local=is_local)
        assert await asyncio.gather(*(_call(caller, address, str(turn)) for turn in range(20))) == [
            str(turn) * 2 for turn in range(20)
        ]
        for text, method, code in (("", "Double", "INVALID_ARGUMENT"), ("x", "Other", "UNIMPLEMENTED")):
            with pytest.raises(MeshError) as caught:
                await _call(caller, address, text, method=method)
            assert caught.value.code == code
        with pytest.raises(Internal, match="internal error"):
            await _call(caller, address, "bug")
        with pytest.raises(DeadlineExceeded):
            await _call(caller, address, "slow", timeout_s=0.05)
        assert await _call(caller, address, "x" * 3_000_000) == "x" * 6_000_000
    caller.close()


@BY_TCP_OR_UNIX
async def test_a_call_outlives_the_end_of_an_idle_connection_and_not_that_of_the_server(
    caller: StreamCaller, is_local: bool
) -> None:
    calls = {"Double": StreamCall(cache_pb.ReleaseRequest, _double)}
    async with holder(None, calls=calls, idle_s=0.05) as held:
        address = _address(held, is_local=is_local)
        assert await _call(caller, address, "x") == "xx"
        await until(lambda: held.stream.connection_count == 0, what="the idle connection ends")
        assert await _call(caller, address, "y") == "yy"
    with pytest.raises((StreamUnreachable, StreamBroken)):
        await _call(caller, address, "z")
    caller.close()


@BY_TCP_OR_UNIX
async def test_what_needs_no_waiting_is_answered_before_the_handler_is_asked(
    caller: StreamCaller, is_local: bool
) -> None:
    calls = {"Double": StreamCall(cache_pb.ReleaseRequest, _double, _at_once)}
    async with holder(None, calls=calls) as held:
        address = _address(held, is_local=is_local)
        for text, answer in (("now", "at once"), ("later", "laterlater"), ("now", "at once")):
            assert await _call(caller, address, text) == answer
        with pytest.raises(InvalidArgument, match="never"):
            await _call(caller, address, "never")
        with pytest.raises(Internal, match="internal error"):
            await _call(caller, address, "broken")
        assert await _call(caller, address, "now") == "at once"
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
    calls = {"Double": StreamCall(cache_pb.ReleaseRequest, _double)}
    async with holder(None, calls=calls) as held:
        for user, expected in ((65534, b"cut"), (0, b"kept")):
            program = _CONNECT.format(name=held.stream.call_socket)
            running = await asyncio.create_subprocess_exec(
                "/usr/bin/env", "python3", "-I", "-c", program, stdout=asyncio.subprocess.PIPE, user=user
            )
            said, _ = await asyncio.wait_for(running.communicate(), 20)
            assert said.strip() == expected


async def test_no_more_connections_than_may_be_call_by_the_socket(caller: StreamCaller) -> None:
    calls = {"Double": StreamCall(cache_pb.ReleaseRequest, _double)}
    async with holder(None, calls=calls, max_connections=2) as held:
        address = _address(held, is_local=True)
        slow = [asyncio.create_task(_call(caller, address, "slow", timeout_s=5)) for _ in range(2)]
        await until(lambda: held.stream.connection_count == 2, what="both are connected")
        with pytest.raises(StreamBroken):
            await _call(caller, address, "x")
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


@pytest.mark.parametrize(("from_address", "is_changed"), [("127.0.0.1", True), ("127.0.0.2", False)])
def test_only_connections_between_two_ends_of_one_address_are_not_paced(from_address: str, is_changed: bool) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname(), 5, (from_address, 0)) as near,
        listener.accept()[0] as far,
    ):
        default = near.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        for one in (near, far):
            unpace(one)
            used = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            assert used.rstrip(b"\0") == b"reno" if is_changed else used == default


def test_destinations_are_used_again_only_when_nobody_looks_at_them() -> None:
    pool = DestinationPool(8 << 20)
    first = pool.take(1 << 20)
    first[:4] = b"mine"
    part, address = first[:4].toreadonly(), ctypes.addressof(ctypes.c_char.from_buffer(first))
    del first
    other = pool.take(1 << 20)
    other[:4] = b"over"
    assert bytes(part) == b"mine"
    del part
    again = pool.take(1 << 20)
    assert ctypes.addressof(ctypes.c_char.from_buffer(again)) == address
    assert address % 64 == 0


def test_destinations_keep_no_more_than_they_may() -> None:
    pool = DestinationPool(8 << 20)
    taken = [pool.take(3 << 20) for _ in range(5)]
    for index, view in enumerate(taken):
        view[:1] = bytes([index])
    assert [view[0] for view in taken] == [0, 1, 2, 3, 4]
    assert pool.kept_bytes <= 8 << 20
    assert pool.take(64 << 20).nbytes == 64 << 20
    assert pool.kept_bytes <= 8 << 20
    assert pool.take(0).nbytes == 0
