"""rms_norm and rope: compiled bits equal the reference's; rows are independent."""

from __future__ import annotations

import pytest
import torch
from shoal_kernels import SERVED
from shoal_kernels.ops.norm_rope import RopeTable, plain_rope_table, rms_norm, rms_norm_rope, rope
from unit.shoal_kernels.parity import ROW_COUNTS, assert_rows_independent, assert_same_bits, normal, values


def _table() -> RopeTable:
    return plain_rope_table(16, 10000.0, 1 << 20)


@pytest.mark.parametrize("rows", ROW_COUNTS)
@pytest.mark.parametrize("size", [1, 48, 64, 100])
def test_norm_has_the_bits_of_the_reference(rows: int, size: int) -> None:
    x, weight = values(rows, size, seed=rows), normal(size, seed=2)
    got, want = (rms_norm(x, weight, 1e-20, precision=SERVED, backend=name) for name in ("cpu", "reference"))
    assert_same_bits(got, want)


@pytest.mark.parametrize("rows", ROW_COUNTS)
@pytest.mark.parametrize("inverse", [False, True])
def test_rope_has_the_bits_of_the_reference(rows: int, inverse: bool) -> None:
    positions = torch.arange(rows) * 997
    for shape in ((rows, 48), (rows, 3, 16)):
        x = values(*shape, seed=rows, bf16=False)
        got, want = (
            rope(x, positions, _table(), inverse=inverse, precision=SERVED, backend=name)
            for name in ("cpu", "reference")
        )
        assert_same_bits(got, want)


@pytest.mark.parametrize("rows", ROW_COUNTS)
def test_the_fused_pass_has_the_bits_of_the_two(rows: int) -> None:
    x, weight, positions = values(rows, 64, seed=rows), normal(64, seed=2), torch.arange(rows) * 31
    want = rope(rms_norm(x, weight, 1e-20, precision=SERVED), positions, _table(), precision=SERVED)
    for name in ("cpu", "reference"):
        assert_same_bits(rms_norm_rope(x, weight, 1e-20, positions, _table(), precision=SERVED, backend=name), want)


def test_rows_do_not_depend_on_their_batch() -> None:
    x, weight, positions = values(70, 64, seed=1), normal(64, seed=2), torch.arange(70) + 5
    assert_rows_independent(
        lambda rows: rms_norm_rope(x[rows], weight, 1e-20, positions[rows], _table(), precision=SERVED), 70
    )


def test_a_table_entry_does_not_depend_on_when_it_was_computed() -> None:
    early, late = _table(), _table()
    last = torch.tensor([9000])
    early.cos_sin(torch.tensor([3]), torch.float32)
    early.cos_sin(torch.tensor([4097]), torch.float32)
    first = early.cos_sin(last, torch.float32)
    second = late.cos_sin(last, torch.float32)
    shared = min(first.shape[0], second.shape[0])
    assert_same_bits(first[:shared], second[:shared])


def test_a_zero_row_stays_zero() -> None:
    assert_same_bits(rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-20, precision=SERVED), torch.zeros(2, 8))


def test_a_position_outside_the_table_is_refused() -> None:
    table = plain_rope_table(4, 10000.0, 10)
    with pytest.raises(ValueError, match=r"positions must be in \[0, 10\), got 10 \.\. 10"):
        rope(torch.zeros(1, 4), torch.tensor([10]), table, precision=SERVED)
