"""Step plans on their way to an accelerator: all index tensors in one pinned copy, without a stop of the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

_ALIGNMENT = 16


def ship(plan: T, device: torch.device) -> T:
    """`plan` (a dataclass of tensors, dataclasses and dicts) with every tensor on `device`; itself on the host.

    The copy is asynchronous: pinned memory is given back when it has been read.
    """
    if device.type == "cpu":
        return plan
    moved = iter(_copy_together(list(_tensors(plan)), device))
    result: T = _rebuilt(plan, moved)
    return result


def _copy_together(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    offsets, total = [], 0
    for tensor in tensors:
        offsets.append(total)
        total += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
    packed = torch.empty(total, dtype=torch.uint8, pin_memory=True)
    for tensor, offset in zip(tensors, offsets, strict=True):
        _view(packed, offset, tensor).copy_(tensor)
    there = packed.to(device, non_blocking=True)
    return [_view(there, offset, tensor) for tensor, offset in zip(tensors, offsets, strict=True)]


def _view(packed: Tensor, offset: int, like: Tensor) -> Tensor:
    size = like.numel() * like.element_size()
    return packed[offset : offset + size].view(like.dtype).view(like.shape)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))


def _rebuilt(value: Any, moved: Iterator[Tensor]) -> Any:
    """The same structure with its tensors replaced, in the order of `_tensors`."""
    if isinstance(value, Tensor):
        return next(moved)
    if isinstance(value, dict):
        return {key: _rebuilt(part, moved) for key, part in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _rebuilt(getattr(value, field.name), moved) for field in fields(value)})
    return value
