"""Plain torch RMS norm and rotary embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal_kernels import arith
from shoal_kernels.precision import Precision


def rms_norm(x: Tensor, weight: Tensor, eps: float, precision: Precision) -> Tensor:
    """x [R, D], weight [D] -> [R, D]."""
    mean = arith.tree_sum(x * x) / x.shape[-1]
    return precision.bf16((x * arith.rsqrt(mean + eps)[:, None]) * weight)


def rope(x: Tensor, positions: Tensor, cos_sin: Tensor, inverse: bool, precision: Precision) -> Tensor:
    """x [R, H, d], cos_sin [length, 2F] -> [R, H, d]."""
    frequencies = cos_sin.shape[1] // 2
    angles = cos_sin[positions][:, None, :]  # [R, 1, 2F]
    cos, sin = angles[..., :frequencies], angles[..., frequencies:]
    if inverse:
        sin = -sin
    kept, rotated = x[..., : x.shape[-1] - 2 * frequencies], x[..., x.shape[-1] - 2 * frequencies :]
    even, odd = rotated[..., 0::2], rotated[..., 1::2]
    pairs = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return precision.bf16(torch.cat((kept, pairs), dim=-1))


def rms_norm_rope(
    x: Tensor, weight: Tensor, eps: float, positions: Tensor, cos_sin: Tensor, precision: Precision
) -> Tensor:
    """x [R, D], weight [D], cos_sin [length, 2F] -> [R, D]."""
    normed = rms_norm(x, weight, eps, precision)
    return rope(normed[:, None], positions, cos_sin, False, precision)[:, 0]
