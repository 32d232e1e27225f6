"""pool_pairs: compiled bits equal the reference's; rows are independent."""

from __future__ import annotations

import pytest
import torch
from shoal_kernels import SERVED
from shoal_kernels.ops.compressor import pool_pairs
from unit.shoal_kernels.parity import ROW_COUNTS, assert_rows_independent, assert_same_bits, normal, values


@pytest.mark.parametrize("rows", ROW_COUNTS)
def test_pooling_has_the_bits_of_the_reference(rows: int) -> None:
    score = torch.stack([values(rows, 40, seed=s, bf16=False) for s in (1, 2)])
    value = torch.stack([values(rows, 40, seed=s, bf16=False) for s in (3, 4)])
    got, want = (pool_pairs(score, value, precision=SERVED, backend=name) for name in ("cpu", "reference"))
    assert_same_bits(got, want)


def test_equal_scores_give_the_mean() -> None:
    value = normal(2, 3, 32, seed=1).bfloat16().float()
    got = pool_pairs(torch.zeros(2, 3, 32), value, precision=SERVED)
    assert torch.equal(got, (value.sum(0) / 2).bfloat16().float())


def test_rows_do_not_depend_on_their_batch() -> None:
    score, value = normal(2, 70, 32, seed=1), normal(2, 70, 32, seed=2)
    assert_rows_independent(lambda rows: pool_pairs(score[:, rows], value[:, rows], precision=SERVED), 70)
