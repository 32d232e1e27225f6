"""Periodic work of one host comes at the same moments."""

from __future__ import annotations

import pytest
from shoal_common.rhythm import until_next


@pytest.mark.parametrize("period_s", [0.5, 1.0, 10.0])
def test_everybody_wakes_at_multiples_of_the_period(period_s: float) -> None:
    for part in range(90):
        now_s = 1234 * period_s + part / 100 * period_s
        assert now_s + until_next(period_s, now_s) == pytest.approx(1235 * period_s)


def test_a_timer_that_came_early_does_not_come_twice() -> None:
    assert until_next(1.0, 99.98) == pytest.approx(1.02)


def test_the_pause_is_bounded_on_both_sides() -> None:
    for thousandth in range(2000):
        assert 0.1 <= until_next(1.0, thousandth / 1000) <= 1.1


def test_the_clock_is_the_hosts_own() -> None:
    assert 0.1 <= until_next(1.0) <= 1.1
