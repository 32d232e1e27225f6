# mypy: ignore-errors
"""Triton linear: the weight, dequantised to bfloat16 in registers, feeds the tensor cores as their A operand.

e4m3 times a power of two is exact in bfloat16, so the product has the operands of the host's, and only the order of the
float32 sum over K differs. out^T = W x^T: outputs are the M dimension of the instruction and rows its N dimension, so
that a few rows cost a small tile. The sum over K is cut into the segments of `segments.segment_count`: with few rows
each is computed by a block of its own and a second kernel adds them, with many rows one block computes all of them.
Both add the same float32 numbers in the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal_kernels.ops.linear.segments import UNIT, segment_count
from shoal_kernels.precision import Precision
from shoal_kernels.triton_lib import IS_INTERPRETED, cast_q8, dot, round_bf16

if TYPE_CHECKING:
    from shoal_kernels.ops.linear import LinearWeight

_INTERPRETED = tl.constexpr(IS_INTERPRETED)
_UNIT = tl.constexpr(UNIT)
_MULTIPROCESSORS = 132


@triton.jit
def dequantise(data, scale):
    """e4m3 bytes uint8 [n, k] with one ue8m0 byte per 32 of k (uint8 [n, k / 32]) -> bfloat16 [n, k], exact.

    The seven magnitude bits of e4m3 are put over the lowest exponent bits and the highest mantissa bits of a bfloat16,
    which is the value times 2^-120, subnormals included; one product with 2^120 * scale finishes. Scales up to 2^7.
    """
    n: tl.constexpr = data.shape[0]
    k: tl.constexpr = data.shape[1]
    if _INTERPRETED:
        byte = data.to(tl.int32)
        value = (((byte & 0x80) << 24) | ((byte & 0x7F) << 20)).to(tl.float32, bitcast=True)
        factor = tl.where(scale == 0, 1 << 22, scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        scaled = tl.reshape(value * 1.329227995784916e36, [n, k // 32, 32]) * factor[:, :, None]
        return round_bf16(tl.reshape(scaled, [n, k]))
    multiplier = ((scale.to(tl.int16) + 120) << 7).to(tl.bfloat16, bitcast=True)
    multiplier = tl.reshape(tl.broadcast_to(multiplier[:, :, None], [n, k // 32, 32]), [n, k])
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 low, high, sign;
        prmt.b32 low, $2, 0, 0x1404;
        prmt.b32 high, $2, 0, 0x3424;
        and.b32 sign, low, 0x80008000;
        and.b32 low, low, 0x7f007f00;
        shr.u32 low, low, 4;
        or.b32 low, low, sign;
        mul.rn.bf16x2 $0, low, $3;
        and.b32 sign, high, 0x80008000;
        and.b32 high, high, 0x7f007f00;
        shr.u32 high, high, 4;
        or.b32 high, high, sign;
        mul.rn.bf16x2 $1, high, $4;
        }""",
        "=r,=r,r,r,r",
        [data, multiplier],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _segment(x, data, scale, n, k_first, k_stop, depth, scale_columns, QUANTISED: tl.constexpr, ROWS: tl.constexpr,
             COLUMNS: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """float32 [COLUMNS, ROWS]: the sum over k_first <= k < k_stop. x, data and scale point at rows of tiles."""
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for k in range(k_first, k_stop, STEP):
        inside = k + tl.arange(0, STEP) < depth
        offsets = k + tl.arange(0, STEP)
        right = tl.load(x[None, :] + offsets[:, None], mask=inside[:, None], other=0.0)
        left = tl.load(data[:, None] + offsets[None, :], mask=inside[None, :], other=0)
        if QUANTISED:
            blocks = k // 32 + tl.arange(0, STEP // 32)
            factor = tl.load(scale[:, None] + blocks[None, :], mask=blocks[None, :] < scale_columns, other=0)
            left = dequantise(left, factor)
        total = dot(left, right, total)
    return total


@triton.jit
def _bounds(index, units, segments, depth):
    """First K of a segment, and the first after it."""
    first, stop = index * units // segments * _UNIT, (index + 1) * units // segments * _UNIT
    return first, tl.minimum(stop, depth)


@triton.jit
def _linear(x, data, scale, out, x_stride, rows, columns, depth, scale_columns, units, segments,
            QUANTISED: tl.constexpr, MERGED: tl.constexpr, ROUND: tl.constexpr, ROWS: tl.constexpr,
            COLUMNS: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """One tile of out [rows, groups * columns], or of partial sums float32 [segments, rows, groups * columns].

    grid  (tiles of rows, groups * tiles of columns, 1 if MERGED else segments)
    """
    tiles = tl.cdiv(columns, COLUMNS)
    group = tl.program_id(1) // tiles
    n = (tl.program_id(1) % tiles) * COLUMNS + tl.arange(0, COLUMNS)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # Lanes beyond the end repeat the last row: their sums are not stored.
    weight_row = group * columns + tl.minimum(n, columns - 1)
    x_rows = x + tl.minimum(r, rows - 1).to(tl.int64) * x_stride + group * depth
    data_rows = data + weight_row.to(tl.int64) * depth
    scale_rows = scale + weight_row // 32 * scale_columns
    width = columns * (tl.num_programs(1) // tiles)
    places = r[None, :].to(tl.int64) * width + (group * columns + n)[:, None]
    stored = (r < rows)[None, :] & (n < columns)[:, None]
    if MERGED:
        total = tl.zeros([COLUMNS, ROWS], tl.float32)
        for index in range(segments):
            first, stop = _bounds(index, units, segments, depth)
            total += _segment(x_rows, data_rows, scale_rows, n, first, stop, depth,
                              scale_columns, QUANTISED, ROWS, COLUMNS, STEP)  # fmt: skip
        tl.store(out + places, round_bf16(total) if ROUND else total.to(out.dtype.element_ty), mask=stored)
    else:
        first, stop = _bounds(tl.program_id(2), units, segments, depth)
        total = _segment(x_rows, data_rows, scale_rows, n, first, stop, depth,
                         scale_columns, QUANTISED, ROWS, COLUMNS, STEP)  # fmt: skip
        tl.store(out + tl.program_id(2).to(tl.int64) * rows * width + places, total, mask=stored)


@triton.jit(do_not_specialize=["size"])
def _merge(partial, out, size, segments, ROUND: tl.constexpr, BLOCK: tl.constexpr):
    """out [size] = the sum of partial float32 [segments, size] in the order of the segments."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    total = tl.zeros([BLOCK], tl.float32)
    for index in range(segments):
        total += tl.load(partial + index * size.to(tl.int64) + place, mask=inside, other=0.0)
    tl.store(out + place, round_bf16(total) if ROUND else total, mask=inside)


@triton.jit
def _cast_rows(x, out, x_stride, columns, BLOCK: tl.constexpr):
    """out bfloat16 [rows, columns], contiguous: Q8 of bfloat16 rows x, BLOCK columns per program."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row * x_stride + offsets, mask=offsets < columns, other=0.0).to(tl.float32)
    cast = tl.reshape(cast_q8(tl.reshape(value, [BLOCK // 32, 32]), 1), [BLOCK])
    tl.store(out + row * columns + offsets, round_bf16(cast), mask=offsets < columns)


def cast_rows(x: Tensor) -> Tensor:
    """Q8 of bfloat16 rows [R, n], dequantised; n is a multiple of 32."""
    rows, columns = x.shape
    out = torch.empty(rows, columns, dtype=torch.bfloat16, device=x.device)
    block = min(1024, triton.next_power_of_2(columns))
    _cast_rows[(rows, triton.cdiv(columns, block))](x, out, x.stride(0), columns, block, num_warps=4)
    return out


def linear(x: Tensor, weight: LinearWeight, cast: bool, round_out: bool, precision: Precision) -> Tensor:
    """x bfloat16 [R, groups * K], rows contiguous but not necessarily next to each other -> [R, groups * N]."""
    rows, width, depth = x.shape[0], weight.out_features, weight.depth
    out = torch.empty(rows, width, dtype=torch.bfloat16 if round_out else torch.float32, device=x.device)
    if rows == 0 or width == 0:
        return out
    if x.stride(1) != 1:
        x = x.contiguous()
    if cast:
        x = cast_rows(x)
    columns = width // weight.groups
    segments = segment_count(width, depth)
    tile_rows = 16 if rows <= 16 else 64 if rows <= 64 else 128
    tile_columns = 128 if columns > 64 else 64
    grid = triton.cdiv(rows, tile_rows), triton.cdiv(columns, tile_columns) * weight.groups
    merged = segments == 1 or grid[0] * grid[1] >= _MULTIPROCESSORS
    target = out if merged else torch.empty(segments, rows, width, dtype=torch.float32, device=x.device)
    scale = weight.scale if weight.scale is not None else weight.data
    _linear[(*grid, 1 if merged else segments)](
        x, weight.data, scale, target, x.stride(0), rows, columns, depth, scale.shape[1], triton.cdiv(depth, UNIT),
        segments, QUANTISED=weight.scale is not None, MERGED=merged, ROUND=round_out and merged,
        ROWS=tile_rows, COLUMNS=tile_columns, STEP=64, num_warps=8 if tile_rows == 128 else 4,
        num_stages=3 if tile_rows == 128 else 4,
    )  # fmt: skip
    if not merged:
        size = rows * width
        _merge[(triton.cdiv(size, 1024),)](target, out, size, segments, round_out, 1024, num_warps=4)
    return out
