"""Plain torch linear."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from shoal_kernels import arith
from shoal_kernels.ops.cast import cast_q8
from shoal_kernels.precision import Precision

if TYPE_CHECKING:
    from shoal_kernels.ops.linear import LinearWeight


def linear(x: Tensor, weight: LinearWeight, cast: bool, round_out: bool, precision: Precision) -> Tensor:
    """x [R, G*K], values [G, K, N] -> [R, G*N]."""
    data = weight.data
    if cast:
        x = cast_q8(x, precision=precision, backend="reference")
    y = arith.matmul(x.reshape(x.shape[0], data.shape[0], data.shape[1]), data).flatten(1)
    return precision.bf16(y) if round_out else y
