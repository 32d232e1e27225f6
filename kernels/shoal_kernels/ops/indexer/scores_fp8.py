# mypy: ignore-errors
"""Index scores on Hopper with e4m3 products, in Gluon."""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from shoal_kernels.ops.indexer.row_groups import find_group
from shoal_kernels.ops.indexer.scores_hopper import _decode as _decode16
from shoal_kernels.ops.indexer.scores_hopper import _find_tile, _load_tile, _packed_scale
from shoal_kernels.ops.indexer.sort_keys import COARSE

TILE = 64
MODE = True

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
    # row, c, b, then the bits of 2 * J + h
    x = gl.reshape(x, (64, 4, 4, 2, 2, 2))
    x = gl.permute(x, (0, 3, 4, 5, 1, 2))
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
def _rows_of(n, ROWS: gl.constexpr):
    """Row and head of column n of a product for 4 or 2 rows.

    A thread holds columns 8 j + 2 c + b of its keys, with a c of its own: so c is the row, or half the heads of one.
    """
    if ROWS == 4:
        row = n // 2 % 4
        head = n // 8 * 2 + n % 2
    else:
        row = n // 4 % 2
        head = n // 2 % 2 * 16 + n // 8 * 2 + n % 2
    return row, head


@gluon.jit
def _stage_rows(
    query,
    weights,
    shared,
    scales,
    start,
    stop,
    AT: gl.constexpr,
    ROWS: gl.constexpr,
    FP8: gl.constexpr,
    L: gl.constexpr,
):
    """ROWS rows from `start` on as columns AT .. of shared [256, 128] (permuted dimensions), weights float32 [256]."""
    for part in gl.static_range(ROWS // 2):
        n = part * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, L))
        k = gl.arange(0, 128, layout=gl.SliceLayout(0, L))
        row, head = _rows_of(n, ROWS)
        row += start
        at = row.to(gl.int64) * 32 + head
        q = gl.load(query + at[:, None] * 128 + k[None, :], mask=(row < stop)[:, None], other=0.0).to(gl.float32)
        w = gl.load(weights + at, mask=row < stop, other=0.0).to(gl.float32)
        if FP8:
            largest = gl.max(gl.maximum(q, -q), 1)
            # 2^(8 - exponent) takes the largest to 256 or 384; a row of zeros stays one.
            exponent = gl.maximum(largest.to(gl.int32, bitcast=True) >> 23, 16)
            up = ((262 - exponent) << 23).to(gl.float32, bitcast=True)
            down = ((exponent - 8) << 23).to(gl.float32, bitcast=True)
            q = (q * up[:, None]).to(gl.float8e4nv)
            q = gl.permute(gl.reshape(q, (64, 4, 4, 2, 4)), (0, 2, 3, 1, 4))
            w = w * (0.5 * down)
        else:
            q = gl.permute(gl.reshape(q.to(gl.bfloat16), (64, 4, 4, 2, 4)), (0, 2, 4, 1, 3))
        shared.slice(AT + part * 64, 64).store(gl.reshape(q, (64, 128)))
        scales.slice(AT + part * 64, 64).store(w)


