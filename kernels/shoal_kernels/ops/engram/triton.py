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
from shoal_kernels.triton_rows import aligned, from_e4m3, rsqrt, sigmoid

if TYPE_CHECKING:
    from shoal_kernels.ops.engram import EngramTable

_GATHER_TILE = 16
_GATE_PROGRAMS = 1024  # about two rounds of an H200
_GATE_WARPS = 8


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
def _load_part(streams, keys, value, at, DIM: tl.constexpr):
    is_there = at < DIM
    x, key = tl.load(streams + at, mask=is_there, other=0.0), tl.load(keys + at, mask=is_there, other=0.0)
    return x, key, tl.load(value + at, mask=is_there, other=0.0)


@triton.jit
def _sums(x, key, w):
    x, key = x.to(tl.float32), key.to(tl.float32)
    return tl.reduce(((x * w) * key, x * x, key * key), 0, _add_three)


@triton.jit
def _add_part(x, value, g, keep, out, at, DIM: tl.constexpr):
    x = x.to(tl.float32)
    mixed = x + g * value.to(tl.float32)
    tl.store(out + at, round_bf16(tl.where(keep, x, mixed)), mask=at < DIM)


@triton.jit(do_not_specialize=["rows", "rows_each"], do_not_specialize_on_alignment=["skip"])
def _gate(streams, kv, weight, skip, rms_eps, root, out, rows, rows_each, STREAMS: tl.constexpr, DIM: tl.constexpr,
          HEAD: tl.constexpr, TAIL: tl.constexpr):  # fmt: skip
    # One stream of some rows: its weight stays in registers. The streams of a row are neighbours in the grid, so its
    # value is read from memory once. All is loaded before the sums: an access behind them would wait for them.
    first, n = (tl.program_id(0) // STREAMS) * rows_each, tl.program_id(0) % STREAMS
    at, more_at = tl.arange(0, HEAD), HEAD + tl.arange(0, max(TAIL, 1))
    w = tl.load(weight + n * DIM + at, mask=at < DIM, other=0.0)
    more_w = tl.load(weight + n * DIM + more_at, mask=more_at < DIM, other=0.0)
    for i in range(0, min(rows_each, rows - first)):
        row = (first + i).to(tl.int64)
        place = (row * STREAMS + n) * DIM
        keys, value = kv + (row * (STREAMS + 1) + n) * DIM, kv + (row * (STREAMS + 1) + STREAMS) * DIM
        keep = tl.load(skip + row) != 0
        x, key, v = _load_part(streams + place, keys, value, at, DIM)
        if TAIL:
            more_x, more_key, more_v = _load_part(streams + place, keys, value, more_at, DIM)
        dot, x_square, key_square = _sums(x, key, w)
        if TAIL:
            more_dot, more_x_square, more_key_square = _sums(more_x, more_key, more_w)
            dot, x_square, key_square = dot + more_dot, x_square + more_x_square, key_square + more_key_square
        dot = dot * rsqrt(tl.math.div_rn(x_square, DIM * 1.0) + rms_eps)
        dot = dot * rsqrt(tl.math.div_rn(key_square, DIM * 1.0) + rms_eps)
        dot = dot * root
        magnitude = tl.math.sqrt_rn(tl.maximum(tl.abs(dot), 1e-6))
        g = sigmoid(tl.where(dot > 0, magnitude, tl.where(dot < 0, -magnitude, 0.0)))
        _add_part(x, v, g, keep, out + place, at, DIM)
        if TAIL:
            _add_part(more_x, more_v, g, keep, out + place, more_at, DIM)


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
        head = triton.next_power_of_2(dim + 1) // 2
        tail = triton.next_power_of_2(dim - head) if dim > head else 0
        rows_each = max(1, rows * n // _GATE_PROGRAMS)
        given = streams, kv, weight, skip, rms_eps, float(dim) ** -0.5, out, rows, rows_each
        num_warps = max(1, min(_GATE_WARPS, head // 512))
        _gate[(triton.cdiv(rows, rows_each) * n,)](*given, n, dim, head, tail, num_warps=num_warps, **EXACT_OPTIONS)
    return out
