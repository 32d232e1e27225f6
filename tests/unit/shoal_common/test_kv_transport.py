"""KV payloads arrive whole or not at all, by either way."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal.common.v1 import kv_transport_pb2 as pb
from shoal.common.v1 import kv_transport_service_pb2_grpc as pb_grpc
from shoal_common.errors import ChecksumMismatch, FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from shoal_common.kv_transport import ArenaFull, ExportTable, KvPuller, KvTransportServicer, PayloadSpec, SharedArena
from shoal_common.kv_transport.arena import ArenaView
from shoal_common.kv_transport.destinations import DestinationPool
from shoal_common.kv_transport.free_list import FreeList
from shoal_common.kv_transport.shared_file import sweep_abandoned
from shoal_common.rpc.channels import Channel
from shoal_common.rpc.interceptors import ServerInterceptor
from shoal_common.telemetry import Metrics

GRPC_ONLY = (pb.TRANSPORT_KIND_GRPC,)


def spec_of(size: int) -> PayloadSpec:
    return PayloadSpec(
        kind=pb.PAYLOAD_KIND_BLOCK, position_begin=0, position_end=128, shape=(size,), dtype="uint8", kv_id="kv"
    )


@asynccontextmanager
async def served(exports: ExportTable) -> AsyncIterator[Channel]:
    server = grpc.aio.server(interceptors=[ServerInterceptor(Metrics())])
    pb_grpc.add_KvTransportServiceServicer_to_server(KvTransportServicer(exports), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        channel = Channel(f"127.0.0.1:{port}")
        yield channel
        await channel.close()
    finally:
        await server.stop(None)


@pytest.mark.parametrize("kinds", [(pb.TRANSPORT_KIND_SHM, pb.TRANSPORT_KIND_GRPC), GRPC_ONLY])
async def test_payloads_arrive_as_they_were_offered(kinds: tuple[pb.TransportKind.ValueType, ...]) -> None:
    data = [os.urandom(size) for size in (1, 113_920, (1 << 20) + 7, 3 << 20)]
    puller = KvPuller(kinds)
    with SharedArena(16 << 20) as arena:
        exports = ExportTable(arena)
        async with served(exports) as channel:
            with exports.opened(puller.offer) as export:
                payloads = [export.add(spec_of(len(one)), one) for one in data]
                assert export.grant.kind == kinds[0]
                order = [2, 0, 3, 1]
                pulled = await puller.pull(export.grant, [payloads[i] for i in order], channel, timeout_s=10)
                assert pulled == [data[i] for i in order]
            assert arena.held_count == 0
            puller.close()


async def test_a_puller_on_another_host_is_granted_grpc() -> None:
    with SharedArena(1 << 20) as arena:
        exports = ExportTable(arena)
        offer = KvPuller().offer
        offer.host_id = "another host"
        with exports.opened(offer) as export:
            assert export.grant.kind == pb.TRANSPORT_KIND_GRPC


async def test_a_grant_whose_arena_is_not_shared_is_pulled_by_grpc() -> None:
    puller = KvPuller()
    with SharedArena(1 << 20) as arena:
        exports = ExportTable(arena)
        async with served(exports) as channel:
            with exports.opened(puller.offer) as export:
                payload = export.add(spec_of(5), b"hello")
                grant = pb.TransportGrant()
                grant.CopyFrom(export.grant)
                grant.arena_nonce = bytes(16)
                assert await puller.pull(grant, [payload], channel, timeout_s=10) == [b"hello"]


@pytest.mark.parametrize("kinds", [(pb.TRANSPORT_KIND_SHM,), GRPC_ONLY])
async def test_a_flipped_bit_is_a_checksum_mismatch(kinds: tuple[pb.TransportKind.ValueType, ...]) -> None:
    puller = KvPuller(kinds)
    with SharedArena(1 << 20) as arena:
        exports = ExportTable(arena)
        async with served(exports) as channel:
            with exports.opened(puller.offer) as export:
                payload = export.add(spec_of(5), b"hello")
                damaged = pb.Payload()
                damaged.CopyFrom(payload)
                damaged.checksum ^= 1
                with pytest.raises(ChecksumMismatch):
                    await puller.pull(export.grant, [damaged], channel, timeout_s=10)


async def test_an_ended_export_is_not_found() -> None:
    exports = ExportTable(None)
    puller = KvPuller(GRPC_ONLY)
    async with served(exports) as channel:
        with exports.opened(puller.offer) as export:
            payload = export.add(spec_of(5), b"hello")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await puller.pull(export.grant, [payload], channel, timeout_s=10)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    with pytest.raises(NotFound):
        exports.get(export.export_id)


def test_exports_are_bounded() -> None:
    exports = ExportTable(None, max_exports=2)
    kept = [exports.open(KvPuller().offer) for _ in range(2)]
    with pytest.raises(ResourceExhausted):
        exports.open(KvPuller().offer)
    exports.close(kept[0])
    exports.open(KvPuller().offer)


def test_bytes_that_do_not_fill_the_shape_are_refused() -> None:
    with pytest.raises(InvalidArgument):
        ExportTable(None).open(KvPuller().offer).add(spec_of(4), b"hello")


def test_a_full_arena_says_so_and_holds_nothing_new() -> None:
    with SharedArena(4096) as arena:
        arena.store(bytes(2048))
        held = arena.held_count
        with pytest.raises(ArenaFull):
            arena.store(bytes(4096))
        assert arena.held_count == held


def test_an_arena_is_mapped_only_under_its_own_nonce_and_name() -> None:
    with SharedArena(4096) as arena:
        ArenaView(arena.name, arena.nonce).close()
        for name, nonce in ((arena.name, bytes(16)), ("../" + arena.name, arena.nonce), ("shoal-kv-none", bytes(16))):
            with pytest.raises(FailedPrecondition):
                ArenaView(name, nonce)
    with pytest.raises(FailedPrecondition):
        ArenaView(arena.name, arena.nonce)


def test_an_arena_goes_with_its_owner_even_when_that_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from shoal_common.kv_transport import SharedArena;"
        "arena = SharedArena(4096, directory=Path(sys.argv[1])); print(arena.name, flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    name = owner.stdout.readline().strip()
    with SharedArena(4096, directory=tmp_path) as mine:
        assert {path.name for path in tmp_path.iterdir()} == {name, mine.name}
        owner.kill()
        owner.wait()
        assert sweep_abandoned(tmp_path) == 1
        assert [path.name for path in tmp_path.iterdir()] == [mine.name]
    owner.stdout.close()


def test_shared_memory_that_cannot_be_had_is_a_typed_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match="shared memory"):
        SharedArena(4096, directory=tmp_path / "absent")
    with pytest.raises(FailedPrecondition, match="shared memory"):
        SharedArena(0, directory=tmp_path)
    assert list(tmp_path.iterdir()) == []


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 700)), max_size=60))
def test_ranges_never_overlap_and_all_come_back(steps: list[tuple[bool, int]]) -> None:
    ranges = FreeList(64, 4096)
    whole = ranges.free_bytes
    held: dict[int, int] = {}
    for is_allocation, number in steps:
        if is_allocation:
            offset = ranges.allocate(number)
            if offset is None:
                continue
            assert offset % 64 == 0
            assert offset >= 64
            assert offset + number <= 4096
            assert all(offset + number <= begin or begin + size <= offset for begin, size in held.items())
            held[offset] = number
        elif held:
            offset = sorted(held)[number % len(held)]
            del held[offset]
            ranges.free(offset)
    for offset in held:
        ranges.free(offset)
    assert ranges.free_bytes == whole
    assert ranges.allocate(whole) == 64


def test_an_arena_whose_owner_was_killed_is_removed_and_a_living_one_stays(tmp_path: Path) -> None:
    stale = tmp_path / "shoal-kv-1-dead"
    stale.write_bytes(b"x" * 100)
    with SharedArena(1 << 20, directory=tmp_path) as living:
        assert not stale.exists()
        with SharedArena(1 << 20, directory=tmp_path) as second:
            assert {path.name for path in tmp_path.iterdir()} == {living.name, second.name}
    assert list(tmp_path.iterdir()) == []


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
