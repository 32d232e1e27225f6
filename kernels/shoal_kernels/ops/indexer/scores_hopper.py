# mypy: ignore-errors
"""Index scores on Hopper, in Gluon."""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from shoal_kernels.ops.indexer.row_groups import find_group
from shoal_kernels.ops.indexer.sort_keys import COARSE

TILE = 64

_DECODE = gl.constexpr(
    """
{
.reg .b32 m, s, k, f;
mov.b32 k, 0x7E807E80;
"""
    + "".join(
        f"""
shl.b32 s, ${8 + word}, {12 - 4 * p};
{f"shl.b32 m, ${8 + word}, {6 - 4 * p}" if p < 2 else f"shr.b32 m, ${8 + word}, {4 * p - 6}"};
and.b32 m, m, 0x01C001C0;
lop3.b32 m, s, 0x80008000, m, 0xEA;
mul.rn.bf16x2 m, m, k;
mul.rn.bf16x2 ${4 * word + p}, m, ${10 + word};
"""
        for word in range(2)
        for p in range(4)
    )
    + "}"
)


@gluon.jit
def _decode(words, scale, LA: gl.constexpr):
    """Codes int32 [64, 4, 4] (row, group, word) and packed scales -> bf16 [64, 128] as the left operand of a product.

    Column 8 * j + 2 * c + b of the result is dimension 32 * c + 8 * (j // 4) + j % 4 + 4 * b.
    """
    o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(
        _DECODE,
        "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r",
        [words, scale],
        dtype=(gl.bfloat16,) * 8,
        is_pure=True,
        pack=2,
    )
    x = gl.join(gl.join(gl.join(o0, o4), gl.join(o2, o6)), gl.join(gl.join(o1, o5), gl.join(o3, o7)))
    # [row, c, word, q2, q1, q0] with q = 4 q2 + 2 q1 + q0
    x = gl.reshape(x, (64, 4, 2, 2, 2, 2, 2))
    # row, c, half, b, q2, q1, q0 -> row, half, q2, q1, q0, c, b
    x = gl.permute(x, (0, 2, 4, 5, 6, 1, 3))
    return gl.convert_layout(gl.reshape(x, (64, 128)), LA, assert_trivial=True)


