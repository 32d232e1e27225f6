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

_GATE_PROGRAMS = 1024  # about two rounds of an H200
_GATE_WARPS = 8


@triton.jit
def _gather(data, scales, rows, out, DIM: tl.constexpr, BLOCK: tl.constexpr):
    # One table row per program.
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place)
    i = tl.arange(0, BLOCK)
    is_there = (i < DIM) & (row >= 0)
    values = from_e4m3(tl.load(data + row * DIM + i, mask=is_there, other=0))
    group = tl.arange(0, BLOCK // 32)
    byte = tl.load(scales + row * (DIM // 32) + group, mask=(group < DIM // 32) & (row >= 0), other=127)
    scale = tl.reshape(decode_ue8m0(byte), [BLOCK // 32, 1])
    values = tl.reshape(tl.reshape(values, [BLOCK // 32, 32]) * scale, [BLOCK])
    tl.store(out + place * DIM + i, round_bf16(values), mask=i < DIM)


@triton.jit
def _add_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _dot_part(streams, keys, w, at, DIM: tl.constexpr):
    is_there = at < DIM
    x = tl.load(streams + at, mask=is_there, other=0.0).to(tl.float32)
    key = tl.load(keys + at, mask=is_there, other=0.0).to(tl.float32)
    dot, x_square, key_square = tl.reduce(((x * w) * key, x * x, key * key), 0, _add_three)
    return x, dot, x_square, key_square


@triton.jit
def _add_part(x, value, g, keep, out, at, DIM: tl.constexpr):
    is_there = at < DIM
    v = tl.load(value + at, mask=is_there, other=0.0).to(tl.float32)
    tl.store(out + at, round_bf16(tl.where(keep, x, x + g * v)), mask=is_there)


@triton.jit(do_not_specialize=["rows", "rows_each"])
def _gate(streams, kv, weight, skip, rms_eps, root, out, rows, rows_each, STREAMS: tl.constexpr, DIM: tl.constexpr,
          HEAD: tl.constexpr, TAIL: tl.constexpr):  # fmt: skip
    # One stream of some rows: its weight stays in registers. The streams of a row are neighbours in the grid, so its
    # value is read from memory once.
    first, n = (tl.program_id(0) // STREAMS) * rows_each, tl.program_id(0) % STREAMS
    at, more_at = tl.arange(0, HEAD), HEAD + tl.arange(0, max(TAIL, 1))
    w = tl.load(weight + n * DIM + at, mask=at < DIM, other=0.0)
    more_w = tl.load(weight + n * DIM + more_at, mask=more_at < DIM, other=0.0)
    for i in range(0, min(rows_each, rows - first)):
        row = (first + i).to(tl.int64)
        place = (row * STREAMS + n) * DIM
        keys, value = kv + (row * (STREAMS + 1) + n) * DIM, kv + (row * (STREAMS + 1) + STREAMS) * DIM
        x, dot, x_square, key_square = _dot_part(streams + place, keys, w, at, DIM)
        if TAIL:
            more, dot_2, x_square_2, key_square_2 = _dot_part(streams + place, keys, more_w, more_at, DIM)
            dot, x_square, key_square = dot + dot_2, x_square + x_square_2, key_square + key_square_2
        dot = dot * rsqrt(tl.math.div_rn(x_square, DIM * 1.0) + rms_eps)
        dot = dot * rsqrt(tl.math.div_rn(key_square, DIM * 1.0) + rms_eps)
        dot = dot * root
        magnitude = tl.math.sqrt_rn(tl.maximum(tl.abs(dot), 1e-6))
        g = sigmoid(tl.where(dot > 0, magnitude, tl.where(dot < 0, -magnitude, 0.0)))
        keep = tl.load(skip + row) != 0
        _add_part(x, value, g, keep, out + place, at, DIM)
        if TAIL:
            _add_part(more, value, g, keep, out + place, more_at, DIM)


def engram_gather(table: EngramTable, rows: Tensor, precision: Precision) -> Tensor:
    """rows [R, C], table on the same device -> bfloat16 [R, C * head_dim]."""
    count, dim = rows.numel(), table.data.shape[1]
    out = torch.empty(rows.shape[0], rows.shape[1] * dim, dtype=torch.bfloat16, device=rows.device)
    if count:
        block = triton.next_power_of_2(dim)
        given = table.data.contiguous(), table.scales.contiguous(), rows.contiguous(), out
        _gather[(count,)](*given, dim, block, num_warps=1, **EXACT_OPTIONS)
    return out


def engram_gate(
    streams: Tensor, kv: Tensor, weight: Tensor, skip: Tensor, rms_eps: float, precision: Precision
) -> Tensor:
    """streams [R, N, D], kv [R, (N+1)*D], weight [N, D], skip [R] -> [R, N, D]."""
    rows, n, dim = streams.shape
    streams, kv, weight, skip = (aligned(x) for x in (streams, kv, weight, skip))
    out = torch.empty_like(streams)
    if rows:
        head = triton.next_power_of_2(dim + 1) // 2
        tail = triton.next_power_of_2(dim - head) if dim > head else 0
        rows_each = max(1, rows * n // _GATE_PROGRAMS)
        given = streams, kv, weight, skip, rms_eps, float(dim) ** -0.5, out, rows, rows_each
        num_warps = max(1, min(_GATE_WARPS, head // 512))
        _gate[(triton.cdiv(rows, rows_each) * n,)](*given, n, dim, head, tail, num_warps=num_warps, **EXACT_OPTIONS)
    return out
