"""The released number formats as differentiable casts: the value is the stored one, the gradient passes straight through.

source  v41-flash.md section 4
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8_MAX, FP4_MAX = 448.0, 6.0
Q8_FLOOR, Q4UE_FLOOR, Q4NV_FLOOR = 1e-4, 6 * 2.0**-126, 6 * 2.0**-9


def power_of_two_ceil(x: Tensor) -> Tensor:
    """Smallest power of two >= x, for positive normal float32 x."""
    return ((x.view(torch.int32) + 0x007FFFFF) & 0x7F800000).view(torch.float32)


def round_e4m3(x: Tensor) -> Tensor:
    """float32 values rounded to e4m3, saturating."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).to(torch.float32)


def round_e2m1(x: Tensor) -> Tensor:
    """float32 values rounded to the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with their signs, ties to the even code."""
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.copysign((torch.round(size / step) * step).clamp(max=FP4_MAX), x)


def straight_through(x: Tensor, stored: Tensor) -> Tensor:
    """`stored` in the forward pass, the identity in the backward pass; exact, unlike x + (stored - x)."""
    return (x - x.detach()) + stored.detach().to(x.dtype)


def _grouped(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    groups = x.detach().float().unflatten(-1, (-1, size))
    return groups, groups.abs().amax(-1, keepdim=True)


def q8(x: Tensor) -> Tensor:
    """`Q8` on groups of 32 of the last axis."""
    groups, amax = _grouped(x, 32)
    scale = power_of_two_ceil(amax.clamp(min=Q8_FLOOR) / FP8_MAX)
    return straight_through(x, (round_e4m3(groups * (1 / scale)) * scale).flatten(-2))


def q4ue(x: Tensor) -> Tensor:
    """`Q4ue` on groups of 32 of the last axis."""
    groups, amax = _grouped(x, 32)
    scale = power_of_two_ceil(amax.clamp(min=Q4UE_FLOOR) / FP4_MAX)
    return straight_through(x, (round_e2m1(groups * (1 / scale)) * scale).flatten(-2))


def q4nv(x: Tensor) -> Tensor:
    """`Q4nv` on groups of 16 of the last axis."""
    groups, amax = _grouped(x, 16)
    scale = round_e4m3(amax.clamp(min=Q4NV_FLOOR) / FP4_MAX)
    return straight_through(x, (round_e2m1(groups * (1 / scale)) * scale).flatten(-2))


def block_scale(w: Tensor) -> Tensor:
    """Power-of-two scale of each 32 x 32 block of `w` [..., out, in] -> [..., out/32, in/32]."""
    blocks = w.detach().float().unflatten(-1, (-1, 32)).unflatten(-3, (-1, 32))  # [..., ob, 32, ib, 32]
    return power_of_two_ceil(blocks.abs().amax((-3, -1)).clamp(min=Q8_FLOOR) / FP8_MAX)


def fp8_weight(w: Tensor) -> Tensor:
    """A matrix as stored in FP8 with 32 x 32 block scales. Both sizes are multiples of 32."""
    scale = block_scale(w).repeat_interleave(32, -1).repeat_interleave(32, -2)
    return straight_through(w, round_e4m3(w.detach().float() / scale) * scale)


def fp8_rows(w: Tensor) -> Tensor:
    """An Engram table as stored in FP8 with a scale per row and 32 columns."""
    return q8(w)


def fp4_weight(w: Tensor) -> Tensor:
    """An expert matrix as stored in FP4 with a power-of-two scale per 32 inputs of each output."""
    return q4ue(w)
