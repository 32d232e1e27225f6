"""Transfer engines: chosen when both sides have them, checked like every way, left for the stream when they fail."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal.common.v1 import kv_transport_pb2 as pb
from shoal_common.errors import ChecksumMismatch, DeadlineExceeded
from shoal_common.kv_transport import ExportTable, KvPuller, SlabArena, checksum_of, open_engines
from shoal_common.kv_transport.buffers import address_of
from shoal_common.kv_transport.engine_pull import moves_of
from shoal_common.kv_transport.engines import EngineFailed, Move
from shoal_common.kv_transport.wanted import wanted_runs
from support.kv_ways import GRPC, SHM, TCP, holder, run_of
from support.waiting import until

NIXL, MOONCAKE = pb.TRANSPORT_KIND_NIXL, pb.TRANSPORT_KIND_MOONCAKE


class FakeEngine:
    """Reads this process's own memory, as an engine reads another's."""

    def __init__(self, kind: pb.TransportKind.ValueType = NIXL) -> None:
        self.kind = kind
        self.read_count = 0
        self.is_broken = False
        self.hangs = threading.Event()
        self.hangs.set()
        self.is_closed = False

    def serve(self, arena: memoryview) -> bytes:
        return b"peer"

    def read(
        self, peer: bytes, base_address: int, moves: Sequence[Move], memory: memoryview, *, timeout_s: float
    ) -> None:
        assert peer == b"peer"
        self.read_count += 1
        self.hangs.wait(20)
        if self.is_broken:
            raise EngineFailed("told to")
        for one in moves:
            ctypes.memmove(address_of(memory) + one.to_offset, base_address + one.from_offset, one.size_bytes)

    def close(self) -> None:
        self.is_closed = True


def stored(arena: SlabArena, data: list[bytes]) -> tuple[list[int], list[int]]:
    return [checksum_of(one) for one in data], [arena.store(one) for one in data]


@pytest.mark.parametrize("size", [1000, 4096, 30_000], ids=["part of a slab", "a slab", "many slabs"])
async def test_an_engine_that_both_have_comes_after_shared_memory_and_before_the_stream(size: int) -> None:
    engine = FakeEngine()
    with SlabArena(4 << 20, slab_bytes=4096) as arena:
        for first in [arena.allocate(4096) for _ in range(9)][::2]:
            arena.free(first)
        blocks = [os.urandom(size) for _ in range(20)]
        async with holder(arena, engines=[engine]) as held:
            for kinds, expected in (((SHM, TCP, GRPC), SHM), ((TCP, GRPC), NIXL)):
                puller = KvPuller(kinds, engines=[engine])
                with held.exports.opened(puller.offer) as export:
                    assert export.grant.kind == expected
                    run = export.add_run(run_of(size), *stored(arena, blocks))
                    assert await puller.pull_runs(export.grant, [run], held.channel, timeout_s=10) == blocks
                    damaged = pb.PayloadRun()
                    damaged.CopyFrom(run)
                    damaged.checksums[7] ^= 1
                    with pytest.raises(ChecksumMismatch):
                        await puller.pull_runs(export.grant, [damaged], held.channel, timeout_s=10)
                puller.close()
            with held.exports.opened(KvPuller((TCP, GRPC)).offer) as export:
                assert (export.grant.kind, export.grant.peer) == (TCP, b"")
            assert held.stream.sent_bytes == 0
        assert engine.read_count == 2
        assert engine.is_closed


async def test_the_better_engine_is_chosen_of_those_that_both_have() -> None:
    nixl, mooncake = FakeEngine(NIXL), FakeEngine(MOONCAKE)
    with SlabArena(1 << 20, slab_bytes=64) as arena:
        exports = ExportTable(arena, engines=[nixl, mooncake])
        for own, expected in (([nixl, mooncake], NIXL), ([mooncake], MOONCAKE), ([], GRPC)):
            assert exports.open(KvPuller((GRPC,), engines=own).offer).grant.kind == expected


async def test_an_engine_that_fails_is_left_for_the_stream_and_one_that_hangs_ends_at_the_deadline() -> None:
    engine = FakeEngine()
    with SlabArena(1 << 20, slab_bytes=64) as arena:
        async with holder(arena, engines=[engine]) as held:
            puller = KvPuller((TCP, GRPC), engines=[engine])
            with held.exports.opened(puller.offer) as export:
                run = export.add_run(run_of(64), *stored(arena, [b"x" * 64]))
                engine.is_broken = True
                assert await puller.pull_runs(export.grant, [run], held.channel, timeout_s=10) == [b"x" * 64]
                await until(lambda: held.stream.sent_bytes == 64, what="it is counted")
                engine.hangs.clear()
                with pytest.raises(DeadlineExceeded):
                    await puller.pull_runs(export.grant, [run], held.channel, timeout_s=0.1)
                engine.hangs.set()
            puller.close()


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12, unique=True), st.sampled_from([64, 60, 150]))
def test_moves_bring_every_byte_of_every_payload_to_its_place(slabs: list[int], size: int) -> None:
    per = -(-size // 64)
    slabs = slabs[: len(slabs) // per * per]
    count = len(slabs) // per
    run = pb.PayloadRun(size_bytes=size, positions=128, checksums=[0] * count, slabs=slabs)
    wanted, total = wanted_runs([run])
    arena, memory = os.urandom(64 * 32), bytearray(total)
    grant = pb.TransportGrant(slab_bytes=64, first_slab_offset=64)
    for one in wanted:
        for move in moves_of(grant, one):
            memory[move.to_offset : move.to_offset + move.size_bytes] = arena[move.from_offset :][: move.size_bytes]
        for index, view in enumerate(one.views(memoryview(memory))):
            own = b"".join(arena[64 + slab * 64 :][:64] for slab in slabs[index * per : (index + 1) * per])
            assert bytes(view) == own[:size]


def test_only_engines_that_exist_can_be_asked_for() -> None:
    assert open_engines([], host="127.0.0.1") == []
    with pytest.raises(ValueError, match="nixl, mooncake"):
        open_engines(["carrier-pigeon"], host="127.0.0.1")


HOLDER = """
import os, sys
from shoal.common.v1 import kv_transport_pb2 as pb
from shoal_common.kv_transport import ExportTable, RunSpec, SlabArena, checksum_of, open_engines
engines = open_engines([sys.argv[1]], host="127.0.0.1")
arena = SlabArena(8 << 20, slab_bytes=113_920)
exports = ExportTable(arena, engines=engines)
export = exports.open(pb.TransportOffer(kinds=[engines[0].kind]))
for first in [arena.allocate(1) for _ in range(9)][::2]:
    arena.free(first)
