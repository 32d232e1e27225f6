"""RMS norm and rotary embedding, alone and together with the casts that follow them.

On an accelerator x may be a column slice of a wider row-major tensor; nothing is copied then. There the bits of a row
depend on that row only, and against the host a rounding to bfloat16 may fall the other way (relative error below 1e-2
of the row's norm; where a cast follows, of the values before it).
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal_kernels.checks import check_rows, check_values
from shoal_kernels.ops.norm_rope.rope_table import RopeTable, plain_rope_table, yarn_rope_table
from shoal_kernels.precision import Precision
from shoal_kernels.registry import resolve
from shoal_kernels.row_formats import window_format

__all__ = [
    "RopeTable",
    "latents",
    "plain_rope_table",
    "rms_norm",
    "rms_norm_cast",
    "rms_norm_rope",
    "rope",
    "rope_cast",
    "window_rows",
    "yarn_rope_table",
]


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, precision: Precision, backend: str | None = None) -> Tensor:
    """bf16(x * rsqrt(mean(x^2) + eps) * weight) per row; the mean is a pairwise tree.

    x        [R, D] in the precision's dtype; an all-zero row gives zeros
    weight   [D] float32
    returns  [R, D]
    raises   ValueError for shape or dtype
    exact    all implementations on the host agree bit for bit; on an accelerator see above
    source   specification of the model, section 5
    """
    _check_norm(x, weight, precision)
    result: Tensor = resolve("rms_norm", x.device.type, precision, backend)(x, weight, eps, precision)
    return result


def rms_norm_cast(x: Tensor, weight: Tensor, eps: float, *, precision: Precision, backend: str | None = None) -> Tensor:
    """cast_q8(rms_norm(x)) in one pass: the input of an FP8 linear that is then called with cast=False.

    x [R, D], weight float32 [D] -> [R, D]. Errors as the two. Exact: on the host the bits of the two, one by one.
    """
    _check_norm(x, weight, precision)
    if precision.cast_activations and x.shape[1] % 32:
        raise ValueError(f"the last axis must be a multiple of 32, got {x.shape[1]}")
    result: Tensor = resolve("rms_norm_cast", x.device.type, precision, backend)(x, weight, eps, precision)
    return result


def rope(
    x: Tensor,
    positions: Tensor,
    table: RopeTable,
    *,
    inverse: bool = False,
    in_place: bool = False,
    precision: Precision,
    backend: str | None = None,
) -> Tensor:
    """Rotate the last 2 * num_frequencies dims of every vector, interleaved pairs, by position; bf16 result.

    x          [R, d] or [R, heads, d] in the precision's dtype; the other dims are passed on unchanged
    positions  int64 [R], 0 <= position < table.max_positions
    inverse    rotate back (the conjugate)
    in_place   the caller gives x up: an accelerator then touches the rotated dims only and returns x
    returns    same shape; a new tensor unless `in_place`
    raises     ValueError for shape, dtype or a position outside the table
    exact      all implementations on the host agree bit for bit; on an accelerator see above
    source     specification of the model, section 7.1
    """
    cos_sin = _check_rope(x, positions, table, precision)
    heads = x if x.dim() == 3 else x.unsqueeze(1)
    result: Tensor = resolve("rope", x.device.type, precision, backend)(
        heads, positions, cos_sin, inverse, precision, in_place
    )
    return result if x.dim() == 3 else result.squeeze(1)


def rope_cast(
    x: Tensor, positions: Tensor, table: RopeTable, *, precision: Precision, backend: str | None = None
) -> Tensor:
    """cast_q4ue(rope(x)) in one pass: index queries.

    x [R, heads, d], positions int64 [R] -> [R, heads, d]. Errors as the two. Exact: on the host the bits of the two.
    """
    check_values("x", x, None, None, None, precision=precision)
    if precision.cast_cache and x.shape[2] % 32:
        raise ValueError(f"the last axis must be a multiple of 32, got {x.shape[2]}")
    cos_sin = _check_rope(x, positions, table, precision)
    result: Tensor = resolve("rope_cast", x.device.type, precision, backend)(x, positions, cos_sin, precision)
    return result


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
    """rope(rms_norm(x)) in one pass.

    x [R, D], weight float32 [D], positions int64 [R] -> [R, D]. Errors as the two. Exact: on the host the bits of the
    two, one by one.
    """
    _check_norm(x, weight, precision)
    cos_sin = _check_rope(x, positions, table, precision)
    result: Tensor = resolve("rms_norm_rope", x.device.type, precision, backend)(
        x, weight, eps, positions, cos_sin, precision
    )
    return result


def window_rows(
    x: Tensor,
    weight: Tensor,
    eps: float,
    positions: Tensor,
    table: RopeTable,
    *,
    precision: Precision,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Window KV as the rings keep it: RMS norm, RoPE and Q8 in one pass.

    x, weight, positions  as in `rms_norm_rope`; D a multiple of 32 where the cache is cast
    out      [R, units], contiguous: where the rows go; None: a new tensor
    returns  uint8 [R, D + D / 32] records (data, then scales) where the precision keeps bytes; else the values that
             they stand for, [R, D] in the precision's dtype
    raises   ValueError for shape, dtype or a position outside the table
    exact    on the host the bits of rms_norm_rope, encoded and decoded; on an accelerator see above
    source   specification of the model, sections 4, 7.1 and 7.2
    """
    _check_norm(x, weight, precision)
    cos_sin = _check_rope(x, positions, table, precision)
    _check_window(x.shape[0], x.shape[1], out, precision)
    result: Tensor = resolve("window_rows", x.device.type, precision, backend)(
        x, weight, eps, positions, cos_sin, out, precision
    )
    return result


