"""Argument checks shared by the operation contracts. Each raises ValueError and names the argument."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal_kernels.precision import Precision


def check_rows(name: str, tensor: Tensor, *sizes: int | None, dtype: torch.dtype) -> None:
    """Require `tensor` to have one axis per entry of `sizes` (None: any size) and the given dtype."""
    shape = tensor.shape
    if tensor.dtype == dtype and len(shape) == len(sizes):
        for got, want in zip(shape, sizes, strict=True):
            if want is not None and got != want:
                break
        else:
            return
    want_text = ", ".join("*" if size is None else str(size) for size in sizes)
    raise ValueError(f"{name} must be {dtype} [{want_text}], got {tensor.dtype} {list(shape)}")


def check_values(name: str, tensor: Tensor, *sizes: int | None, precision: Precision) -> None:
    """`check_rows` for activations: the dtype is the precision's."""
    check_rows(name, tensor, *sizes, dtype=precision.dtype)


def check_wide(name: str, tensor: Tensor, *sizes: int | None, precision: Precision) -> None:
    """`check_rows` for values that are never rounded: the dtype is the precision's wide one."""
    check_rows(name, tensor, *sizes, dtype=precision.wide)


def check_range(name: str, value: int, low: int, high: int) -> None:
    """Require low <= value <= high."""
    if not low <= value <= high:
        raise ValueError(f"{name} must be in [{low}, {high}], got {value}")


def check_index(name: str, index: Tensor, low: int, stop: int) -> None:
    """Require low <= value < stop for every value: compiled kernels do not look again before they address memory.

    Only in host memory: on an accelerator the look would stall the step, and plans are checked before they go there.
    """
    if index.device.type == "cpu" and index.numel():
        lowest, highest = int(index.min()), int(index.max())
        if lowest < low or highest >= stop:
            raise ValueError(f"{name} must be in [{low}, {stop}), got {lowest} .. {highest}")
