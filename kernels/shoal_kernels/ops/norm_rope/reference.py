"""Plain torch RMS norm and rotary embedding; what is fused on accelerators, put together from the host's operations."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal_kernels import arith
from shoal_kernels.ops.cast import cast_q4ue, cast_q8
from shoal_kernels.precision import Precision
from shoal_kernels.registry import resolve
from shoal_kernels.row_formats import window_format


def rms_norm(x: Tensor, weight: Tensor, eps: float, precision: Precision) -> Tensor:
    """x [R, D], weight [D] -> [R, D]."""
    mean = arith.tree_sum(x * x) / x.shape[-1]
    return precision.bf16((x * arith.rsqrt(mean + eps)[:, None]) * weight)


def rope(
    x: Tensor, positions: Tensor, cos_sin: Tensor, inverse: bool, precision: Precision, in_place: bool = False
) -> Tensor:
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


def rms_norm_cast(x: Tensor, weight: Tensor, eps: float, precision: Precision) -> Tensor:
    """x [R, D], weight [D] -> [R, D]."""
    normed: Tensor = resolve("rms_norm", x.device.type, precision)(x, weight, eps, precision)
    return cast_q8(normed, precision=precision)


def rope_cast(x: Tensor, positions: Tensor, cos_sin: Tensor, precision: Precision) -> Tensor:
    """x [R, H, d], cos_sin [length, 2F] -> [R, H, d]."""
    rotated: Tensor = resolve("rope", x.device.type, precision)(x, positions, cos_sin, False, precision)
    return cast_q4ue(rotated, precision=precision)


def window_rows(
    x: Tensor,
    weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    out: Tensor | None,
    precision: Precision,
) -> Tensor:
    """x [R, D], weight [D], cos_sin [length, 2F] -> values [R, D]."""
    rotated: Tensor = resolve("rms_norm_rope", x.device.type, precision)(x, weight, eps, positions, cos_sin, precision)
    record = window_format(x.shape[1], precision)
    rows = record.decode(record.encode(rotated))
    return rows if out is None else out.copy_(rows)


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
    """both [R, Dq + D], weights [Dq] and [D] -> [R, Dq], values [R, D]."""
    split = query_weight.shape[0]
    latent = rms_norm_cast(both[:, :split], query_weight, eps, precision)
    return latent, window_rows(both[:, split:], window_weight, eps, positions, cos_sin, out, precision)
