"""Kernels at released sizes give the same bits every time: a race shows as a run that differs from the others."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest
import torch
from support.on_device import DEVICE, needs_device
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), needs_device]

_RUNS = 12
_POISON_BYTES = 512 << 20


@pytest.mark.parametrize("module", ["experts", "sparse_attention", "linear", "indexer", "lm_head", "mhc"])
def test_every_run_of_a_kernel_gives_the_same_bits(module: str) -> None:
    different = []
    for case in importlib.import_module(f"bench.device_cases.{module}").cases():
        first: list[Tensor] = []
        for run in range(_RUNS):
            _poison(float("nan") if run % 2 else 1e30)
            got = list(_tensors(case.runs[0]()))
            if not first:
                first = [one.clone() for one in got]
            # Bytes, so that a NaN equals itself.
            elif not all(torch.equal(_bytes(one), _bytes(other)) for one, other in zip(first, got, strict=True)):
                different.append(f"{case.kernel}: {case.workload}, run {run}")
                break
        assert first, f"{case.kernel} returns nothing to compare"
    assert not different


def _poison(value: float) -> None:
    """Leaves `value` in memory that the next allocations take."""
    torch.full((_POISON_BYTES // 4,), value, dtype=torch.float32, device=DEVICE)


def _tensors(value: object) -> Iterator[Tensor]:
    """All tensors of a result, whatever holds them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from _tensors(getattr(value, name))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor
