"""Compiled RMS norm and rotary embedding."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal_kernels.arith_nb import power_of_two
from shoal_kernels.jit import kernel
from shoal_kernels.norm_rope_nb import norm_row, rotate
from shoal_kernels.precision import Precision


@kernel("void(f4[:, ::1], f4[::1], f8, f4[:, ::1])")
def _norm(x: Any, weight: Any, eps: Any, out: Any) -> None:
    scratch = np.empty(power_of_two(x.shape[1]), np.float32)
    for r in range(x.shape[0]):
        norm_row(x[r], weight, np.float32(eps), scratch, out[r])


@kernel("void(f4[:, :, ::1], i8[::1], f4[:, ::1], b1, f4[:, :, ::1])")
def _rope(x: Any, positions: Any, cos_sin: Any, inverse: Any, out: Any) -> None:
    for r in range(x.shape[0]):
        for h in range(x.shape[1]):
            rotate(x[r, h], cos_sin[positions[r]], inverse, out[r, h])


@kernel("void(f4[:, ::1], f4[::1], f8, i8[::1], f4[:, ::1], f4[:, ::1])")
def _norm_rope(x: Any, weight: Any, eps: Any, positions: Any, cos_sin: Any, out: Any) -> None:
    scratch = np.empty(power_of_two(x.shape[1]), np.float32)
    for r in range(x.shape[0]):
        norm_row(x[r], weight, np.float32(eps), scratch, out[r])
        rotate(out[r], cos_sin[positions[r]], False, out[r])


def rms_norm(x: Tensor, weight: Tensor, eps: float, precision: Precision) -> Tensor:
    """x [R, D], weight [D] -> [R, D]."""
    out = torch.empty(x.shape)
    _norm(x.contiguous().numpy(), weight.contiguous().numpy(), eps, out.numpy())
    return out


def rope(
    x: Tensor, positions: Tensor, cos_sin: Tensor, inverse: bool, precision: Precision, in_place: bool = False
) -> Tensor:
    """x [R, H, d], cos_sin [length, 2F] -> [R, H, d]."""
    out = torch.empty(x.shape)
    _rope(x.contiguous().numpy(), positions.contiguous().numpy(), cos_sin.numpy(), inverse, out.numpy())
    return out


def rms_norm_rope(
    x: Tensor, weight: Tensor, eps: float, positions: Tensor, cos_sin: Tensor, precision: Precision
) -> Tensor:
    """x [R, D], weight [D], cos_sin [length, 2F] -> [R, D]."""
    out = torch.empty(x.shape)
    _norm_rope(
        x.contiguous().numpy(),
        weight.contiguous().numpy(),
        eps,
        positions.contiguous().numpy(),
        cos_sin.numpy(),
        out.numpy(),
    )
    return out
