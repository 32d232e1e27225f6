"""Slabs: whatever is put in and taken out, nothing overlaps, nothing is lost, and bytes come back as they were."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from shoal.common.v1 import kv_transport_pb2 as pb
from shoal_common.errors import DataLoss
from shoal_common.kv_transport import ArenaFull, ExportTable, RunSpec, SlabArena, checksum_of, fill
from shoal_common.kv_transport.arena import ArenaView

SLAB, COUNT = 64, 23


class SlabsAgainstADict(RuleBasedStateMachine):
    """The arena against a dict of what was stored, by first slab."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = SlabArena(SLAB * COUNT, slab_bytes=SLAB, is_shared=False)
        self.stored: dict[int, bytes] = {}

    def teardown(self) -> None:
        self.arena.close()

    @rule(data=st.binary(max_size=SLAB * 6))
    def store(self, data: bytes) -> None:
        needed, free = self.arena.slabs_for(len(data)), self.arena.free_count
        if needed > free:
            with pytest.raises(ArenaFull):
                self.arena.store(data)
            assert self.arena.free_count == free
        else:
            first = self.arena.store(data)
            assert first not in self.stored
            self.stored[first] = data

    @precondition(lambda self: self.stored)
    @rule(choice=st.randoms(use_true_random=False))
    def free(self, choice: object) -> None:
        first = choice.choice(sorted(self.stored))  # type: ignore[attr-defined]
        del self.stored[first]
        self.arena.free(first)
        with pytest.raises(KeyError):
            self.arena.free(first)

    @precondition(lambda self: self.stored)
    @rule(data=st.binary(min_size=1, max_size=40), choice=st.randoms(use_true_random=False))
    def overwrite(self, data: bytes, choice: object) -> None:
        first = choice.choice(sorted(self.stored))  # type: ignore[attr-defined]
        old = self.stored[first]
        offset = max(0, len(old) - len(data))
        self.arena.write(first, offset, data[: len(old)])
        self.stored[first] = old[:offset] + data[: len(old)]

    @invariant()
    def every_slab_is_free_or_in_one_chain(self) -> None:
        held = self.arena.slabs_of(self.stored)
        assert len(held) == len(set(held)) == COUNT - self.arena.free_count
        assert all(0 <= slab < COUNT for slab in held)

    @invariant()
    def bytes_come_back_as_they_were(self) -> None:
        for first, data in self.stored.items():
            assert self.arena.load(first, len(data)) == data
            assert self.arena.checksum(first, len(data)) == checksum_of(data)


TestSlabsAgainstADict = SlabsAgainstADict.TestCase
TestSlabsAgainstADict.settings = settings(max_examples=30, stateful_step_count=30)


def test_a_fresh_arena_gives_slabs_in_order_so_that_runs_are_one_view() -> None:
    with SlabArena(SLAB * COUNT, slab_bytes=SLAB, is_shared=False) as arena:
        first = arena.store(bytes(range(200)))
        assert arena.slabs(first) == [0, 1, 2, 3]
        views = arena.views(first, 200)
        assert [view.nbytes for view in views] == [200]
        assert arena.first_slab_offset % 64 == 0


def test_slabs_are_cut_once_when_the_first_payload_says_how_large() -> None:
    with SlabArena(1000, is_shared=False) as arena:
        assert (arena.free_bytes, arena.slab_count) == (1000, 0)
        for wrong in (0, 63, 65, 1024):
            with pytest.raises(ValueError, match="multiple of 64"):
                arena.cut(wrong)
        arena.cut(192)
        assert (arena.free_bytes, arena.slab_count) == (960, 5)
        with pytest.raises(ValueError, match="already"):
            arena.cut(192)


@given(st.lists(st.integers(1, 700), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_what_a_writer_fills_through_its_own_mapping_is_what_the_owner_reads(sizes: list[int], choice: object) -> None:
    with SlabArena(64 << 10, slab_bytes=128) as arena:
        # Holes, so that chains are not in order.
        kept = [arena.allocate(128) for _ in range(60)]
        for first in kept[::2]:
            arena.free(first)
        data = [choice.randbytes(size) for size in sizes]  # type: ignore[attr-defined]
        firsts = [arena.allocate(len(one)) for one in data]
        grant = pb.TransportGrant(slab_bytes=arena.slab_bytes, first_slab_offset=arena.first_slab_offset)
        view = ArenaView(arena.name, arena.nonce, is_writable=True)
        fill(view.memory, grant, arena.slabs_of(firsts), data)
        view.close()
        assert [arena.load(first, len(one)) for first, one in zip(firsts, data, strict=True)] == data


@pytest.mark.parametrize("slabs", [[0], [0, 1, 2], [0, 99]], ids=["too few", "too many", "outside"])
def test_slabs_that_do_not_fit_the_payloads_are_refused_before_anything_is_written(slabs: list[int]) -> None:
    with SlabArena(64 * 8, slab_bytes=64, is_shared=False) as arena:
        grant = pb.TransportGrant(slab_bytes=64, first_slab_offset=arena.first_slab_offset)
        with pytest.raises(DataLoss):
            fill(arena.memory, grant, slabs, [b"x" * 100])
        assert bytes(arena.memory) == bytes(arena.memory.nbytes)


@given(st.integers(1, 300), st.lists(st.booleans(), min_size=1, max_size=12))
def test_any_part_of_a_run_is_one_piece_with_the_bytes_of_its_payloads(size: int, holes: list[bool]) -> None:
    with SlabArena(64 << 10, slab_bytes=128, is_shared=False) as arena:
        table = ExportTable(arena)
        data, firsts = [], []
        for index, has_hole in enumerate(holes):
            if has_hole:
                arena.allocate(1)
            data.append(bytes([index]) * size)
            firsts.append(arena.store(data[-1]))
        spec = RunSpec(
            kind=pb.PAYLOAD_KIND_BLOCK, position_begin=0, positions=128, shape=(size,), dtype="uint8", kv_id="kv"
        )
        with table.opened(pb.TransportOffer()) as export:
            export.add_run(spec, [0], firsts[:1])
            run = export.add_run(spec, [0] * len(data), firsts)
            assert (run.first_payload_id, run.size_bytes, list(run.slabs)) == (1, size, [])
            for begin in range(len(data)):
                piece = export.piece(1 + begin, 99)
                assert (piece.first_payload_id, piece.count) == (1 + begin, len(data) - begin)
                assert b"".join(piece.views) == b"".join(data[begin:])
                assert export.read(1 + begin) == data[begin]


def test_slabs_go_with_their_owner(tmp_path: Path) -> None:
    with SlabArena(4096, slab_bytes=64, directory=tmp_path) as arena:
        assert [path.name for path in tmp_path.iterdir()] == [arena.name]
        view = arena.views(arena.store(b"still here"), 10)[0]
    assert list(tmp_path.iterdir()) == []
    assert bytes(view) == b"still here"
