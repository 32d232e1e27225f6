# mypy: ignore-errors
"""Which rows share their keys, found on the device: runs of rows of one sequence, cut into groups.

A group is at most `GROUP` consecutive rows of one sequence. Its work is counted in tiles of keys, so that programs can
take equal ranges of all tiles without the host knowing how many there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUP = 6
"""Rows of a group: the width of a verify step."""

_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class RowGroups:
    """Groups 0 .. count - 1 of a batch of R rows, on the device.

    starts  int32 [R + 1]: first row of each group, then the number of rows
    tiles   int32 [R + 1]: key tiles before each group, then all key tiles
    count   int32 [1]
    """

    starts: Tensor
    tiles: Tensor
    count: Tensor


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _find_groups(
    row_seq,
    n_vis,
    starts,
    tiles,
    count,
    rows,
    bound,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    run_start = 0
    groups = 0
    for base in range(0, rows, CHUNK):
        row = base + tl.arange(0, CHUNK)
        inside = row < rows
        sequence = tl.load(row_seq + row, mask=inside, other=-1)
        before = tl.load(row_seq + row - 1, mask=inside & (row > 0), other=-1)
        begins = inside & (sequence != before)
        run = tl.associative_scan(tl.where(begins, row, run_start), 0, _larger)
        first = inside & ((row - run) % GROUP == 0)
        place = groups + tl.cumsum(first.to(tl.int32), 0) - 1
        tl.store(starts + place, row, mask=first)
        run_start = tl.max(run, 0)
        groups += tl.sum(first.to(tl.int32), 0)
    tl.store(starts + groups, rows)
    tl.store(count, groups)
    tl.debug_barrier()
    before_all = 0
    for base in range(0, groups, CHUNK):
        group = base + tl.arange(0, CHUNK)
        inside = group < groups
        first = tl.load(starts + group, mask=inside, other=0)
        last = tl.load(starts + group + 1, mask=inside, other=0)
        longest = tl.zeros((CHUNK,), tl.int64)
        for i in tl.static_range(GROUP):
            visible = tl.load(n_vis + first + i, mask=inside & (first + i < last), other=0)
            longest = tl.maximum(longest, visible)
        own = (tl.minimum(longest, bound).to(tl.int32) + TILE - 1) // TILE
        tl.store(tiles + group, before_all + tl.cumsum(own, 0) - own, mask=inside)
        before_all += tl.sum(own, 0)
    tl.store(tiles + groups, before_all)


@triton.jit
def _unite_candidates(
    candidates,
    row_seq,
    n_vis,
    flags,
    listed,
    places,
    lengths,
    stops,
    rows,
    num_candidates,
    num_blocks,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDE: tl.constexpr,
):
    first = tl.program_id(0)
    sequence = tl.load(row_seq + first)
    run = -1
    base = first
    while run < 0:
        row = base - tl.arange(0, 64)
        before = tl.load(row_seq + row - 1, mask=row > 0, other=-1)
        run = tl.max(tl.where((row >= 0) & (before != sequence), row, -1), 0)
        base -= 64
    length = 0
    last = first
    if (first - run) % GROUP == 0:
        later = first + 1 + tl.arange(0, 8)
        inside = later < tl.minimum(first + GROUP, rows)
        other = tl.load(row_seq + later, mask=inside, other=-1) != sequence
        last = tl.min(tl.where(other, later, first + GROUP), 0)
        flags += first.to(tl.int64) * num_blocks
        listed += first.to(tl.int64) * num_candidates
        places += first.to(tl.int64) * num_candidates * 8
        offset = tl.arange(0, CHUNK)
        wide = tl.arange(0, WIDE)
        for base in range(0, num_blocks, WIDE):
            tl.store(flags + base + wide, tl.zeros((WIDE,), tl.int32), mask=base + wide < num_blocks)
        tl.debug_barrier()
        candidates += first.to(tl.int64) * num_candidates
        for i in tl.static_range(GROUP):
            visible = tl.load(n_vis + first + i, mask=first + i < last, other=0)
            for base in range(0, num_candidates, CHUNK):
                place = base + offset
                block = tl.load(candidates + i * num_candidates + place, mask=place < num_candidates, other=-1)
                wanted = (block >= 0) & (block < num_blocks) & (block.to(tl.int64) * SIZE < visible)
                tl.store(flags + block, tl.full((CHUNK,), 1, tl.int32), mask=wanted)
        tl.debug_barrier()
        for base in range(0, num_blocks, WIDE):
            block = base + wide
            wanted = tl.load(flags + block, mask=block < num_blocks, other=0)
            index = length + tl.cumsum(wanted, 0) - 1
            tl.store(listed + index, block, mask=wanted > 0)
            tl.store(flags + block, index, mask=wanted > 0)
            for i in tl.static_range(GROUP):
                tl.store(places + index * 8 + i, tl.full((WIDE,), -1, places.dtype.element_ty), mask=wanted > 0)
            length += tl.sum(wanted, 0)
        tl.debug_barrier()
        for i in tl.static_range(GROUP):
            visible = tl.load(n_vis + first + i, mask=first + i < last, other=0)
            for base in range(0, num_candidates, CHUNK):
                place = base + offset
                block = tl.load(candidates + i * num_candidates + place, mask=place < num_candidates, other=-1)
                wanted = (block >= 0) & (block < num_blocks) & (block.to(tl.int64) * SIZE < visible)
                index = tl.load(flags + block, mask=wanted, other=0)
                tl.store(places + index * 8 + i, place.to(places.dtype.element_ty), mask=wanted)
    tl.store(lengths + first, length)
    tl.store(stops + first, last)


@triton.jit
def find_group(tiles, count, tile):
    """The last group that starts at or before key tile `tile`."""
    low = 0
    high = count
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(tiles + middle) <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def find_listed(lengths, rows, part, parts, SIZE: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr):
    """First and last + 1 key tile of a program's equal part of all, the group of the first, tiles before that group."""
    total = 0
    for base in range(0, rows, CHUNK):
        row = base + tl.arange(0, CHUNK)
        total += tl.sum((tl.load(lengths + row, mask=row < rows, other=0) * SIZE + TILE - 1) // TILE, 0)
    tile = (part * total.to(tl.int64) // parts).to(tl.int32)
    end = ((part + 1) * total.to(tl.int64) // parts).to(tl.int32)
    group = 0
    first_tile = 0
    before = 0
    for base in range(0, rows, CHUNK):
        row = base + tl.arange(0, CHUNK)
        own = (tl.load(lengths + row, mask=row < rows, other=0) * SIZE + TILE - 1) // TILE
        through = before + tl.cumsum(own, 0)
        is_past = (through <= tile) & (row < rows)
        group += tl.sum(is_past.to(tl.int32), 0)
        first_tile = tl.maximum(first_tile, tl.max(tl.where(is_past, through, 0), 0))
        before += tl.sum(own, 0)
    return tile, end, group, first_tile


def find_groups(row_seq: Tensor, n_vis: Tensor, bound: int, tile: int) -> RowGroups:
    """Groups of the rows; n_vis int64 [R] counts at most `bound` entries, `tile` of them make a key tile."""
    rows = row_seq.shape[0]
    # Each part begins at 16 bytes, whatever the number of rows: Triton compiles another kernel for another alignment.
    part = -(-(rows + 1) // 4) * 4
    data = torch.empty(2 * part + 1, dtype=torch.int32, device=row_seq.device)
    groups = RowGroups(data[: rows + 1], data[part : part + rows + 1], data[2 * part :])
    chunk = min(_CHUNK, triton.next_power_of_2(max(rows, 16)))
    _find_groups[(1,)](
        row_seq,
        n_vis,
        groups.starts,
        groups.tiles,
        groups.count,
        rows,
        bound,
        TILE=tile,
        GROUP=GROUP,
        CHUNK=chunk,
        num_warps=8 if chunk > 256 else 4,
    )
    return groups


@dataclass(frozen=True, slots=True)
class UnitedCandidates:
    """The candidate blocks of any row of a group, for each group; a group stands at its first row.

    blocks   int32 [R, C]: ascending block ids, from the first row of the group on: as many as its rows have room for
    places   int16 or int32 [R, C, 8]: where each row of the group lists that block, -1: nowhere that it sees
    lengths  int32 [R]: how many blocks, 0 for rows that start no group
    stops    int32 [R]: the end of the group's rows
    """

    blocks: Tensor
    places: Tensor
    lengths: Tensor
    stops: Tensor

    @staticmethod
    def empty(candidates: Tensor) -> UnitedCandidates:
        """Memory for candidates int32 [R, C]."""
        rows, listed = candidates.shape
        device, kind = candidates.device, torch.int16 if listed < 1 << 15 else torch.int32
        ends = torch.empty(2, rows, dtype=torch.int32, device=device)
        places = torch.empty(rows, listed, 8, dtype=kind, device=device)
        return UnitedCandidates(torch.empty_like(candidates), places, ends[0], ends[1])


def unite_candidates(candidates: Tensor, size: int, row_seq: Tensor, n_vis: Tensor, bound: int) -> UnitedCandidates:
    """candidates int32 [R, C]: blocks of `size` entries, distinct in a row; n_vis counts at most `bound` entries."""
    rows, num_candidates = candidates.shape
    num_blocks = -(-bound // size)
    united = UnitedCandidates.empty(candidates)
    flags = torch.empty(rows, num_blocks, dtype=torch.int32, device=candidates.device)
    chunk = min(2048, triton.next_power_of_2(max(num_candidates, 16)))
    wide = min(16384, triton.next_power_of_2(max(num_blocks, 16)))
    _unite_candidates[(rows,)](
        candidates,
        row_seq,
        n_vis,
        flags,
        united.blocks,
        united.places,
        united.lengths,
        united.stops,
        rows,
        num_candidates,
        num_blocks,
        SIZE=size,
        GROUP=GROUP,
        CHUNK=chunk,
        WIDE=wide,
        num_warps=16 if wide > 4096 else 4,
    )
    return united