@gluon.jit
def _finish(
    acc,
    scales,
    scale,
    out,
    coarse,
    listed,
    length,
    rows,
    entry,
    width,
    AT: gl.constexpr,
    FIRST: gl.constexpr,
    ROWS: gl.constexpr,
    FP8: gl.constexpr,
    LISTED: gl.constexpr,
    LC: gl.constexpr,
):
    """Weighted head sums of ROWS rows, stored; of all entries also the largest of each 8."""
    w = scales.slice(AT, ROWS * 32).load(gl.SliceLayout(0, LC))
    if FP8:
        # x + |x| is twice the ramp, in the pipe that the decoding of codes leaves free; weights are halved for it.
        asm: gl.constexpr = "{.reg .f32 t; abs.f32 t, $1; add.f32 $0, $1, t;}"
        x = gl.inline_asm_elementwise(asm, "=f,f", [acc], dtype=gl.float32, is_pure=True, pack=1) * w[None, :]
    else:
        x = gl.maximum(acc, 0.0) * w[None, :]
    if ROWS == 4:
        x = gl.reshape(x, (4, 2, 8, 16, 4, 2))  # warp, e, g, j, row, b
        x = gl.permute(x, (0, 2, 1, 4, 3, 5))
        total = gl.sum(gl.sum(gl.sum(gl.reshape(x, (64, 4, 2, 2, 8)), 4), 3), 2)
    else:
        x = gl.reshape(x, (4, 2, 8, 8, 2, 2, 2))  # warp, e, g, j, row, half, b
        x = gl.permute(x, (0, 2, 1, 4, 5, 3, 6))
        total = gl.sum(gl.sum(gl.sum(gl.reshape(x, (64, 2, 2, 2, 8)), 4), 3), 2)
    LS: gl.constexpr = total.type.layout
    if FP8:
        scale = gl.reshape(gl.permute(gl.reshape(scale, (4, 2, 8)), (0, 2, 1)), (64,))
        total = total * gl.convert_layout(scale, gl.SliceLayout(1, LS), assert_trivial=True)[:, None]
    row = FIRST + gl.arange(0, ROWS, layout=gl.SliceLayout(0, LS))
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
        row = FIRST + gl.arange(0, ROWS, layout=gl.SliceLayout(0, LB))
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
    turns,
    step,
    FP8: gl.constexpr,
    WHICH: gl.constexpr,
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
    block, slot = _find_tile(table_row, listed, length, entry, bound, LISTED, PER_BLOCK, LW)
    found, exponent = _load_tile(words, storage, block, slot, block_units, LISTED, PER_BLOCK, LW)
    block, slot = _find_tile(table_row, listed, length, entry + 64, bound, LISTED, PER_BLOCK, LW)
    for at in range(entry, end, 64):
        if FP8:
            exponent = exponent.to(gl.int32)
            top = gl.max(exponent, 1)
            low, high = _tables(exponent, top[:, None])
            packed, low = gl.broadcast(found, gl.expand_dims(low, 2))
            packed, high = gl.broadcast(found, gl.expand_dims(high, 2))
            a = _decode(packed, low, high, LA)
            scale = (gl.maximum(top - 6, 1) << 23).to(gl.float32, bitcast=True)
        else:
            packed, scale = gl.broadcast(found, gl.expand_dims(_packed_scale(exponent), 2))
            a = _decode16(packed, scale, LA)
        hopper.mbarrier.wait(turns.index(WHICH), (step + 1 + WHICH) & 1)
        q0 = shared.slice(0, FULL * 32).permute((1, 0))
        acc0 = gl.full((64, FULL * 32), 0.0, gl.float32, LC0)
        acc0 = hopper.warpgroup_mma(a, q0, acc0, use_acc=False, is_async=True)
        if REST > 0:
            q1 = shared.slice(FULL * 32, REST * 32).permute((1, 0))
            acc1 = gl.full((64, REST * 32), 0.0, gl.float32, LC1)
            acc1 = hopper.warpgroup_mma(a, q1, acc1, use_acc=False, is_async=True)
        # The next tile's keys, and where those of the one after are, arrive during the products.
        found, exponent = _load_tile(words, storage, block, slot, block_units, LISTED, PER_BLOCK, LW)
        block, slot = _find_tile(table_row, listed, length, at + 128, bound, LISTED, PER_BLOCK, LW)
        if REST > 0:
            acc0 = hopper.warpgroup_mma_wait(1, deps=(acc0,))
            hopper.mbarrier.arrive(turns.index(1 - WHICH))
            _finish(acc0, scales, scale, out, coarse, listed, length, rows, at, width, 0, 0, FULL, FP8, LISTED, LC0)
            acc1 = hopper.warpgroup_mma_wait(0, deps=(acc1,))
            _finish(
                acc1, scales, scale, out, coarse, listed, length, rows, at, width, 128, FULL, REST, FP8, LISTED, LC1
            )
        else:
            acc0 = hopper.warpgroup_mma_wait(0, deps=(acc0,))
            hopper.mbarrier.arrive(turns.index(1 - WHICH))
            _finish(acc0, scales, scale, out, coarse, listed, length, rows, at, width, 0, 0, FULL, FP8, LISTED, LC0)
        step += 1
    return step


