# mypy: ignore-errors
"""Index scores on Hopper with e4m3 products, in Gluon."""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from shoal_kernels.ops.indexer.row_groups import find_group
from shoal_kernels.ops.indexer.scores_hopper import _find_tile, _load_tile
from shoal_kernels.ops.indexer.sort_keys import COARSE

TILE = 64

_DECODE = gl.constexpr(
    """
{
.reg .b32 i, j, s;
"""
    + "".join(
        f"""
and.b32 i, ${8 + word}, 0x77777777;
shr.b32 j, ${8 + word}, 1;
and.b32 j, j, 0x44444444;
prmt.b32 s, 0, 0x80808080, j;
prmt.b32 ${2 * word}, ${12 + word}, ${16 + word}, i;
or.b32 ${2 * word}, ${2 * word}, s;
shr.b32 i, i, 16;
shr.b32 j, j, 16;
prmt.b32 s, 0, 0x80808080, j;
prmt.b32 ${2 * word + 1}, ${12 + word}, ${16 + word}, i;
or.b32 ${2 * word + 1}, ${2 * word + 1}, s;
"""
        for word in range(4)
    )
    + "}"
)


@gluon.jit
def _decode(words, low, high, LA: gl.constexpr):
    """Codes int32 [64, 4, 4] (row, group, word) and tables of e4m3 bytes -> e4m3 [64, 128], the left operand.

    Column 32 * J + 16 * h + 4 * c + b of the result is dimension 32 * c + 8 * J + 4 * h + b.
    """
    o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(
        _DECODE,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r",
        [words, low, high],
        dtype=(gl.float8e4nv,) * 8,
        is_pure=True,
        pack=4,
    )
    x = gl.join(gl.join(gl.join(o0, o4), gl.join(o2, o6)), gl.join(gl.join(o1, o5), gl.join(o3, o7)))
    # row, c, b, then the bits of J and h from the highest: join puts the last joined first
    x = gl.reshape(x, (64, 4, 4, 2, 2, 2))
    x = gl.permute(x, (0, 5, 4, 3, 1, 2))
    return gl.convert_layout(gl.reshape(x, (64, 128)), LA, assert_trivial=True)


@gluon.jit
def _tables(exponent, top):
    """e4m3 bytes of the magnitudes 0 .. 1.5 and 2 .. 6 of groups 2^(top - exponent) below the largest of their key.

    The largest gets a scale of 64, so all to 2^-12 of it are exact; the products of smaller ones are below the bits
    that the tensor core keeps.
    """
    below = top - exponent
    low = 0x6C686000 - below * 0x08080800
    low = gl.where(below == 12, 0x0C080400, low)
    high = 0x7C787470 - below * 0x08080808
    return gl.where(below > 12, 0, low), gl.where(below > 12, 0, high)


@gluon.jit
def _stage_query(query, weights, shared, scales, start, stop, L: gl.constexpr):
    """Six rows into shared e4m3 [256, 128] (row and head, permuted dimension); scales float32 [256] of rows and heads."""
    for first in gl.static_range(3):
        n = gl.arange(0, 64, layout=gl.SliceLayout(1, L))
        k = gl.arange(0, 128, layout=gl.SliceLayout(0, L))
        row = start + 2 * first + n // 32
        at = row.to(gl.int64) * 32 + n % 32
        q = gl.load(query + at[:, None] * 128 + k[None, :], mask=(row < stop)[:, None], other=0.0).to(gl.float32)
        largest = gl.max(gl.maximum(q, -q), 1)
        # 2^(8 - exponent) takes the largest to 256 or 384; a row of zeros stays one.
        exponent = gl.maximum(largest.to(gl.int32, bitcast=True) >> 23, 16)
        up = ((262 - exponent) << 23).to(gl.float32, bitcast=True)
        down = ((exponent - 8) << 23).to(gl.float32, bitcast=True)
        q = (q * up[:, None]).to(gl.float8e4nv)
        q = gl.reshape(q, (64, 4, 4, 2, 4))
        q = gl.permute(q, (0, 2, 3, 1, 4))
        shared.slice(64 * first, 64).store(gl.reshape(q, (64, 128)))
        w = gl.load(weights + at, mask=row < stop, other=0.0).to(gl.float32)
        scales.slice(64 * first, 64).store(w * down)


