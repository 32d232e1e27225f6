from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal_common.retry_budget import RetryBudget


@given(st.lists(st.booleans(), max_size=200))
def test_retries_never_exceed_the_capacity_and_a_tenth_of_the_successes(outcomes: list[bool]) -> None:
    budget, retries, successes = RetryBudget(), 0, 0
    for is_success in outcomes:
        if is_success:
            budget.succeeded()
            successes += 1
        else:
            retries += budget.try_spend()
        assert 0 <= budget.tokens <= 10
        assert retries <= 10 + 0.1 * successes + 1e-6


def test_an_empty_budget_refuses_until_enough_calls_succeeded() -> None:
    budget = RetryBudget(capacity=1, earned_per_success=0.5)
    assert [budget.try_spend(), budget.try_spend()] == [True, False]
    budget.succeeded()
    assert not budget.try_spend()
    budget.succeeded()
    assert budget.try_spend()


def test_a_budget_without_room_for_one_retry_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity"):
        RetryBudget(capacity=0.5)
