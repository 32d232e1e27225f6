"""Survival, budget and allocation: against brute force, and what must hold for any confidences."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from shoal_engine.verify import allocate, budget, survival

# Few values, so that ties are the rule.
CONFIDENCES = st.sampled_from([0.0, 0.1, 0.5, 0.5, 0.9, 1.0, 1.0])


@st.composite
def survivals(draw: st.DrawFn, most: int = 6, slots: int = 5) -> NDArray[np.float32]:
    choices, width = draw(st.integers(0, most)), draw(st.integers(1, slots))
    flat = draw(st.lists(CONFIDENCES, min_size=choices * width, max_size=choices * width))
    caps = draw(st.lists(st.integers(0, width), min_size=choices, max_size=choices))
    return survival(np.array(flat, dtype=np.float32).reshape(choices, width), np.array(caps, dtype=np.int64))


@st.composite
def costs(draw: st.DrawFn, count: int) -> NDArray[np.float64]:
    """A staircase: rises of nothing, a little or much."""
    rises = draw(st.lists(st.sampled_from([0.0, 0.0, 0.01, 0.3, 2.0]), min_size=count, max_size=count))
    return 1.0 + np.concatenate([[0.0], np.cumsum(rises)])


def naive_allocation(chances: NDArray[np.float32], drafts: int) -> list[int]:
    """Sort everything by the rule as it is written."""
    keys = sorted((-a, j, r) for r, row in enumerate(chances) for j, a in enumerate(row) if a > 0)
    taken = [r for _, _, r in keys[:drafts]]
    return [taken.count(r) for r in range(len(chances))]


@given(survivals())
def test_chances_fall_along_the_drafts_and_end_at_the_cap(chances: NDArray[np.float32]) -> None:
    assert (np.diff(chances, axis=1) <= 0).all()
    assert ((chances >= 0) & (chances <= 1)).all()


def test_chances_are_products_up_to_the_cap() -> None:
    found = survival(np.array([[0.5, 0.5, 0.5], [1.0, 0.25, 1.0]], dtype=np.float32), np.array([2, 3]))
    assert found.tolist() == [[0.5, 0.25, 0.0], [1.0, 0.25, 0.25]]


def test_a_hopeless_draft_counts_as_none() -> None:
    found = survival(np.array([[1e-4, 1e-4, 1.0]], dtype=np.float32), np.array([3]))
    assert found.tolist() == [[pytest.approx(1e-4), 0.0, 0.0]]


@given(survivals(), st.integers(-1, 40))
def test_the_allocation_is_the_rule_applied_by_sorting(chances: NDArray[np.float32], drafts: int) -> None:
    assert allocate(chances, drafts).tolist() == naive_allocation(chances, max(drafts, 0))


@given(survivals(), st.integers(0, 40))
def test_the_allocation_spends_the_budget_on_leading_drafts(chances: NDArray[np.float32], drafts: int) -> None:
    widths = allocate(chances, drafts)
    available = (chances > 0).sum(axis=1)
    assert (widths <= available).all()
    assert widths.sum() == min(drafts, available.sum())
    # Nothing left out is likelier than anything taken.
    taken = np.arange(chances.shape[1]) < widths[:, None]
    if taken.any() and (~taken).any():
        assert chances[taken].min() >= chances[~taken].max()


def test_ties_go_to_the_earlier_draft_and_then_to_the_lower_choice() -> None:
    certain = np.ones((3, 2), dtype=np.float32)
    assert [allocate(certain, k).tolist() for k in range(7)] == [
        [0, 0, 0],
        [1, 0, 0],
        [1, 1, 0],
        [1, 1, 1],
        [2, 1, 1],
        [2, 2, 1],
        [2, 2, 2],
    ]


def test_a_draft_that_ties_goes_before_a_later_one_of_another_choice() -> None:
    chances = survival(np.ones((3, 2), dtype=np.float32), np.array([2, 1, 2]))
    assert [allocate(chances, k).tolist() for k in (2, 3, 4)] == [[1, 1, 0], [1, 1, 1], [2, 1, 1]]


@given(st.data(), survivals(most=4, slots=3))
def test_the_budget_is_the_best_of_all_widths(data: st.DataObject, chances: NDArray[np.float32]) -> None:
    """Brute force over every combination of widths, not only over those that the allocation would choose."""
    choices, slots = chances.shape
    count = int(np.count_nonzero(chances))
    cost = data.draw(costs(count))
    found = budget(chances, choices, cost)
    if choices == 0:
        assert (found.drafts, found.rate) == (0, 0.0)
        return
    best = 0.0
    for widths in product(range(slots + 1), repeat=choices):
        taken = np.arange(slots) < np.array(widths)[:, None]
        if (chances[taken] > 0).all():
            tokens = choices + float(chances[taken].sum(dtype=np.float64))
            best = max(best, tokens / cost[int(taken.sum())])
    assert found.rate == pytest.approx(best, rel=1e-6)


@given(st.data(), survivals())
def test_a_budget_fills_its_tread_and_never_exceeds_the_drafts(
    data: st.DataObject, chances: NDArray[np.float32]
) -> None:
    count = int(np.count_nonzero(chances))
    cost = data.draw(costs(count))
    found = budget(chances, len(chances), cost)
    assert 0 <= found.drafts <= count
    if 0 < found.drafts < count:
        assert cost[found.drafts + 1] > cost[found.drafts]


def test_the_search_looks_past_a_tread() -> None:
    """Stopping at the first fall of the rate would verify nothing here."""
    chances = np.full((1, 4), 0.99, dtype=np.float32)
    cost = np.array([1.0, 2.5, 2.5, 2.5, 2.5])
    assert budget(chances, 1, cost).drafts == 4


def test_an_empty_batch_verifies_nothing() -> None:
    none = np.zeros((0, 5), dtype=np.float32)
    assert budget(none, 0, np.ones(1)).drafts == 0
    assert allocate(none, 3).tolist() == []
    assert allocate(np.zeros((3, 0), dtype=np.float32), 3).tolist() == [0, 0, 0]


@given(st.lists(CONFIDENCES, min_size=5, max_size=5), st.integers(1, 6))
def test_the_width_never_grows_with_the_load(confidences: list[float], more: int) -> None:
    """Each choice of a larger batch of the same texts gets at most what it gets in a smaller one, to one draft."""

    def mean_width(choices: int) -> float:
        chances = survival(
            np.tile(np.array(confidences, dtype=np.float32), (choices, 1)), np.full(choices, 5, dtype=np.int64)
        )
        count = int(np.count_nonzero(chances))
        cost = np.asarray(14.0 + 0.03 * (choices + np.arange(count + 1)), dtype=np.float64)
        return budget(chances, choices, cost).drafts / choices

    assert mean_width(8 * 2**more) <= mean_width(8) + 1e-9
