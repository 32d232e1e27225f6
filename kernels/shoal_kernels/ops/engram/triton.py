# mypy: ignore-errors
"""Triton Engram: dequantising of gathered rows, and the gate with one stream of one row at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal_kernels.precision import Precision
from shoal_kernels.triton_lib import EXACT_OPTIONS, decode_ue8m0, round_bf16
from shoal_kernels.triton_rows import aligned, from_e4m3, programs_at_once, row_parts, rsqrt, sigmoid

if TYPE_CHECKING:
    from shoal_kernels.ops.engram import EngramTable

_GATHER_TILE = 16
_GATE_STAGES = 3


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["rows"])
def _gather(data, scales, rows, out, count, DIM: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    row = tl.load(rows + place, mask=place < count, other=-1)[:, None]
    i, group = tl.arange(0, BLOCK)[None, :], tl.arange(0, BLOCK // 32)[None, :]
    values = tl.load(data + row * DIM + i, mask=(i < DIM) & (row >= 0), other=0)
    byte = tl.load(scales + row * (DIM // 32) + group, mask=(group < DIM // 32) & (row >= 0), other=127)
    scale = tl.reshape(decode_ue8m0(byte), [TILE, BLOCK // 32, 1])
    values = tl.reshape(from_e4m3(values), [TILE, BLOCK // 32, 32]) * scale
    values = tl.reshape(round_bf16(values), [TILE, BLOCK])
    tl.store(out + place[:, None] * DIM + i, values, mask=(i < DIM) & (place < count)[:, None])


@triton.jit
def _add_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _products(x, key, w):
    x, key = x.to(tl.float32), key.to(tl.float32)
    return (x * w) * key, x * x, key * key


@triton.jit
def _add_part(x, value, g, keep, out, mask):
    x = x.to(tl.float32)
    tl.store(out, round_bf16(tl.where(keep, x, x + g * value.to(tl.float32))), mask=mask)


@triton.jit(do_not_specialize=["rows", "rows_each"], do_not_specialize_on_alignment=["skip"])
def _gate(streams, kv, weight, skip, rms_eps, root, out, rows, rows_each, STREAMS: tl.constexpr, DIM: tl.constexpr,
          PARTS: tl.constexpr, SIZE: tl.constexpr, HAS_MORE: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    # One stream of some rows: its weight stays in registers. The streams of a row are neighbours in the grid, so its
    # value is read from memory once. A row is PARTS x SIZE values and perhaps SIZE more: 5120 is 4 x 1024 + 1024. Parts
    # are added thread by thread, which leaves one sum over SIZE. All is loaded before it, and of the next row, too.
    first, n = (tl.program_id(0) // STREAMS) * rows_each, tl.program_id(0) % STREAMS
    column = tl.arange(0, SIZE)
    at = tl.arange(0, PARTS)[:, None] * SIZE + column[None, :]
    more_at = PARTS * SIZE + column
    w = tl.load(weight + n * DIM + at, mask=at < DIM, other=0.0)
    if HAS_MORE:
        more_w = tl.load(weight + n * DIM + more_at, mask=more_at < DIM, other=0.0)
    for i in tl.range(0, min(rows_each, rows - first), num_stages=STAGES):
        row = (first + i).to(tl.int64)
        place = (row * STREAMS + n) * DIM
        keys, values = kv + (row * (STREAMS + 1) + n) * DIM, kv + (row * (STREAMS + 1) + STREAMS) * DIM
        keep = tl.load(skip + row) != 0
        x = tl.load(streams + place + at, mask=at < DIM, other=0.0)
        key = tl.load(keys + at, mask=at < DIM, other=0.0)
        value = tl.load(values + at, mask=at < DIM, other=0.0)
        dot, x_square, key_square = _products(x, key, w)
        dot, x_square, key_square = tl.sum(dot, 0), tl.sum(x_square, 0), tl.sum(key_square, 0)
        if HAS_MORE:
            more_x = tl.load(streams + place + more_at, mask=more_at < DIM, other=0.0)
            more_key = tl.load(keys + more_at, mask=more_at < DIM, other=0.0)
            more_value = tl.load(values + more_at, mask=more_at < DIM, other=0.0)
            more_dot, more_x_square, more_key_square = _products(more_x, more_key, more_w)
            dot, x_square, key_square = dot + more_dot, x_square + more_x_square, key_square + more_key_square
        dot, x_square, key_square = tl.reduce((dot, x_square, key_square), 0, _add_three)
        dot = dot * rsqrt(tl.math.div_rn(x_square, DIM * 1.0) + rms_eps)
        dot = dot * rsqrt(tl.math.div_rn(key_square, DIM * 1.0) + rms_eps)
        dot = dot * root
        magnitude = tl.math.sqrt_rn(tl.maximum(tl.abs(dot), 1e-6))
        g = sigmoid(tl.where(dot > 0, magnitude, tl.where(dot < 0, -magnitude, 0.0)))
        _add_part(x, value, g, keep, out + place + at, at < DIM)
        if HAS_MORE:
            _add_part(more_x, more_value, g, keep, out + place + more_at, more_at < DIM)


def _gate_warps(size: int) -> int:
    return max(1, min(8, size // 256))


def engram_gather(table: EngramTable, rows: Tensor, precision: Precision) -> Tensor:
    """rows [R, C], table on the same device -> bfloat16 [R, C * head_dim]."""
    count, dim = rows.numel(), table.data.shape[1]
    out = torch.empty(rows.shape[0], rows.shape[1] * dim, dtype=torch.bfloat16, device=rows.device)
    if count:
        block = triton.next_power_of_2(dim)
        given = table.data.contiguous(), table.scales.contiguous(), rows.contiguous(), out, count
        grid = (triton.cdiv(count, _GATHER_TILE),)
        _gather[grid](*given, dim, block, _GATHER_TILE, num_warps=4, **EXACT_OPTIONS)
    return out


def engram_gate(
    streams: Tensor, kv: Tensor, weight: Tensor, skip: Tensor, rms_eps: float, precision: Precision
) -> Tensor:
    """streams [R, N, D], kv [R, (N+1)*D], weight [N, D], skip [R] -> [R, N, D]."""
    rows, n, dim = streams.shape
    streams, kv, weight, skip = aligned(streams), aligned(kv), aligned(weight), skip.contiguous()
    out = torch.empty_like(streams)
    if rows:
        parts, size, has_more = row_parts(dim)
        rows_each = triton.cdiv(rows * n, programs_at_once(streams.device))
        given = streams, kv, weight, skip, rms_eps, float(dim) ** -0.5, out, rows, rows_each
        sizes = n, dim, parts, size, has_more, _GATE_STAGES
        _gate[(triton.cdiv(rows, rows_each) * n,)](*given, *sizes, num_warps=_gate_warps(size), **EXACT_OPTIONS)
    return out
