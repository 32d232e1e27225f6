"""The router on a device: the experts of the host, ties and NaN included."""

from __future__ import annotations

import pytest
import torch
from shoal_kernels import SERVED, SERVED_BF16
from shoal_kernels.ops.router import route
from support.on_device import DEVICE, assert_equal_bits, assert_rows_independent, needs_device
from torch import Tensor
from unit.shoal_kernels.device_rows import ROWS, SIZES_ALONE
from unit.shoal_kernels.parity import normal


def _logits(rows: int, experts: int) -> Tensor:
    z = normal(rows, experts, seed=rows + experts, scale=4.0)
    z[:, ::3] = z[:, :1]  # ties
    if rows > 4:
        z[1] = 0.0
        z[2] = -200.0
        z[3] *= 1e4
        z[4, 1] = float("nan")
    return z


@pytest.mark.parametrize(("rows", "experts", "k"), [(0, 8, 2), (1, 5, 5), (7, 8, 2), (6, 24, 6)])
@pytest.mark.parametrize("per_row", [False, True])
def test_the_choice_is_that_of_the_host(rows: int, experts: int, k: int, per_row: bool) -> None:
    _compare(rows, experts, k, per_row)


@needs_device
@pytest.mark.parametrize(("rows", "experts", "k"), [(1536, 384, 6), (4099, 128, 6)])
def test_the_choice_of_released_sizes_is_that_of_the_host(rows: int, experts: int, k: int) -> None:
    _compare(rows, experts, k, False)


def test_rows_do_not_depend_on_their_batch() -> None:
    z, bias = _logits(ROWS, 12).to(DEVICE), normal(12, seed=1).to(DEVICE)
    assert_rows_independent(lambda rows: route(z[rows], bias, 3, 1.5, precision=SERVED_BF16), ROWS, sizes=SIZES_ALONE)


def _compare(rows: int, experts: int, k: int, per_row: bool) -> None:
    z, bias = _logits(rows, experts), normal(experts, seed=1)
    bias[::4] = 0.0
    if per_row:
        bias = torch.where(torch.arange(rows)[:, None] % 2 == 0, bias, 0.0)
    ids, weights = route(z.to(DEVICE), bias.to(DEVICE), k, 2.5, precision=SERVED_BF16)
    want_ids, want_weights = route(z, bias, k, 2.5, precision=SERVED)
    assert_equal_bits(ids, want_ids)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.cpu(), want_weights, rtol=1e-6, atol=1e-30, equal_nan=True)
