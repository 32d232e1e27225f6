"""The fixed-order arithmetic: accuracy against float64, and numba against torch to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from shoal_kernels import arith, arith_nb
from shoal_kernels.jit import kernel
from unit.shoal_kernels.parity import assert_same_bits, values


@kernel("void(f4[::1], f4[:, ::1])", cached=False)
def _all_functions(x: np.ndarray, out: np.ndarray) -> None:
    for i in range(x.shape[0]):
        out[0, i] = arith_nb.exp(x[i])
        out[1, i] = arith_nb.log(abs(x[i]))
        out[2, i] = arith_nb.log1p(abs(x[i]))
        out[3, i] = arith_nb.sigmoid(x[i])
        out[4, i] = arith_nb.silu(x[i])
        out[5, i] = arith_nb.softplus(x[i])
        out[6, i] = arith_nb.rsqrt(abs(x[i]) + np.float32(1e-20))
        out[7, i] = arith_nb.bf16(x[i])


@kernel("f4(f4[::1], f4[::1], i8)", cached=False)
def _tree(x: np.ndarray, scratch: np.ndarray, count: int) -> np.float32:
    for i in range(count):
        scratch[i] = x[i]
    return arith_nb.tree_sum(scratch, count)  # type: ignore[no-any-return]


def _inputs() -> torch.Tensor:
    line = torch.linspace(-95.0, 95.0, 40001)
    special = torch.tensor([0.0, -0.0, 1e-38, -1e-38, 1e-45, 3e38, -3e38, torch.inf, -torch.inf, 88.0, -87.0, 1.0])
    return torch.cat((line, special, values(5000, seed=1, bf16=False), torch.logspace(-44, 38, 5000)))


def test_numba_and_torch_give_the_same_bits() -> None:
    x = _inputs()
    out = torch.empty(8, x.shape[0])
    _all_functions(x.numpy(), out.numpy())
    magnitude = x.abs()
    want = (
        arith.exp(x),
        arith.log(magnitude),
        arith.log1p(magnitude),
        arith.sigmoid(x),
        arith.silu(x),
        arith.softplus(x),
        arith.rsqrt(magnitude + 1e-20),
        x.to(torch.bfloat16).to(torch.float32),
    )
    for row, expected in enumerate(want):
        finite = ~expected.isnan()
        assert_same_bits(out[row][finite], expected[finite])
        assert bool(out[row][~finite].isnan().all())


def test_exp_and_log_are_accurate() -> None:
    x = torch.linspace(-86.9, 87.9, 100001)
    exact = torch.exp(x.double())
    assert float(((arith.exp(x) - exact).abs() / exact).max()) < 2e-7
    y = torch.logspace(-37, 38, 100001)
    assert float((arith.log(y) - torch.log(y.double())).abs().max()) < 8e-6
    near = torch.linspace(0.5, 2.0, 100001)
    error = (arith.log(near) - torch.log(near.double())).abs()
    assert float((error / torch.log(near.double()).abs().clamp_min(1e-3)).max()) < 3e-7
    z = torch.logspace(-20, 0, 1001)
    want = torch.log1p(z.double())
    assert float(((arith.log1p(z) - want).abs() / want).max()) < 4e-7


def test_exp_ends_at_zero_and_at_nan() -> None:
    got = arith.exp(torch.tensor([-torch.inf, -87.1, torch.nan]))
    assert got[:2].tolist() == [0.0, 0.0]
    assert bool(got[2].isnan())


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 31, 64, 100, 257])
def test_tree_sum_is_the_same_in_numba_and_with_more_padding(count: int) -> None:
    x = values(max(count, 1), seed=count, bf16=False)[:count]
    want = arith.tree_sum(x) if count else torch.tensor(0.0)
    scratch = np.empty(512, np.float32)
    assert_same_bits(torch.tensor(_tree(x.numpy(), scratch, count)), want)
    padded = torch.nn.functional.pad(x, (0, 1000))
    assert_same_bits(arith.tree_sum(padded), want)


def test_matmul_adds_products_in_ascending_order() -> None:
    x, w = values(5, 37, seed=2), values(37, 11, seed=3)
    want = torch.zeros(5, 11)
    for r in range(5):
        for n in range(11):
            total = torch.tensor(0.0)
            for k in range(37):
                total = total + x[r, k] * w[k, n]
            want[r, n] = total
    assert_same_bits(arith.matmul(x, w), want)