@gluon.jit
def _finish(acc, w, out, coarse, listed, length, first, rows, entry, width, ROWS: gl.constexpr, LISTED: gl.constexpr):
    """Weighted head sums of ROWS rows, stored; of all entries also the largest of each 8."""
    weighted = gl.maximum(acc, 0.0) * w[None, :]
    x = gl.reshape(weighted, (4, 2, 8, ROWS, 4, 4, 2))  # warp, e, g, row, j, c, b
    x = gl.permute(x, (0, 2, 1, 3, 5, 4, 6))  # warp, g, e, row, c, j, b
    x = gl.reshape(x, (64, ROWS, 4, 8))
    total = gl.sum(gl.sum(x, 3), 2)  # [64, ROWS]
    LS: gl.constexpr = total.type.layout
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
def _find_tile(
    table_row, listed, length, entry, bound, LISTED: gl.constexpr, PER_BLOCK: gl.constexpr, LW: gl.constexpr
):
    """Block and slot of the keys from place `entry` on: of the first, or LISTED of each; any where there is none."""
    if LISTED:
        m = gl.arange(0, 64, layout=gl.SliceLayout(1, gl.SliceLayout(2, LW)))
        key = (m & 48) | ((m & 7) << 1) | ((m >> 3) & 1)
        chosen = gl.load(listed + gl.minimum((entry + key) // 8, length - 1))
        at = gl.minimum(chosen * 8, bound - 8) + key % 8
    else:
        at = gl.minimum(entry, bound - 64)
    return gl.maximum(gl.load(table_row + at // PER_BLOCK), 0), at % PER_BLOCK


@gluon.jit
def _load_tile(
    words, scales, block, slot, block_units, LISTED: gl.constexpr, PER_BLOCK: gl.constexpr, LW: gl.constexpr
):
    """Codes int32 [64, 4, 4] and scale bytes [64, 4] of 64 keys, rows in the order of fragments."""
    m = gl.arange(0, 64, layout=gl.SliceLayout(1, gl.SliceLayout(2, LW)))
    key = (m & 48) | ((m & 7) << 1) | ((m >> 3) & 1)
    c = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, LW)))
    i = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, LW)))
    base = block.to(gl.int64) * block_units
    if LISTED:
        word = words + (base // 4 + slot * 16)
        offset = gl.expand_dims(gl.expand_dims(c * 4, 0), 2) + gl.expand_dims(gl.expand_dims(i, 0), 1)
        found = gl.load(gl.expand_dims(word[:, None], 2) + offset)
        exponent = gl.load((scales + (base + PER_BLOCK * 64 + slot * 4))[:, None] + c[None, :])
    else:
        offset = gl.expand_dims(key[:, None] * 16 + c[None, :] * 4, 2) + gl.expand_dims(gl.expand_dims(i, 0), 1)
        found = gl.load(words + (base // 4 + slot * 16) + offset)
        exponent = gl.load(scales + (base + PER_BLOCK * 64 + slot * 4) + (key[:, None] * 4 + c[None, :]))
    return found, exponent


@gluon.jit
def _packed_scale(exponent):
    exponent = exponent.to(gl.int32)
    half = gl.where(exponent == 0, 0x40, exponent << 7)
    return half | (half << 16)


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
    w0,
    w1,
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
        packed, scale = gl.broadcast(found, gl.expand_dims(_packed_scale(exponent), 2))
        a = _decode(packed, scale, LA)
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
            _finish(acc0, w0, out, coarse, listed, length, 0, rows, at, width, FULL, LISTED)
            acc1 = hopper.warpgroup_mma_wait(0, deps=(acc1,))
            _finish(acc1, w1, out, coarse, listed, length, FULL, rows, at, width, REST, LISTED)
        else:
            acc0 = hopper.warpgroup_mma_wait(0, deps=(acc0,))
            _finish(acc0, w0, out, coarse, listed, length, 0, rows, at, width, FULL, LISTED)


@gluon.jit
def _load_weights(weights, start, stop, first, ROWS: gl.constexpr, LC: gl.constexpr):
    n = gl.arange(0, 32 * ROWS, layout=gl.SliceLayout(0, LC))
    row = start + first + n // 32
    return gl.load(weights + row.to(gl.int64) * 32 + n % 32, mask=row < stop, other=0.0).to(gl.float32)


@gluon.jit
def _stage_query(query, shared, start, stop, L: gl.constexpr):
    """Six rows into shared bf16 [256, 128] (row and head, permuted dimension)."""
    for first in gl.static_range(3):
        n = gl.arange(0, 64, layout=gl.SliceLayout(1, L))
        k = gl.arange(0, 128, layout=gl.SliceLayout(0, L))
        j = k // 8
        dim = 32 * (k // 2 % 4) + 8 * (j // 4) + j % 4 + 4 * (k % 2)
        row = start + 2 * first + n // 32
        at = row.to(gl.int64) * 32 + n % 32
        q = gl.load(query + at[:, None] * 128 + dim[None, :], mask=(row < stop)[:, None], other=0.0)
        shared.slice(64 * first, 64).store(q)


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
    LC4: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    LC2: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    LA: gl.constexpr = gl.DotOperandLayout(0, LC2, 2)
    LQ: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    SH: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    shared = gl.allocate_shared_memory(gl.bfloat16, [256, 128], SH)
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
            _stage_query(query, shared, start, stop, LQ)
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
                    _load_weights(weights, start, stop, 0, 4, LC4),
                    _load_weights(weights, start, stop, 4, 2, LC2),
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
                w = _load_weights(weights, start, stop, 0, 2, LC2)
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
                    w,
                    w,
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


def score_groups(query, weights, keys, block_table, row_seq, groups, out, coarse, programs, united=None, size=COARSE):
    """As `scores_triton.score_groups`."""
    _score_groups_hopper[(2 * programs,)](
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