@gluon.jit
def _finish(
    acc, w, scale, out, coarse, listed, length, first, rows, entry, width, ROWS: gl.constexpr, LISTED: gl.constexpr
):
    """Weighted head sums of ROWS rows, stored; of all entries also the largest of each 8."""
    weighted = gl.maximum(acc, 0.0) * w[None, :]
    x = gl.reshape(weighted, (4, 2, 8, ROWS, 4, 4, 2))  # warp, e, g, row, j, c, b
    x = gl.permute(x, (0, 2, 1, 3, 5, 4, 6))  # warp, g, e, row, c, j, b
    x = gl.reshape(x, (64, ROWS, 4, 8))
    total = gl.sum(gl.sum(x, 3), 2)  # [64, ROWS]
    LS: gl.constexpr = total.type.layout
    scale = gl.reshape(gl.permute(gl.reshape(scale, (4, 2, 8)), (0, 2, 1)), (64,))
    total = total * gl.convert_layout(scale, gl.SliceLayout(1, LS), assert_trivial=True)[:, None]
    row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(0, LS))
    key = gl.arange(0, 64, layout=gl.SliceLayout(1, LS))
    if LISTED:
        place = entry + key
        chosen = gl.load(listed + gl.minimum(place // 8, length - 1))
        at = (row * width)[None, :] + (chosen * 8 + key % 8)[:, None]
        gl.store(out + at, total.to(gl.bfloat16), mask=(row < rows)[None, :] & (place < length * 8)[:, None])
    else:
        at = (row * width)[None, :] + key[:, None]
        gl.store(out + entry + at, total.to(gl.bfloat16), mask=(row < rows)[None, :])
        best = gl.max(gl.reshape(total, (8, 8, ROWS)), 1)
        LB: gl.constexpr = best.type.layout
        row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(0, LB))
        at = (row * (width // 8))[None, :] + gl.arange(0, 8, layout=gl.SliceLayout(1, LB))[:, None]
        gl.store(coarse + entry // 8 + at, best.to(gl.bfloat16), mask=(row < rows)[None, :])


@gluon.jit
def _segment(
    words,
    storage,
    table_row,
    out,
    coarse,
    listed,
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
    w0 = scales.slice(0, FULL * 32).load(gl.SliceLayout(0, LC0))
    if REST > 0:
        w1 = scales.slice(FULL * 32, REST * 32).load(gl.SliceLayout(0, LC1))
    block, slot = _find_tile(table_row, listed, length, entry, bound, LISTED, PER_BLOCK, LW)
    found, exponent = _load_tile(words, storage, block, slot, block_units, LISTED, PER_BLOCK, LW)
    block, slot = _find_tile(table_row, listed, length, entry + 64, bound, LISTED, PER_BLOCK, LW)
    for at in range(entry, end, 64):
        exponent = exponent.to(gl.int32)
        top = gl.max(exponent, 1)
        low, high = _tables(exponent, top[:, None])
        packed, low = gl.broadcast(found, gl.expand_dims(low, 2))
        packed, high = gl.broadcast(found, gl.expand_dims(high, 2))
        a = _decode(packed, low, high, LA)
        q0 = shared.slice(0, FULL * 32).permute((1, 0))
        acc0 = gl.full((64, FULL * 32), 0.0, gl.float32, LC0)
        acc0 = hopper.warpgroup_mma(a, q0, acc0, use_acc=False, is_async=True)
        if REST > 0:
            q1 = shared.slice(FULL * 32, REST * 32).permute((1, 0))
            acc1 = gl.full((64, REST * 32), 0.0, gl.float32, LC1)
            acc1 = hopper.warpgroup_mma(a, q1, acc1, use_acc=False, is_async=True)
        # 2^(top - 127) over 64, by two factors: either may be out of range alone.
        scale = gl.maximum(top - 6, 1) << 23
        scale = scale.to(gl.float32, bitcast=True)
        # The next tile's keys, and where those of the one after are, arrive during the products.
        found, exponent = _load_tile(words, storage, block, slot, block_units, LISTED, PER_BLOCK, LW)
        block, slot = _find_tile(table_row, listed, length, at + 128, bound, LISTED, PER_BLOCK, LW)
        if REST > 0:
            acc0 = hopper.warpgroup_mma_wait(1, deps=(acc0,))
            _finish(acc0, w0, scale, out, coarse, listed, length, 0, rows, at, width, FULL, LISTED)
            acc1 = hopper.warpgroup_mma_wait(0, deps=(acc1,))
            _finish(acc1, w1, scale, out, coarse, listed, length, FULL, rows, at, width, REST, LISTED)
        else:
            acc0 = hopper.warpgroup_mma_wait(0, deps=(acc0,))
            _finish(acc0, w0, scale, out, coarse, listed, length, 0, rows, at, width, FULL, LISTED)


@gluon.jit
def _score_groups_fp8(
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
    united,
    lengths,
    block_units,
    section,
    table_width,
    width,
    list_width,
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
    groups = gl.load(count)
    total = gl.load(tiles + groups).to(gl.int64)
    tile = (gl.program_id(0) * total // gl.num_programs(0)).to(gl.int32)
    end = ((gl.program_id(0) + 1) * total // gl.num_programs(0)).to(gl.int32)
    group = find_group(tiles, groups, tile)
    bound = table_width * PER_BLOCK
    words += section // 4
    storage += section
    while tile < end:
        start = gl.load(starts + group)
        stop = gl.load(starts + group + 1)
        first_tile = gl.load(tiles + group)
        segment_end = gl.minimum(end, gl.load(tiles + group + 1))
        if tile < segment_end:
            rows = stop - start
            table_row = table + gl.load(row_seq + start).to(gl.int64) * table_width
            own_out = out + start.to(gl.int64) * width
            own_coarse = coarse + start.to(gl.int64) * (width // 8)
            listed = united + group.to(gl.int64) * list_width
            length = 0
            if LISTED:
                length = gl.load(lengths + group)
            entry = (tile - first_tile) * 64
            last = (segment_end - first_tile) * 64
            _stage_query(query, weights, shared, scales, start, stop, LQ)
            hopper.fence_async_shared()
            if rows > 2:
                _segment(
                    words,
                    storage,
                    table_row,
                    own_out,
                    own_coarse,
                    listed,
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
                _segment(
                    words,
                    storage,
                    table_row,
                    own_out,
                    own_coarse,
                    listed,
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
        group += 1


def score_groups(query, weights, keys, block_table, row_seq, groups, out, coarse, programs, united=None, size=COARSE):
    """As `scores_triton.score_groups`."""
    _score_groups_fp8[(2 * programs,)](
        query,
        weights,
        keys.storage.view(torch.int32),
        keys.storage,
        block_table,
        row_seq,
        groups.starts,
        groups.tiles,
        groups.count,
        out,
        coarse,
        groups.starts if united is None else united.blocks,
        groups.starts if united is None else united.lengths,
        keys.storage.shape[1],
        keys.offset,
        block_table.shape[1],
        out.shape[1],
        0 if united is None else united.blocks.shape[1],
        LISTED=united is not None,
        PER_BLOCK=keys.entries_per_block,
        num_warps=4,
    )