data = [bytes([index]) * 113_920 for index in range(40)]
spec = RunSpec(kind=1, position_begin=0, positions=128, shape=(113_920,), dtype="uint8", kv_id="kv")
run = export.add_run(spec, [checksum_of(one) for one in data], [arena.store(one) for one in data])
print("READY", export.grant.SerializeToString().hex(), run.SerializeToString().hex(), flush=True)
sys.stdin.read()
"""


def started_holder(name: str) -> tuple[subprocess.Popen[str], pb.TransportGrant, pb.PayloadRun]:
    """A process that serves HOLDER's blocks by an engine; what it grants."""
    other = subprocess.Popen(
        [sys.executable, "-P", "-c", HOLDER, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert other.stdout is not None
    line = next(one for one in other.stdout if one.startswith("READY"))
    grant, run = (bytes.fromhex(one) for one in line.split()[1:])
    return other, pb.TransportGrant.FromString(grant), pb.PayloadRun.FromString(run)


@pytest.mark.long
@pytest.mark.parametrize(("name", "module"), [("nixl", "nixl_cu13"), ("mooncake", "mooncake")])
async def test_an_installed_engine_reads_the_memory_of_another_process(name: str, module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    engines = open_engines([name], host="127.0.0.1")
    if not engines:
        pytest.skip(f"{name} cannot be opened here")
    other, grant, run = started_holder(name)
    puller = KvPuller((GRPC,), engines=engines)
    try:
        pulled = await puller.pull_runs(
            grant,
            [run] * 2,
            None,  # type: ignore[arg-type]
            timeout_s=20,
        )
        assert pulled == [bytes([index]) * 113_920 for index in range(40)] * 2
    finally:
        puller.close()
        other.kill()
        other.communicate()
