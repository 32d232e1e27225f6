"""The start-up check passes here, and fails when a kernel lies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from shoal_kernels import SERVED, registry, self_test
from shoal_kernels.self_test import KernelMismatch


def test_it_passes_with_the_kernels_of_this_machine() -> None:
    self_test()


def test_a_kernel_with_other_bits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = registry.resolve("linear", "cpu", SERVED)

    def off_by_one_ulp(*arguments: Any) -> torch.Tensor:
        result: torch.Tensor = honest(*arguments)
        result.view(torch.int32)[0, 0] += 1 << 16
        return result

    monkeypatch.setitem(registry._chosen, ("linear", "cpu", "served", None), off_by_one_ulp)
    with pytest.raises(KernelMismatch, match="linear differs from its reference"):
        self_test()


def test_a_row_that_depends_on_its_batch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = registry.resolve("linear", "cpu", SERVED)

    def by_batch(*arguments: Any) -> torch.Tensor:
        result: torch.Tensor = honest(*arguments)
        return result if result.shape[0] == 7 else result * 2.0

    monkeypatch.setitem(registry._chosen, ("linear", "cpu", "served", None), by_batch)
    with pytest.raises(KernelMismatch, match="a row of linear depends on its batch"):
        self_test()
