"""RMS norm and rotary embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal_kernels.checks import check_rows, check_values
from shoal_kernels.ops.norm_rope.rope_table import RopeTable, plain_rope_table, yarn_rope_table
from shoal_kernels.precision import Precision
from shoal_kernels.registry import resolve

__all__ = ["RopeTable", "plain_rope_table", "rms_norm", "rms_norm_rope", "rope", "yarn_rope_table"]


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, precision: Precision, backend: str | None = None) -> Tensor:
    """bf16(x * rsqrt(mean(x^2) + eps) * weight) per row; the mean is a pairwise tree.

    x        [R, D] in the precision's dtype; an all-zero row gives zeros
    weight   [D] float32
    returns  [R, D]
    raises   ValueError for shape or dtype
    exact    all implementations agree bit for bit
    source   specification of the model, section 5
    """
    check_values("x", x, None, weight.shape[0], precision=precision)
    check_rows("weight", weight, None, dtype=torch.float32)
    result: Tensor = resolve("rms_norm", x.device.type, precision, backend)(x, weight, eps, precision)
    return result


def rope(
    x: Tensor,
    positions: Tensor,
    table: RopeTable,
    *,
    inverse: bool = False,
    precision: Precision,
    backend: str | None = None,
) -> Tensor:
    """Rotate the last 2 * num_frequencies dims of every vector, interleaved pairs, by position; bf16 result.

    x          [R, d] or [R, heads, d] in the precision's dtype; the other dims are passed on unchanged
    positions  int64 [R], 0 <= position < table.max_positions
    inverse    rotate back (the conjugate)
    returns    same shape, a new tensor
    raises     ValueError for shape, dtype or a position outside the table
    exact      all implementations agree bit for bit
    source     specification of the model, section 7.1
    """
    if x.dim() not in (2, 3):
        raise ValueError(f"x must be [R, d] or [R, heads, d], got {list(x.shape)}")
    check_values("x", x, *([None] * x.dim()), precision=precision)
    check_rows("positions", positions, x.shape[0], dtype=torch.int64)
    cos_sin = table.cos_sin(positions, precision.dtype)
    if x.shape[-1] < 2 * table.num_frequencies:
        raise ValueError(f"x must have at least {2 * table.num_frequencies} dims, got {x.shape[-1]}")
    heads = x if x.dim() == 3 else x.unsqueeze(1)
    result: Tensor = resolve("rope", x.device.type, precision, backend)(heads, positions, cos_sin, inverse, precision)
    return result.reshape(x.shape)


def rms_norm_rope(
    x: Tensor,
    weight: Tensor,
    eps: float,
    positions: Tensor,
    table: RopeTable,
    *,
    precision: Precision,
    backend: str | None = None,
) -> Tensor:
    """rope(rms_norm(x)) in one pass: the path of window keys and index keys.

    x [R, D], weight float32 [D], positions int64 [R] -> [R, D]. Errors as the two. Exact: their bits, one by one.
    """
    check_values("x", x, None, weight.shape[0], precision=precision)
    check_rows("weight", weight, None, dtype=torch.float32)
    check_rows("positions", positions, x.shape[0], dtype=torch.int64)
    if x.shape[1] < 2 * table.num_frequencies:
        raise ValueError(f"x must have at least {2 * table.num_frequencies} dims, got {x.shape[1]}")
    cos_sin = table.cos_sin(positions, precision.dtype)
    result: Tensor = resolve("rms_norm_rope", x.device.type, precision, backend)(
        x, weight, eps, positions, cos_sin, precision
    )
    return result
