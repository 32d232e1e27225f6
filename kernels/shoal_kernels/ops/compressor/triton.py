# mypy: ignore-errors
"""Triton pooling and storing of compressed entries: one entry per program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal_kernels.ops.records.triton import page_arguments
from shoal_kernels.paged_rows import PagedRows
from shoal_kernels.precision import Precision
from shoal_kernels.triton_lib import EXACT_OPTIONS
from shoal_kernels.triton_rows import (
    aligned,
    aligned_rows,
    bf16_value,
    exp,
    load_angles,
    load_pairs,
    norm_pairs,
    pairs_of,
    rotate_pairs,
    store_pairs,
    store_record,
)

_PLACES = ["members", "positions", "block_ids", "slots"]
_WARPS = 2


@triton.jit
def _pool(score_0, score_1, value_0, value_1):
    largest = tl.where(score_0 > score_1, score_0, score_1)
    first, second = exp(score_0 - largest), exp(score_1 - largest)
    total = first + second
    return bf16_value(tl.math.div_rn(first, total) * value_0 + tl.math.div_rn(second, total) * value_1)


@triton.jit
def _pool_pairs(score, score_member, score_row, value, value_member, value_row, out, DIM: tl.constexpr,
                PAIRS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    s, v = score + row * score_row, value + row * value_row
    s0_even, s0_odd = load_pairs(s, DIM, PAIRS)
    s1_even, s1_odd = load_pairs(s + score_member, DIM, PAIRS)
    v0_even, v0_odd = load_pairs(v, DIM, PAIRS)
    v1_even, v1_odd = load_pairs(v + value_member, DIM, PAIRS)
    even, odd = _pool(s0_even, s1_even, v0_even, v1_even), _pool(s0_odd, s1_odd, v0_odd, v1_odd)
    store_pairs(out + row * DIM, even, odd, DIM, PAIRS)


@triton.jit
def _member(raw, raw_steps, ring, kept, index, STEP: tl.constexpr, RATIO_DIM: tl.constexpr):
    """Address of one row of a group."""
    return tl.where(index < kept, ring + index * RATIO_DIM, raw + (index - kept) * raw_steps * STEP)


@triton.jit
def _store_entry(even, odd, cos, sin, block_id, slot, storage, block_units, data_offset, scale_offset,
                 DATA_STEP: tl.constexpr, SCALE_STEP: tl.constexpr, KIND: tl.constexpr, FREQUENCIES: tl.constexpr,
                 DIM: tl.constexpr, PAIRS: tl.constexpr):  # fmt: skip
    even, odd = rotate_pairs(even, odd, cos, sin, FREQUENCIES, DIM, PAIRS)
    block = storage + block_id * block_units
    data, scales = block + data_offset + slot * DATA_STEP, block + scale_offset + slot * SCALE_STEP
    store_record(even, odd, data, scales, KIND, DIM, PAIRS)


# Both kernels load everything before their sum: an access behind it would wait for it.
@triton.jit(do_not_specialize=["raw_steps", "kept", "count"], do_not_specialize_on_alignment=_PLACES)
def _store_main(raw, raw_steps, ring, kept, members, count, weight, eps, latent, positions, cos_sin, block_ids, slots,
                storage, block_units, data_offset, scale_offset, DATA_STEP: tl.constexpr, SCALE_STEP: tl.constexpr,
                KIND: tl.constexpr, FREQUENCIES: tl.constexpr, STEP: tl.constexpr, RATIO: tl.constexpr,
                DIM: tl.constexpr, PAIRS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first = _member(raw, raw_steps, ring, kept, tl.load(members + row), STEP, RATIO * DIM)
    position, block_id, slot = tl.load(positions + row), tl.load(block_ids + row), tl.load(slots + row)
    even_weight, odd_weight = load_pairs(weight, DIM, PAIRS)
    if RATIO == 1:
        even, odd = load_pairs(first, DIM, PAIRS)
        cos, sin = load_angles(cos_sin, position, FREQUENCIES, DIM, PAIRS)
        even, odd = bf16_value(even), bf16_value(odd)
    else:
        second = _member(raw, raw_steps, ring, kept, tl.load(members + count + row), STEP, RATIO * DIM)
        s0_even, s0_odd = load_pairs(first, DIM, PAIRS)
        v0_even, v0_odd = load_pairs(first + DIM, DIM, PAIRS)
        s1_even, s1_odd = load_pairs(second, DIM, PAIRS)
        v1_even, v1_odd = load_pairs(second + DIM, DIM, PAIRS)
        cos, sin = load_angles(cos_sin, position, FREQUENCIES, DIM, PAIRS)
        even, odd = _pool(s0_even, s1_even, v0_even, v1_even), _pool(s0_odd, s1_odd, v0_odd, v1_odd)
    even, odd = norm_pairs(even, odd, even_weight, odd_weight, eps, DIM)
    store_pairs(latent + row * DIM, even, odd, DIM, PAIRS)
    _store_entry(even, odd, cos, sin, block_id, slot, storage, block_units, data_offset, scale_offset,
                 DATA_STEP, SCALE_STEP, KIND, FREQUENCIES, DIM, PAIRS)  # fmt: skip


@triton.jit(do_not_specialize=["x_steps"], do_not_specialize_on_alignment=_PLACES)
def _store_key(x, x_steps, weight, eps, positions, cos_sin, block_ids, slots, storage, block_units, data_offset,
               scale_offset, DATA_STEP: tl.constexpr, SCALE_STEP: tl.constexpr, KIND: tl.constexpr,
               FREQUENCIES: tl.constexpr, STEP: tl.constexpr, DIM: tl.constexpr,
               PAIRS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    position, block_id, slot = tl.load(positions + row), tl.load(block_ids + row), tl.load(slots + row)
    even, odd = load_pairs(x + row * x_steps * STEP, DIM, PAIRS)
    even_weight, odd_weight = load_pairs(weight, DIM, PAIRS)
    cos, sin = load_angles(cos_sin, position, FREQUENCIES, DIM, PAIRS)
    even, odd = norm_pairs(even, odd, even_weight, odd_weight, eps, DIM)
    _store_entry(even, odd, cos, sin, block_id, slot, storage, block_units, data_offset, scale_offset,
                 DATA_STEP, SCALE_STEP, KIND, FREQUENCIES, DIM, PAIRS)  # fmt: skip


def pool_pairs(score: Tensor, value: Tensor, precision: Precision) -> Tensor:
    """score, value float32 [2, R, d] -> bfloat16 [R, d]."""
    _, rows, dim = score.shape
    out = torch.empty(rows, dim, dtype=torch.bfloat16, device=score.device)
    score, value = (x if x.stride(2) == 1 else x.contiguous() for x in (score, value))
    if rows:
        steps = (x for part in (score, value) for x in (part, part.stride(0), part.stride(1)))
        _pool_pairs[(rows,)](*steps, out, dim, pairs_of(dim), num_warps=_WARPS, **EXACT_OPTIONS)
    return out


def store_main(
    raw: Tensor,
    ring: Tensor,
    members: Tensor,
    weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    pages: PagedRows,
    block_ids: Tensor,
    slots: Tensor,
    precision: Precision,
) -> Tensor:
    """raw [rows, ratio*d], ring [P, ratio, d], members [ratio, n] -> latent bfloat16 [n, d]."""
    (ratio, count), dim = members.shape, weight.shape[0]
    latent = torch.empty(count, dim, dtype=torch.bfloat16, device=raw.device)
    if count:
        raw, steps, step = aligned_rows(raw)
        sources = raw, steps, aligned(ring), ring.shape[0], members.contiguous(), count
        places = positions.contiguous(), cos_sin, block_ids.contiguous(), slots.contiguous(), *page_arguments(pages)
        sizes = pages.format.kind.value, cos_sin.shape[1] // 2, step, ratio, dim, pairs_of(dim)
        _store_main[(count,)](*sources, weight, eps, latent, *places, *sizes, num_warps=_WARPS, **EXACT_OPTIONS)
    return latent


def store_key(
    x: Tensor,
    weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    pages: PagedRows,
    block_ids: Tensor,
    slots: Tensor,
    precision: Precision,
) -> None:
    """x bfloat16 [n, d] into the places (block_ids [n], slots [n])."""
    count, dim = x.shape
    if count:
        x, steps, step = aligned_rows(x)
        places = positions.contiguous(), cos_sin, block_ids.contiguous(), slots.contiguous(), *page_arguments(pages)
        sizes = pages.format.kind.value, cos_sin.shape[1] // 2, step, dim, pairs_of(dim)
        _store_key[(count,)](x, steps, weight, eps, *places, *sizes, num_warps=_WARPS, **EXACT_OPTIONS)
