"""Casts of activations: the values that the quantised operand would have."""

from __future__ import annotations

from torch import Tensor

from shoal_kernels.precision import Precision
from shoal_kernels.registry import resolve


def cast_q8(x: Tensor, *, precision: Precision, backend: str | None = None) -> Tensor:
    """Q8 of x [..., n], dequantised: the operand of an FP8 or FP4 linear. The identity if activations are not cast.

    raises  ValueError for another dtype than the precision's, or if n is not a multiple of 32
    exact   all implementations agree bit for bit
    source  specification of the model, section 4
    """
    if not precision.cast_activations:
        return x
    return _cast("cast_q8", x, precision, backend)


def cast_q4ue(x: Tensor, *, precision: Precision, backend: str | None = None) -> Tensor:
    """Q4ue of x [..., n], dequantised: the index query. The identity if the cache is not cast.

    raises  ValueError for another dtype than the precision's, or if n is not a multiple of 32
    exact   all implementations agree bit for bit
    source  specification of the model, sections 4 and 7.4
    """
    if not precision.cast_cache:
        return x
    return _cast("cast_q4ue", x, precision, backend)


def _cast(op: str, x: Tensor, precision: Precision, backend: str | None) -> Tensor:
    if x.dim() == 0 or x.dtype != precision.dtype:
        raise ValueError(f"x must be {precision.dtype} [..., n], got {x.dtype} {list(x.shape)}")
    if x.shape[-1] % 32 or not x.shape[-1]:
        raise ValueError(f"the last axis must be a positive multiple of 32, got {x.shape[-1]}")
    result: Tensor = resolve(op, x.device.type, precision, backend)(x.reshape(-1, x.shape[-1]))
    return result.reshape(x.shape)
