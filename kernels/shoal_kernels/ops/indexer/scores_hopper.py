# mypy: ignore-errors
"""Index scores on Hopper, in Gluon: blocks of one warpgroup, each with an equal range of all key tiles.

Three blocks share a multiprocessor, which limits their registers: while one multiplies, the others sum heads, store,
and decode their next keys. The order of a sum is fixed by the shapes of one row and one key.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from shoal_kernels.ops.indexer.hopper_parts import (
    decode,
    find_listed,
    find_places,
    find_tile,
    finish,
    load_tile,
    stage_rows,
    tables,
)
from shoal_kernels.ops.indexer.row_groups import UnitedCandidates, find_group
from shoal_kernels.ops.indexer.scores_triton import group_arguments
from shoal_kernels.ops.indexer.sort_keys import COARSE

TILE = 64
_BLOCKS, _REGISTERS = 3, 168
"""Blocks on a multiprocessor, and registers that each thread of theirs can have."""
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def _segment(
    words,
    storage,
    table_row,
    out,
    coarse,
    listed,
    places,
    length,
    entry,
    end,
    rows,
    bound,
    block_units,
    width,
    shared,
    scales,
    FULL: gl.constexpr,
    REST: gl.constexpr,
    LISTED: gl.constexpr,
    PER_BLOCK: gl.constexpr,
    LW: gl.constexpr,
    LA: gl.constexpr,
    LC0: gl.constexpr,
    LC1: gl.constexpr,
):
    """Entries (or places of the list) entry .. end - 1 for FULL and REST rows of a group."""
    block, slot = find_tile(table_row, listed, length, entry, bound, LISTED, PER_BLOCK, LW)
    found, exponent = load_tile(words, storage, block, slot, block_units, LISTED, PER_BLOCK, LW)
    block, slot = find_tile(table_row, listed, length, entry + 64, bound, LISTED, PER_BLOCK, LW)
    for at in range(entry, end, 64):
        exponent = exponent.to(gl.int32)
        top = gl.max(exponent, 1)
        scale = (gl.maximum(top - 6, 1) << 23).to(gl.float32, bitcast=True)
        low, high = tables(exponent, top[:, None])
        packed, low = gl.broadcast(found, gl.expand_dims(low, 2))
        packed, high = gl.broadcast(found, gl.expand_dims(high, 2))
        a = decode(packed, low, high, LA)
        q0 = shared.slice(0, FULL * 32).permute((1, 0))
        acc0 = gl.full((64, FULL * 32), 0.0, gl.float32, LC0)
        acc0 = hopper.warpgroup_mma(a, q0, acc0, use_acc=False, is_async=True)
        if REST > 0:
            q1 = shared.slice(FULL * 32, REST * 32).permute((1, 0))
            acc1 = gl.full((64, REST * 32), 0.0, gl.float32, LC1)
            acc1 = hopper.warpgroup_mma(a, q1, acc1, use_acc=False, is_async=True)
        # The next tile's keys, and where those of the one after are, arrive during the products.
        found, exponent = load_tile(words, storage, block, slot, block_units, LISTED, PER_BLOCK, LW)
        block, slot = find_tile(table_row, listed, length, at + 128, bound, LISTED, PER_BLOCK, LW)
        place0 = 0
        place1 = 0
        if LISTED:
            place0 = find_places(places, length, at, rows, 0, FULL)
            if REST > 0:
                place1 = find_places(places, length, at, rows, FULL, REST)
        # Without a barrier the compiler moves these loads behind the sums, to the place where it needs them.
        _barrier()
        if REST > 0:
            acc0 = hopper.warpgroup_mma_wait(1, deps=(acc0,))
            finish(acc0, scales, scale, out, coarse, place0, rows, at, width, 0, 0, FULL, LISTED, LC0)
            acc1 = hopper.warpgroup_mma_wait(0, deps=(acc1,))
            finish(acc1, scales, scale, out, coarse, place1, rows, at, width, 128, FULL, REST, LISTED, LC1)
        else:
            acc0 = hopper.warpgroup_mma_wait(0, deps=(acc0,))
            finish(acc0, scales, scale, out, coarse, place0, rows, at, width, 0, 0, FULL, LISTED, LC0)


@gluon.jit
def _score_groups_hopper(
    query,
    weights,
    words,
    storage,
    table,
    row_seq,
    starts,
    tiles,
    count,
    out,
    coarse,
    listed,
    places,
    lengths,
    stops,
    block_units,
    section,
    table_width,
    width,
    list_width,
    batch,
    LISTED: gl.constexpr,
    PER_BLOCK: gl.constexpr,
):
    LW: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [8, 0, 0]],
        lane_bases=[[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]],
        block_bases=[],
        shape=[64, 4, 4],
    )
    LC4: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    LC2: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 32])
    LA: gl.constexpr = gl.DotOperandLayout(0, LC2, 4)
    LQ: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    SH: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    S1: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shared = gl.allocate_shared_memory(gl.float8e4nv, [256, 128], SH)
    scales = gl.allocate_shared_memory(gl.float32, [256], S1)
    if LISTED:
        tile, end, group, first_tile = find_listed(lengths, batch, gl.program_id(0), gl.num_programs(0))
    else:
        groups = gl.load(count)
        total = gl.load(tiles + groups).to(gl.int64)
        tile = (gl.program_id(0) * total // gl.num_programs(0)).to(gl.int32)
        end = ((gl.program_id(0) + 1) * total // gl.num_programs(0)).to(gl.int32)
        group = find_group(tiles, groups, tile)
        first_tile = gl.load(tiles + group)
    bound = table_width * PER_BLOCK
    words += section // 4
    storage += section
    while tile < end:
        length = 0
        if LISTED:
            start = group
            stop = gl.load(stops + group)
            length = gl.load(lengths + group)
            next_tile = first_tile + (length + 7) // 8
        else:
            start = gl.load(starts + group)
            stop = gl.load(starts + group + 1)
            next_tile = gl.load(tiles + group + 1)
        segment_end = gl.minimum(end, next_tile)
        if tile < segment_end:
            rows = stop - start
            table_row = table + gl.load(row_seq + start).to(gl.int64) * table_width
            own_out = out + start.to(gl.int64) * width
            own_coarse = coarse + start.to(gl.int64) * (width // 8)
            own_list = group.to(gl.int64) * list_width
            entry = (tile - first_tile) * 64
            last = (segment_end - first_tile) * 64
            if rows > 2:
                stage_rows(query, weights, shared, scales, start, stop, 0, 4, LQ)
                stage_rows(query, weights, shared, scales, start + 4, stop, 128, 2, LQ)
                hopper.fence_async_shared()
                _segment(
                    words,
                    storage,
                    table_row,
                    own_out,
                    own_coarse,
                    listed + own_list,
                    places + own_list * 8,
                    length,
                    entry,
                    last,
                    rows,
                    bound,
                    block_units,
                    width,
                    shared,
                    scales,
                    4,
                    2,
                    LISTED,
                    PER_BLOCK,
                    LW,
                    LA,
                    LC4,
                    LC2,
                )
            else:
                stage_rows(query, weights, shared, scales, start, stop, 0, 2, LQ)
                hopper.fence_async_shared()
                _segment(
                    words,
                    storage,
                    table_row,
                    own_out,
                    own_coarse,
                    listed + own_list,
                    places + own_list * 8,
                    length,
                    entry,
                    last,
                    rows,
                    bound,
                    block_units,
                    width,
                    shared,
                    scales,
                    2,
                    0,
                    LISTED,
                    PER_BLOCK,
                    LW,
                    LA,
                    LC2,
                    LC2,
                )
        tile = segment_end
        first_tile = next_tile
        group = stop if LISTED else group + 1


def can_score(query, keys, size):
    """Whether the kernel serves these static shapes on this device; `size`: entries of a listed block."""
    return (
        query.device.type == "cuda"
        and torch.cuda.get_device_capability(query.device)[0] == 9
        and query.shape[1:] == (32, 128)
        and size == COARSE
        and keys.page_split
        and keys.entries_per_block % TILE == 0
        and keys.storage.shape[1] % 16 == 0
        and keys.offset % 16 == 0
    )


def score_groups(query, weights, keys, block_table, row_seq, groups, out, coarse, programs, size=COARSE):
    """As `scores_triton.score_groups`."""
    is_listed = isinstance(groups, UnitedCandidates)
    _score_groups_hopper[(_BLOCKS * programs,)](
        query,
        weights,
        keys.storage.view(torch.int32),
        keys.storage,
        block_table,
        row_seq,
        *group_arguments(groups, out, coarse),
        keys.storage.shape[1],
        keys.offset,
        block_table.shape[1],
        out.shape[1],
        groups.blocks.shape[1] if is_listed else 0,
        query.shape[0],
        LISTED=is_listed,
        PER_BLOCK=keys.entries_per_block,
        num_warps=4,
        maxnreg=_REGISTERS,
    )
