"""Casts by way of the encoded bytes."""

from __future__ import annotations

from torch import Tensor

from shoal_kernels import formats


def cast_q8(x: Tensor) -> Tensor:
    """x [n, d] -> dequantised Q8, same dtype."""
    return formats.decode_q8(*formats.encode_q8(x)).to(x.dtype)


def cast_q4ue(x: Tensor) -> Tensor:
    """x [n, d] -> dequantised Q4ue, same dtype."""
    return formats.decode_q4ue(*formats.encode_q4ue(x)).to(x.dtype)
