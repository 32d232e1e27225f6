"""Argument checks shared by the operation contracts. Each raises ValueError and names the argument."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal_kernels.precision import Precision


def check_rows(name: str, tensor: Tensor, *sizes: int | None, dtype: torch.dtype) -> None:
    """Require `tensor` to have one axis per entry of `sizes` (None: any size) and the given dtype."""
    shape = tensor.shape
    if len(shape) != len(sizes) or any(
        want is not None and got != want for got, want in zip(shape, sizes, strict=True)
    ):
        want_text = ", ".join("*" if size is None else str(size) for size in sizes)
        raise ValueError(f"{name} must have shape [{want_text}], got {list(shape)}")
    if tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")


def check_values(name: str, tensor: Tensor, *sizes: int | None, precision: Precision) -> None:
    """`check_rows` for activations: the dtype is the precision's."""
    check_rows(name, tensor, *sizes, dtype=precision.dtype)


def check_range(name: str, value: int, low: int, high: int) -> None:
    """Require low <= value <= high."""
    if not low <= value <= high:
        raise ValueError(f"{name} must be in [{low}, {high}], got {value}")
