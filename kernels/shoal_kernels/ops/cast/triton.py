# mypy: ignore-errors
"""Triton casts: one tile of groups per program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal_kernels.triton_lib import EXACT_OPTIONS, round_bf16
from shoal_kernels.triton_rows import q4ue_value, q8_value

_TILE_GROUPS = 64


@triton.jit(do_not_specialize=["groups"])
def _cast(x, out, groups, IS_FP4: tl.constexpr, TILE_GROUPS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * TILE_GROUPS
    group = tl.arange(0, TILE_GROUPS)[:, None]
    at = first * 32 + group * 32 + tl.arange(0, 32)[None, :]
    is_there = group < groups - first
    values = tl.load(x + at, mask=is_there, other=0.0).to(tl.float32)
    values = q4ue_value(values, 1) if IS_FP4 else q8_value(values, 1)
    tl.store(out + at, round_bf16(values), mask=is_there)


def _run(x: Tensor, is_fp4: bool) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    groups = x.numel() // 32
    if groups:
        _cast[(triton.cdiv(groups, _TILE_GROUPS),)](x, out, groups, is_fp4, _TILE_GROUPS, num_warps=4, **EXACT_OPTIONS)
    return out


def cast_q8(x: Tensor) -> Tensor:
    """x bfloat16 [n, d] -> dequantised Q8."""
    return _run(x, False)


def cast_q4ue(x: Tensor) -> Tensor:
    """x bfloat16 [n, d] -> dequantised Q4ue."""
    return _run(x, True)