@gluon.jit
def _consume(
    inputs, sizes, parts, FP8: gl.constexpr, WHICH: gl.constexpr, LISTED: gl.constexpr, PER_BLOCK: gl.constexpr
):
    """The work of one of two warpgroups, which use the tensor cores in turn: one sums while the other multiplies."""
    query, weights, words, storage, table, row_seq, starts, tiles, count, out, coarse, united, lengths = inputs
    block_units, section, table_width, width, list_width = sizes
    all_shared, all_scales, turns = parts
    LW: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [8, 0, 0]],
        lane_bases=[[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]],
        block_bases=[],
        shape=[64, 4, 4],
    )
    LC4: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32 if FP8 else 16]
    )
    LC2: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 32 if FP8 else 16]
    )
    LA: gl.constexpr = gl.DotOperandLayout(0, LC2, 4 if FP8 else 2)
    LQ: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    shared = all_shared.index(WHICH)
    scales = all_scales.index(WHICH)
    groups = gl.load(count)
    total = gl.load(tiles + groups).to(gl.int64)
    consumers = 2 * gl.num_programs(0)
    first = 2 * gl.program_id(0)
    middle = ((first + 1) * total // consumers).to(gl.int32)
    low = (first * total // consumers).to(gl.int32)
    high = ((first + 2) * total // consumers).to(gl.int32)
    if WHICH == 0:
        tile = low
        end = middle
    else:
        tile = middle
        end = high
    rounds = gl.maximum(middle - low, high - middle)
    step = 0
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
            if rows > 2:
                _stage_rows(query, weights, shared, scales, start, stop, 0, 4, FP8, LQ)
                _stage_rows(query, weights, shared, scales, start + 4, stop, 128, 2, FP8, LQ)
                hopper.fence_async_shared()
                step = _segment(
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
                    turns,
                    step,
                    FP8,
                    WHICH,
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
                _stage_rows(query, weights, shared, scales, start, stop, 0, 2, FP8, LQ)
                hopper.fence_async_shared()
                step = _segment(
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
                    turns,
                    step,
                    FP8,
                    WHICH,
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
    # The other one may have a tile more.
    for rest in range(step, rounds):
        hopper.mbarrier.wait(turns.index(WHICH), (rest + 1 + WHICH) & 1)
        hopper.mbarrier.arrive(turns.index(1 - WHICH))


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
    FP8: gl.constexpr,
    LISTED: gl.constexpr,
    PER_BLOCK: gl.constexpr,
):
    DTYPE: gl.constexpr = gl.float8e4nv if FP8 else gl.bfloat16
    SH: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 if FP8 else 16, rank=2)
    S1: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shared = gl.allocate_shared_memory(DTYPE, [2, 256, 128], SH)
    scales = gl.allocate_shared_memory(gl.float32, [2, 256], S1)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], hopper.mbarrier.MBarrierLayout())
    hopper.mbarrier.init(turns.index(0), count=1)
    hopper.mbarrier.init(turns.index(1), count=1)
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    inputs = query, weights, words, storage, table, row_seq, starts, tiles, count, out, coarse, united, lengths
    sizes = block_units, section, table_width, width, list_width
    parts = shared, scales, turns
    gl.warp_specialize(
        [
            (_consume, (inputs, sizes, parts, FP8, FIRST, LISTED, PER_BLOCK)),
            (_consume, (inputs, sizes, parts, FP8, SECOND, LISTED, PER_BLOCK)),
        ],
        [4],
        [240],
    )


def score_groups(query, weights, keys, block_table, row_seq, groups, out, coarse, programs, united=None, size=COARSE):
    """As `scores_triton.score_groups`."""
    _score_groups_fp8[(programs,)](
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
        FP8=MODE,
        LISTED=united is not None,
        PER_BLOCK=keys.entries_per_block,
        num_warps=4,
    )
