"""Compiled casts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal_kernels.arith_nb import ONE, amax_bits, e2m1_magnitude, q4ue_scale_bits, q8_row, with_sign
from shoal_kernels.jit import float_of, kernel


@kernel("void(f4[:, ::1], f4[:, ::1])")
def _q8(x: Any, out: Any) -> None:
    for r in range(x.shape[0]):
        q8_row(x[r], out[r])


@kernel("void(f4[:, ::1], f4[:, ::1])")
def _q4ue(x: Any, out: Any) -> None:
    for r in range(x.shape[0]):
        for start in range(0, x.shape[1], 32):
            source, target = x[r, start : start + 32], out[r, start : start + 32]
            scale = float_of(q4ue_scale_bits(amax_bits(source, 0, 32)))
            inverse = ONE / scale
            for i in range(32):
                y = source[i] * inverse
                target[i] = with_sign(e2m1_magnitude(y), y) * scale


def cast_q8(x: Tensor) -> Tensor:
    """x [n, d] -> dequantised Q8."""
    out = torch.empty(x.shape)
    _q8(x.contiguous().numpy(), out.numpy())
    return out


def cast_q4ue(x: Tensor) -> Tensor:
    """x [n, d] -> dequantised Q4ue."""
    out = torch.empty(x.shape)
    _q4ue(x.contiguous().numpy(), out.numpy())
    return out
