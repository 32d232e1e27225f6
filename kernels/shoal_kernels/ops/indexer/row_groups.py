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
    WITH_TILES: tl.constexpr,
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
    if WITH_TILES:
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
    n_vis,
    starts,
    count,
    flags,
    listed,
    lengths,
    num_candidates,
    num_blocks,
    list_width,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDE: tl.constexpr,
):
    group = tl.program_id(0)
    if group < tl.load(count):
        first = tl.load(starts + group)
        last = tl.load(starts + group + 1)
        flags += group.to(tl.int64) * num_blocks
        listed += group.to(tl.int64) * list_width
        offset = tl.arange(0, CHUNK)
        wide = tl.arange(0, WIDE)
        for base in range(0, num_blocks, WIDE):
            tl.store(flags + base + wide, tl.zeros((WIDE,), tl.int8), mask=base + wide < num_blocks)
        tl.debug_barrier()
        candidates += first.to(tl.int64) * num_candidates
        for i in tl.static_range(GROUP):
            visible = tl.load(n_vis + first + i, mask=first + i < last, other=0)
            for base in range(0, num_candidates, CHUNK):
                place = base + offset
                inside = (place < num_candidates) & (first + i < last)
                block = tl.load(candidates + i * num_candidates + place, mask=inside, other=-1)
                wanted = (block >= 0) & (block < num_blocks) & (block.to(tl.int64) * SIZE < visible)
                tl.store(flags + block, tl.full((CHUNK,), 1, tl.int8), mask=wanted)
        tl.debug_barrier()
        length = 0
        for base in range(0, num_blocks, WIDE):
            block = base + wide
            wanted = tl.load(flags + block, mask=block < num_blocks, other=0).to(tl.int32)
            tl.store(listed + length + tl.cumsum(wanted, 0) - 1, block, mask=wanted > 0)
            length += tl.sum(wanted, 0)
        tl.store(lengths + group, length)


@triton.jit
def _count_tiles(lengths, tiles, count, SIZE: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr):
    groups = tl.load(count)
    before_all = 0
    for base in range(0, groups, CHUNK):
        group = base + tl.arange(0, CHUNK)
        inside = group < groups
        own = (tl.load(lengths + group, mask=inside, other=0) * SIZE + TILE - 1) // TILE
        tl.store(tiles + group, before_all + tl.cumsum(own, 0) - own, mask=inside)
        before_all += tl.sum(own, 0)
    tl.store(tiles + groups, before_all)


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


def find_groups(row_seq: Tensor, n_vis: Tensor, bound: int, tile: int, *, with_tiles: bool = True) -> RowGroups:
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
        WITH_TILES=with_tiles,
        num_warps=8 if chunk > 256 else 4,
    )
    return groups


@dataclass(frozen=True, slots=True)
class UnitedCandidates:
    """The candidate blocks of any row of a group, for each group.

    blocks   int32 [R, width]: ascending block ids
    lengths  int32 [R]: how many
    """

    blocks: Tensor
    lengths: Tensor


def unite_candidates(
    candidates: Tensor, size: int, row_seq: Tensor, n_vis: Tensor, bound: int, tile: int
) -> tuple[RowGroups, UnitedCandidates]:
    """Groups of the rows whose key tiles cover the entries of the groups' candidates."""
    rows, num_candidates = candidates.shape
    groups = find_groups(row_seq, n_vis, bound, tile, with_tiles=False)
    num_blocks = -(-bound // size)
    width = min(num_blocks, GROUP * num_candidates)
    flags = torch.empty(rows, num_blocks, dtype=torch.int8, device=candidates.device)
    united = UnitedCandidates(
        torch.empty(rows, width, dtype=torch.int32, device=candidates.device),
        torch.empty(rows, dtype=torch.int32, device=candidates.device),
    )
    chunk = min(2048, triton.next_power_of_2(max(num_candidates, 16)))
    wide = min(16384, triton.next_power_of_2(max(num_blocks, 16)))
    _unite_candidates[(rows,)](
        candidates,
        n_vis,
        groups.starts,
        groups.count,
        flags,
        united.blocks,
        united.lengths,
        num_candidates,
        num_blocks,
        width,
        SIZE=size,
        GROUP=GROUP,
        CHUNK=chunk,
        WIDE=wide,
        num_warps=16 if wide > 4096 else 4,
    )
    chunk = min(_CHUNK, triton.next_power_of_2(max(rows, 16)))
    _count_tiles[(1,)](united.lengths, groups.tiles, groups.count, SIZE=size, TILE=tile, CHUNK=chunk, num_warps=4)
    return groups, united