def latents(
    both: Tensor,
    query_weight: Tensor,
    window_weight: Tensor,
    eps: float,
    positions: Tensor,
    table: RopeTable,
    *,
    precision: Precision,
    out: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """rms_norm_cast of the first columns and window_rows of the others, in one pass: what follows wq_a | wkv.

    both           [R, Dq + D] in the precision's dtype
    query_weight   float32 [Dq]; window_weight  float32 [D]
    positions      int64 [R]; out as in `window_rows`
    returns        [R, Dq] and [R, units] as the two give them
    raises         ValueError for shape, dtype or a position outside the table
    exact          on the host the bits of the two; on an accelerator see above
    source         specification of the model, sections 4, 7.1 and 7.2
    """
    query_dim, dim = query_weight.shape[0], window_weight.shape[0]
    check_values("both", both, None, query_dim + dim, precision=precision)
    check_rows("query_weight", query_weight, None, dtype=torch.float32)
    check_rows("window_weight", window_weight, None, dtype=torch.float32)
    if precision.cast_activations and query_dim % 32:
        raise ValueError(f"the query latent must be a multiple of 32 wide, got {query_dim}")
    cos_sin = _check_rope(both[:, query_dim:], positions, table, precision)
    _check_window(both.shape[0], dim, out, precision)
    latent, rows = resolve("latents", both.device.type, precision, backend)(
        both, query_weight, window_weight, eps, positions, cos_sin, out, precision
    )
    return latent, rows


def _check_window(rows: int, dim: int, out: Tensor | None, precision: Precision) -> None:
    record = window_format(dim, precision)
    if out is None:
        return
    units = record.units if precision.keeps_bytes else dim
    dtype = record.storage_dtype if precision.keeps_bytes else precision.dtype
    check_rows("out", out, rows, units, dtype=dtype)
    if not out.is_contiguous():
        raise ValueError("out must be contiguous")


def _check_norm(x: Tensor, weight: Tensor, precision: Precision) -> None:
    check_values("x", x, None, weight.shape[0], precision=precision)
    check_rows("weight", weight, None, dtype=torch.float32)


def _check_rope(x: Tensor, positions: Tensor, table: RopeTable, precision: Precision) -> Tensor:
    """The table for `positions`, after the checks of a rotation."""
    if x.dim() not in (2, 3):
        raise ValueError(f"x must be [R, d] or [R, heads, d], got {list(x.shape)}")
    check_values("x", x, *([None] * x.dim()), precision=precision)
    check_rows("positions", positions, x.shape[0], dtype=torch.int64)
    if x.shape[-1] < 2 * table.num_frequencies:
        raise ValueError(f"x must have at least {2 * table.num_frequencies} dims, got {x.shape[-1]}")
    return table.cos_sin(positions, precision.wide)
