"""Pulls by every way: equal bytes, aligned, checked; a holder that fails is a typed error in time."""

from __future__ import annotations

import asyncio
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
    NotFound,
)
from shoal_common.kv_transport import (
    KvPuller,
    SharedArena,
    SlabArena,
    StreamBroken,
    StreamCall,
    StreamCaller,
    checksum_of,
    stream_address,
)
from shoal_common.kv_transport.stream_frames import DataHead, FrameKind, Pull, pack_frame
from shoal_common.rpc.channels import Channel
from shoal_common.same_host import unpace
from support.kv_ways import GRPC, SHM, TCP, block_of, call_by_stream, double, holder, mutual_tls, run_of
from support.waiting import until

Kinds: TypeAlias = "tuple[pb.TransportKind.ValueType, ...]"
WAYS = [pytest.param((SHM, TCP, GRPC), id="shm"), pytest.param((TCP, GRPC), id="tcp"), pytest.param((GRPC,), id="grpc")]


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
    calls = {"Double": StreamCall(cache_pb.ReleaseRequest, double)}
    with SlabArena(4 << 20, slab_bytes=4096) as arena, puller_of((TCP,), ssl_context=client) as puller:
        async with holder(arena, ssl_context=server, calls=calls) as held:
            with held.exports.opened(puller.offer) as export:
                run = export.add_run(run_of(50_000), *stored(arena, blocks))
                assert await puller.pull_runs(export.grant, [run], held.channel, timeout_s=10) == blocks
            address = stream_address(export.grant, held.channel)
            caller = StreamCaller(ssl_context=client)
            assert await call_by_stream(caller, address, "x") == "xx"
            caller.close()
            plain = StreamCaller()
            with pytest.raises(StreamBroken):
                await call_by_stream(plain, address, "x")


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
