"""route: compiled bits equal the reference's; ties go to the lower expert."""

from __future__ import annotations

import pytest
import torch
from shoal_kernels import SERVED
from shoal_kernels.ops.router import route
from unit.shoal_kernels.parity import ROW_COUNTS, assert_rows_independent, assert_same_bits, normal, values


@pytest.mark.parametrize("rows", ROW_COUNTS)
@pytest.mark.parametrize(("experts", "k"), [(8, 2), (33, 6), (5, 5)])
def test_choice_and_weights_have_the_bits_of_the_reference(rows: int, experts: int, k: int) -> None:
    logits, bias = values(rows, experts, seed=rows), normal(experts, seed=2, scale=0.1).bfloat16().float()
    got, want = (route(logits, bias, k, 1.5, precision=SERVED, backend=name) for name in ("cpu", "reference"))
    assert_same_bits(got, want)


def test_ties_go_to_the_lower_expert() -> None:
    ids, weights = route(torch.zeros(1, 9), torch.zeros(9), 4, 1.0, precision=SERVED)
    assert ids.tolist() == [[0, 1, 2, 3]]
    assert weights.tolist() == [[0.25] * 4]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_no_number_still_chooses_different_experts(value: float) -> None:
    logits = torch.zeros(3, 8)
    logits[1] = value
    got, want = (
        route(logits, torch.zeros(8), 3, 1.0, precision=SERVED, backend=name)[0] for name in ("cpu", "reference")
    )
    assert got.tolist() == want.tolist() == [[0, 1, 2]] * 3


def test_rows_do_not_depend_on_their_batch() -> None:
    logits, bias = values(70, 12, seed=1), normal(70, 12, seed=2)
    assert_rows_independent(lambda rows: route(logits[rows], bias[rows], 3, 1.5, precision=SERVED), 70)


def test_more_experts_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match=r"k must be in \[1, 4\], got 5"):
        route(torch.zeros(1, 4), torch.zeros(4), 5, 1.0, precision=SERVED)
