"""Buckets and shares: the waiting times that they tell are promises."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal_gateway.edge.limits import Bucket, Share

RATES = st.one_of(st.integers(1, 10**9).map(float), st.floats(0.05, 1e9))
TIMES = st.floats(0.0, 1e7)


@given(RATES, TIMES, st.lists(st.tuples(st.floats(0.0, 100.0), st.floats(0.0, 3.0)), max_size=20))
def test_waiting_as_told_admits_and_waiting_less_does_not(
    per_minute: float, start_s: float, visits: list[tuple[float, float]]
) -> None:
    bucket, now_s = Bucket(per_minute, start_s), start_s
    for pause_s, part in visits:
        now_s += pause_s
        amount = part * per_minute
        wait_s = bucket.wait_s(amount, now_s)
        if wait_s > 0.01:
            assert bucket.wait_s(amount, now_s + wait_s * 0.99) > 0.0
        now_s += wait_s
        assert bucket.wait_s(amount, now_s) == 0.0
        bucket.take(amount, now_s)


@given(RATES, st.lists(st.tuples(st.floats(0.0, 30.0), st.floats(0.0, 2.0)), min_size=1, max_size=30))
def test_no_window_holds_more_than_its_limit_a_full_bucket_and_the_largest_piece(
    per_minute: float, visits: list[tuple[float, float]]
) -> None:
    bucket, now_s = Bucket(per_minute, 0.0), 0.0
    taken = []
    for pause_s, part in visits:
        now_s += pause_s
        amount = part * per_minute
        if not bucket.wait_s(amount, now_s):
            bucket.take(amount, now_s)
            taken.append((now_s, amount))
    largest = max((amount for _, amount in taken), default=0.0)
    for first in range(len(taken)):
        for last in range(first, len(taken)):
            window_s = taken[last][0] - taken[first][0]
            total = sum(amount for _, amount in taken[first : last + 1])
            assert total <= (per_minute * (1 + window_s / 60) + largest) * (1 + 1e-6)


def test_what_is_larger_than_the_bucket_goes_when_it_is_full_and_is_waited_off() -> None:
    bucket = Bucket(60.0, 0.0)
    assert bucket.wait_s(150.0, 0.0) == 0.0
    bucket.take(150.0, 0.0)
    assert bucket.wait_s(1.0, 0.0) == pytest.approx(91.0)
    assert bucket.wait_s(150.0, 0.0) == pytest.approx(150.0)


def test_what_is_given_back_never_makes_a_bucket_more_than_full() -> None:
    bucket = Bucket(60.0, 0.0)
    bucket.take(50.0, 0.0)
    bucket.take(-50.0, 30.0)
    assert bucket.left(30.0) == 60.0


def test_a_clock_that_jumps_back_fills_nothing_twice() -> None:
    bucket = Bucket(60.0, 100.0)
    bucket.take(60.0, 100.0)
    assert bucket.left(110.0) == pytest.approx(10.0)
    assert bucket.left(50.0) == pytest.approx(10.0)
    assert bucket.left(110.0) == pytest.approx(10.0)


def test_another_size_keeps_the_proportion_of_what_is_left_and_of_what_is_owed() -> None:
    bucket = Bucket(100.0, 0.0)
    bucket.take(40.0, 0.0)
    bucket.resize(50.0, 0.0)
    assert bucket.left(0.0) == pytest.approx(30.0)
    bucket.take(130.0, 0.0)
    bucket.resize(100.0, 0.0)
    assert bucket.wait_s(0.0, 0.0) == pytest.approx(120.0)


@given(st.integers(1, 10_000), st.integers(1, 64))
def test_shares_of_slots_add_up_to_the_limit_where_there_is_one_for_every_gateway(limit: int, count: int) -> None:
    shares = [Share(index, count).of_slots(limit) for index in range(count)]
    assert sum(shares) == max(limit, count)
    assert max(shares) - min(shares) <= 1


@given(st.integers(1, 10_000), st.integers(1, 64))
def test_shares_of_a_rate_add_up_to_the_limit(limit: int, count: int) -> None:
    assert sum(Share(index, count).of_rate(limit) for index in range(count)) == pytest.approx(limit)
