# mypy: ignore-errors
"""Triton RMS norm and rotary embedding. A norm takes one row per program, whatever the number of rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal_kernels.precision import Precision
from shoal_kernels.triton_lib import EXACT_OPTIONS, round_bf16
from shoal_kernels.triton_rows import (
    WINDOW,
    aligned_rows,
    bf16_value,
    load_angles,
    load_pairs,
    norm_pairs,
    pairs_of,
    q4ue_value,
    q8_value,
    rotate_pairs,
    row_parts,
    rsqrt,
    store_pairs,
    store_record,
)

_TILE_PAIRS = 2048


@triton.jit
def _norm_part(values, factor, gain, ROWS: tl.constexpr, SIZE: tl.constexpr, CAST: tl.constexpr):
    normed = bf16_value((values * factor) * gain)
    if CAST:
        normed = tl.reshape(q8_value(tl.reshape(normed, [ROWS, SIZE // 32, 32]), 2), [ROWS, SIZE])
    return round_bf16(normed)


@triton.jit
def _norm_row(source, weight, eps, target, DIM: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr,
              HAS_MORE: tl.constexpr, CAST: tl.constexpr):  # fmt: skip
    # A row is PARTS x SIZE values and perhaps SIZE more (`row_parts`). Parts are added thread by thread, which leaves
    # one sum over SIZE. All is loaded before it: an access behind it would wait for it.
    column = tl.arange(0, SIZE)[None, :]
    at, more_at = tl.arange(0, PARTS)[:, None] * SIZE + column, PARTS * SIZE + column
    values = tl.load(source + at, mask=at < DIM, other=0.0).to(tl.float32)
    gain = tl.load(weight + at, mask=at < DIM, other=0.0)
    squares = tl.sum(values * values, 0)
    if HAS_MORE:
        more = tl.load(source + more_at, mask=more_at < DIM, other=0.0).to(tl.float32)
        more_gain = tl.load(weight + more_at, mask=more_at < DIM, other=0.0)
        squares += tl.sum(more * more, 0)
    factor = rsqrt(tl.math.div_rn(tl.sum(squares, 0), DIM * 1.0) + eps)
    tl.store(target + at, _norm_part(values, factor, gain, PARTS, SIZE, CAST), mask=at < DIM)
    if HAS_MORE:
        tl.store(target + more_at, _norm_part(more, factor, more_gain, 1, SIZE, CAST), mask=more_at < DIM)


@triton.jit
def _norm_rope_row(source, weight, eps, position, cos_sin, out, row, UNITS: tl.constexpr, FREQUENCIES: tl.constexpr,
                   DIM: tl.constexpr, PAIRS: tl.constexpr, TO_RECORD: tl.constexpr):  # fmt: skip
    even, odd = load_pairs(source, DIM, PAIRS)
    even_weight, odd_weight = load_pairs(weight, DIM, PAIRS)
    cos, sin = load_angles(cos_sin, position, FREQUENCIES, DIM, PAIRS)
    even, odd = norm_pairs(even, odd, even_weight, odd_weight, eps, DIM)
    even, odd = rotate_pairs(even, odd, cos, sin, FREQUENCIES, DIM, PAIRS)
    target = out + row * UNITS
    if UNITS % 16 == 0:
        target = tl.multiple_of(target, 16)
    if TO_RECORD:
        store_record(even, odd, target, target + DIM, WINDOW, DIM, PAIRS)
    else:
        store_pairs(target, even, odd, DIM, PAIRS)


@triton.jit(do_not_specialize=["x_steps"])
def _norm(x, x_steps, weight, eps, out, STEP: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr,
          HAS_MORE: tl.constexpr, CAST: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    _norm_row(x + row * x_steps * STEP, weight, eps, out + row * DIM, DIM, PARTS, SIZE, HAS_MORE, CAST)


@triton.jit(do_not_specialize=["x_steps"], do_not_specialize_on_alignment=["positions", "out"])
def _norm_rope(x, x_steps, weight, eps, positions, cos_sin, out, UNITS: tl.constexpr, STEP: tl.constexpr,
               FREQUENCIES: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr,
               TO_RECORD: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row)
    _norm_rope_row(x + row * x_steps * STEP, weight, eps, position, cos_sin, out, row, UNITS, FREQUENCIES,
                   DIM, PAIRS, TO_RECORD)  # fmt: skip


@triton.jit(do_not_specialize=["x_steps"], do_not_specialize_on_alignment=["positions", "rows"])
def _latents(x, x_steps, query_weight, window_weight, eps, positions, cos_sin, latent, rows, STEP: tl.constexpr,
             QUERY_DIM: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr, HAS_MORE: tl.constexpr,
             CAST: tl.constexpr, UNITS: tl.constexpr, FREQUENCIES: tl.constexpr, DIM: tl.constexpr,
             PAIRS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    source = x + row * x_steps * STEP
    if tl.program_id(1) == 0:
        _norm_row(source, query_weight, eps, latent + row * QUERY_DIM, QUERY_DIM, PARTS, SIZE, HAS_MORE, CAST)
    else:
        position = tl.load(positions + row)
        _norm_rope_row(source + QUERY_DIM, window_weight, eps, position, cos_sin, rows, row, UNITS,
                       FREQUENCIES, DIM, PAIRS, True)  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["positions"])
def _rope(x, x_stride, positions, cos_sin, out, out_stride, heads, INVERSE: tl.constexpr, CAST: tl.constexpr,
          FREQUENCIES: tl.constexpr, FIRST: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr,
          HEADS: tl.constexpr):  # fmt: skip
    # HEADS vectors of one row, their values from FIRST on.
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, 2 * PAIRS)[None, :] + FIRST
    at, is_there = head * DIM + i, (head < heads) & (i < DIM)
    values = tl.load(x + row * x_stride + at, mask=is_there, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(values, [HEADS, PAIRS, 2]))
    pair = tl.arange(0, PAIRS) + (FIRST // 2 - (DIM // 2 - FREQUENCIES))
    is_rotated = (pair >= 0) & (pair < FREQUENCIES)
    angles = cos_sin + tl.load(positions + row) * (2 * FREQUENCIES) + pair
    cos = tl.load(angles, mask=is_rotated, other=1.0)[None, :]
    sin = tl.load(angles + FREQUENCIES, mask=is_rotated, other=0.0)[None, :]
    if INVERSE:
        new_even, new_odd = even * cos + odd * sin, odd * cos - even * sin
    else:
        new_even, new_odd = even * cos - odd * sin, even * sin + odd * cos
    is_rotated = is_rotated[None, :]
    even, odd = tl.where(is_rotated, new_even, even), tl.where(is_rotated, new_odd, odd)
    values = bf16_value(tl.reshape(tl.join(even, odd), [HEADS, 2 * PAIRS]))
    if CAST:
        groups = tl.reshape(values, [HEADS, PAIRS // 16, 32])
        values = tl.reshape(q4ue_value(groups, 2), [HEADS, 2 * PAIRS])
    tl.store(out + row * out_stride + at, round_bf16(values), mask=is_there)


def _rows(x: Tensor) -> Tensor:
    """x with the values of a row side by side; rows may be apart."""
    return x if x.shape[0] == 0 or x[:1].is_contiguous() else x.contiguous()


def _warps(size: int) -> int:
    return max(1, min(8, size // 512))


def _run_norm(x: Tensor, weight: Tensor, eps: float, cast: bool) -> Tensor:
    (x, steps, step), (rows, dim) = aligned_rows(x), x.shape
    out = torch.empty(rows, dim, dtype=torch.bfloat16, device=x.device)
    parts, size, has_more = row_parts(dim)
    if rows:
        sizes = step, dim, parts, size, has_more, cast
        _norm[(rows,)](x, steps, weight, eps, out, *sizes, num_warps=max(1, min(8, size // 256)), **EXACT_OPTIONS)
    return out


def _run_rope(x: Tensor, positions: Tensor, cos_sin: Tensor, inverse: bool, in_place: bool, cast: bool) -> Tensor:
    rows, heads, dim = x.shape
    x = _rows(x)
    out = x if in_place else torch.empty(rows, heads, dim, dtype=torch.bfloat16, device=x.device)
    if not (rows and heads):
        return out
    frequencies = cos_sin.shape[1] // 2
    first = dim - 2 * frequencies if in_place else 0
    pairs = max(16, triton.next_power_of_2(dim - first) // 2)
    tile = min(triton.next_power_of_2(heads), max(1, _TILE_PAIRS // pairs))
    _rope[(rows, triton.cdiv(heads, tile))](
        x,
        x.stride(0),
        positions.contiguous(),
        cos_sin,
        out,
        out.stride(0),
        heads,
        inverse,
        cast,
        frequencies,
        first,
        dim,
        pairs,
        tile,
        num_warps=_warps(tile * pairs * 2),
        **EXACT_OPTIONS,
    )
    return out


def _run_norm_rope(
    x: Tensor, weight: Tensor, eps: float, positions: Tensor, cos_sin: Tensor, out: Tensor, to_record: bool
) -> Tensor:
    (x, steps, step), (rows, dim) = aligned_rows(x), x.shape
    target = _placed(out)
    if rows:
        given = x, steps, weight, eps, positions.contiguous(), cos_sin, target
        sizes = out.shape[1], step, cos_sin.shape[1] // 2, dim, pairs_of(dim), to_record
        _norm_rope[(rows,)](*given, *sizes, num_warps=_warps(dim), **EXACT_OPTIONS)
    return out if target is out else out.copy_(target)


def _placed(out: Tensor) -> Tensor:
    """`out`, or another like it where the kernel could not rely on rows of 16 bytes being at addresses of 16 bytes."""
    return out if out.data_ptr() % 16 == 0 or out.shape[1] % 16 else torch.empty_like(out)


def rms_norm(x: Tensor, weight: Tensor, eps: float, precision: Precision) -> Tensor:
    """x [R, D], weight [D] -> [R, D]."""
    return _run_norm(x, weight, eps, False)


def rms_norm_cast(x: Tensor, weight: Tensor, eps: float, precision: Precision) -> Tensor:
    """x [R, D], weight [D] -> dequantised Q8 [R, D]."""
    return _run_norm(x, weight, eps, precision.cast_activations)


def rope(
    x: Tensor, positions: Tensor, cos_sin: Tensor, inverse: bool, precision: Precision, in_place: bool = False
) -> Tensor:
    """x [R, H, d], cos_sin [length, 2F] -> [R, H, d]."""
    return _run_rope(x, positions, cos_sin, inverse, in_place, False)


def rope_cast(x: Tensor, positions: Tensor, cos_sin: Tensor, precision: Precision) -> Tensor:
    """x [R, H, d], cos_sin [length, 2F] -> dequantised Q4ue [R, H, d]."""
    return _run_rope(x, positions, cos_sin, False, False, precision.cast_cache)


def rms_norm_rope(
    x: Tensor, weight: Tensor, eps: float, positions: Tensor, cos_sin: Tensor, precision: Precision
) -> Tensor:
    """x [R, D], weight [D], cos_sin [length, 2F] -> [R, D]."""
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    return _run_norm_rope(x, weight, eps, positions, cos_sin, out, False)


def window_rows(
    x: Tensor,
    weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    out: Tensor | None,
    precision: Precision,
) -> Tensor:
    """x [R, D], weight [D], cos_sin [length, 2F] -> records uint8 [R, D + D/32]."""
    rows, dim = x.shape
    if out is None:
        out = torch.empty(rows, dim + dim // 32, dtype=torch.uint8, device=x.device)
    return _run_norm_rope(x, weight, eps, positions, cos_sin, out, True)


def latents(
    both: Tensor,
    query_weight: Tensor,
    window_weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    out: Tensor | None,
    precision: Precision,
) -> tuple[Tensor, Tensor]:
    """both [R, Dq + D], weights [Dq] and [D] -> dequantised Q8 [R, Dq], records uint8 [R, D + D/32]."""
    (both, steps, step), rows = aligned_rows(both), both.shape[0]
    query_dim, dim = query_weight.shape[0], window_weight.shape[0]
    latent = torch.empty(rows, query_dim, dtype=torch.bfloat16, device=both.device)
    if out is None:
        out = torch.empty(rows, dim + dim // 32, dtype=torch.uint8, device=both.device)
    target = _placed(out)
    if rows:
        given = both, steps, query_weight, window_weight, eps, positions.contiguous(), cos_sin, latent, target
        parts = row_parts(query_dim)
        sizes = out.shape[1], cos_sin.shape[1] // 2, dim, pairs_of(dim)
        num_warps = max(1, min(8, parts[1] // 256), _warps(dim))
        _latents[(rows, 2)](
            *given, step, query_dim, *parts, precision.cast_activations, *sizes, num_warps=num_warps, **EXACT_OPTIONS
        )
    return latent, out if target is out else out.copy_(target)
