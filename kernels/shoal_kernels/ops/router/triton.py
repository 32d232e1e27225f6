# mypy: ignore-errors
"""Triton router: one row per program, k rounds of a maximum over (score, id) held in one integer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal_kernels.triton_lib import EXACT_OPTIONS
from shoal_kernels.triton_rows import softplus, tree_sum

MAX_CHOSEN = 64  # what `tree_sum` adds up
_MANY_ROWS = 512


@triton.jit
def _route(logits, logits_stride, bias, bias_stride, scale, ids, weights, K: tl.constexpr, PLACES: tl.constexpr,
           EXPERTS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    is_there = expert < EXPERTS
    z = tl.load(logits + row * logits_stride + expert, mask=is_there, other=0.0)
    b = tl.load(bias + row * bias_stride + expert, mask=is_there, other=0.0)
    biased = tl.math.sqrt_rn(softplus(z)) + b
    # NaN ranks first, as a sort has it. Adding 0 makes one zero of two.
    biased = tl.where(biased == biased, biased + 0.0, float("inf"))
    bits = biased.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - expert).to(tl.int64)
    LOWEST: tl.constexpr = -(1 << 63)
    key = tl.where(is_there, key, LOWEST)
    place = tl.arange(0, PLACES)
    chosen = tl.full([PLACES], 0, tl.int32)
    for i in tl.static_range(K):
        best = tl.max(key, 0)
        key = tl.where(key == best, LOWEST, key)
        chosen = tl.where(place == i, 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32), chosen)
    # The scores of the few are worked out again: cheaper than a sum over the row for each.
    is_place = place < K
    kept = tl.math.sqrt_rn(softplus(tl.load(logits + row * logits_stride + chosen, mask=is_place, other=0.0)))
    kept = tl.where(is_place, kept, 0.0)
    total = tree_sum(kept, PLACES) + 1e-20
    tl.store(ids + row * K + place, chosen, mask=is_place)
    tl.store(weights + row * K + place, tl.math.div_rn(kept, total) * scale, mask=is_place)


def route(logits: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    """logits, bias float32 [R, E] -> ids int32 [R, k], weights float32 [R, k]."""
    rows, experts = logits.shape
    if k > MAX_CHOSEN:
        raise ValueError(f"this kernel chooses {MAX_CHOSEN} experts at most, got k = {k}")
    logits, bias = (x if x.stride(1) == 1 else x.contiguous() for x in (logits, bias))
    ids = torch.empty(rows, k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, k, dtype=torch.float32, device=logits.device)
    if rows:
        given = logits, logits.stride(0), bias, bias.stride(0), scale, ids, weights
        sizes = k, triton.next_power_of_2(k), experts, triton.next_power_of_2(experts)
        # More warps are sooner done with a row, and do more work for it. No sum depends on them.
        num_warps = 4 if rows < _MANY_ROWS else 1
        _route[(rows,)](*given, *sizes, num_warps=num_warps, **EXACT_OPTIONS)
    return ids, weights
