"""RMS norm and rotation of single rows as numba helpers; the bits of the references."""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal_kernels.arith_nb import bf16, rsqrt, tree_sum
from shoal_kernels.jit import inline


@inline
def mean_square(x: Any, scratch: Any) -> Any:
    """Mean of x^2 over a vector; scratch reaches to the next power of two."""
    for i in range(x.shape[0]):
        scratch[i] = x[i] * x[i]
    return tree_sum(scratch, x.shape[0]) / np.float32(x.shape[0])


@inline
def norm_row(x: Any, weight: Any, eps: Any, scratch: Any, out: Any) -> None:
    """out = bf16(x * rsqrt(mean(x^2) + eps) * weight); out may be x."""
    factor = rsqrt(mean_square(x, scratch) + eps)
    for i in range(x.shape[0]):
        out[i] = bf16((x[i] * factor) * weight[i])


@inline
def rotate(x: Any, cos_sin: Any, inverse: Any, out: Any) -> None:
    """out = bf16 of x with its last dims rotated by one row of the table; out may be x."""
    frequencies = cos_sin.shape[0] // 2
    kept = x.shape[0] - 2 * frequencies
    for i in range(kept):
        out[i] = bf16(x[i])
    for i in range(frequencies):
        cos, sin = cos_sin[i], cos_sin[frequencies + i]
        sin = -sin if inverse else sin
        even, odd = x[kept + 2 * i], x[kept + 2 * i + 1]
        out[kept + 2 * i] = bf16(even * cos - odd * sin)
        out[kept + 2 * i + 1] = bf16(even * sin + odd * cos)
