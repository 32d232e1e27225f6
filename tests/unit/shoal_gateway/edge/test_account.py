"""What one key may have under way and use, on a clock of the test's own."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shoal_common.errors import QuotaExceeded
from shoal_gateway.edge.account import Account, Charge, Used
from shoal_gateway.edge.errors import (
    ConcurrencyExceeded,
    InputTokensPerMinute,
    OutputTokensPerMinute,
    RequestsPerMinute,
)
from shoal_gateway.edge.limits import Limits, Share


def account(share: Share | None = None, **limits: Any) -> Account:
    return Account(Limits(**limits), share or Share(), 0.0)


def admit(one: Account, *, input_tokens: int = 1, output_tokens: int = 1, now_s: float = 0.0) -> Charge:
    """As the edge does it: what is refused counts for nothing."""
    charge = one.enter(now_s)
    try:
        one.book(charge, input_tokens=input_tokens, output_tokens=output_tokens, now_s=now_s)
    except QuotaExceeded:
        one.refuse(charge, now_s)
        raise
    return charge


LIMITS = st.none() | st.integers(1, 1000)
REQUESTS = st.tuples(
    st.floats(0.0, 90.0),
    st.integers(0, 1200),
    st.integers(1, 1200),
    st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1)),
)


@settings(max_examples=150)
@given(LIMITS, LIMITS, LIMITS, st.floats(0, 1), st.integers(1, 7), st.lists(REQUESTS, max_size=15))
def test_whoever_waits_as_told_is_admitted(
    requests: int | None,
    inputs: int | None,
    outputs: int | None,
    weight: float,
    gateways: int,
    visits: list[tuple[float, int, int, tuple[float, float, float]]],
) -> None:
    one = account(
        Share(0, gateways),
        requests_per_minute=requests,
        input_tokens_per_minute=inputs,
        output_tokens_per_minute=outputs,
        cached_input_weight=weight,
    )
    now_s = 0.0
    for pause_s, input_tokens, output_tokens, (cached, used, ends) in visits:
        now_s += pause_s
        try:
            charge = admit(one, input_tokens=input_tokens, output_tokens=output_tokens, now_s=now_s)
        except QuotaExceeded as error:
            if error.retry_after_s is None:
                assert inputs is not None
                assert input_tokens > inputs
                continue
            # In whole seconds, as HTTP tells it.
            now_s += max(1, math.ceil(error.retry_after_s))
            charge = admit(one, input_tokens=input_tokens, output_tokens=output_tokens, now_s=now_s)
        if ends < 0.8:
            spent = Used(input_tokens, int(cached * input_tokens), int(used * output_tokens))
            one.end(charge, spent, now_s)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=40))
def test_what_is_under_way_is_counted_once_however_often_it_ends(steps: list[tuple[bool, int]]) -> None:
    one = account(max_concurrency=5)
    live: list[Charge] = []
    for is_new, index in steps:
        if is_new:
            try:
                live.append(one.enter(0.0))
            except ConcurrencyExceeded:
                assert one.in_flight == 5
        elif index < len(live):
            charge = live.pop(index)
            one.end(charge, Used(), 0.0)
            one.end(charge, Used(), 0.0)
            one.refuse(charge, 0.0)
        assert one.in_flight == len(live) <= 5


def test_without_limits_everything_is_admitted() -> None:
    one = account()
    for _ in range(1000):
        admit(one, input_tokens=10**6, output_tokens=10**6)
    assert not one.is_limited


def test_a_slot_is_held_to_the_end_and_the_wait_told_is_a_guess_within_bounds() -> None:
    one = account(max_concurrency=1)
    charge = one.enter(0.0)
    with pytest.raises(ConcurrencyExceeded) as refused:
        one.enter(0.0)
    assert 1.0 <= (refused.value.retry_after_s or 0.0) <= 60.0
    one.end(charge, Used(), 5.0)
    one.enter(5.0)


def test_requests_per_minute_refuse_the_one_after_and_tell_when_it_may_come() -> None:
    one = account(requests_per_minute=2)
    admit(one)
    admit(one)
    with pytest.raises(RequestsPerMinute) as refused:
        admit(one)
    assert refused.value.retry_after_s == pytest.approx(30.0)
    admit(one, now_s=30.0)


def test_the_wait_for_a_request_is_told_together_with_that_for_its_tokens() -> None:
    one = account(requests_per_minute=60, output_tokens_per_minute=60)
    for _ in range(60):
        admit(one, output_tokens=1)
    with pytest.raises(OutputTokensPerMinute) as refused:
        admit(one, output_tokens=30)
    assert refused.value.retry_after_s == pytest.approx(30.0)


def test_where_only_requests_are_limited_the_head_of_one_is_enough_to_refuse_it() -> None:
    one = account(requests_per_minute=1)
    one.enter(0.0)
    with pytest.raises(RequestsPerMinute):
        one.enter(0.0)
    assert one.in_flight == 1


def test_a_request_that_never_came_to_its_tokens_counts_as_one_all_the_same() -> None:
    one = account(requests_per_minute=1, input_tokens_per_minute=100)
    one.end(one.enter(0.0), Used(), 0.0)
    with pytest.raises(RequestsPerMinute):
        admit(one)


def test_a_request_that_another_limit_refuses_costs_no_request() -> None:
    one = account(requests_per_minute=1, input_tokens_per_minute=100)
    with pytest.raises(InputTokensPerMinute):
        admit(one, input_tokens=101)
    admit(one, input_tokens=100)


def test_a_prompt_over_the_limit_of_a_minute_is_never_admitted_and_no_wait_is_told() -> None:
    one = account(input_tokens_per_minute=100)
    with pytest.raises(InputTokensPerMinute) as refused:
        admit(one, input_tokens=101)
    assert refused.value.retry_after_s is None


def test_a_prompt_over_this_gateways_share_but_within_the_limit_is_admitted() -> None:
    one = account(Share(0, 4), input_tokens_per_minute=100)
    admit(one, input_tokens=80)
    with pytest.raises(InputTokensPerMinute) as refused:
        admit(one, input_tokens=1)
    # It owes 55 tokens at 25 a minute.
    assert refused.value.retry_after_s == pytest.approx(56 / 25 * 60)


def test_cached_input_counts_by_its_weight_from_when_it_is_known() -> None:
    one = account(input_tokens_per_minute=1000, cached_input_weight=0.1)
    charge = admit(one, input_tokens=1000)
    charge.used = lambda: Used(1000, 900, 3)
    with pytest.raises(InputTokensPerMinute):
        admit(one, input_tokens=700)
    assert admit(one, input_tokens=800, now_s=1.0)
    one.end(charge, Used(1000, 900, 3), 1.0)
    standing = one.standings(1.0).input
    assert standing is not None
    assert standing.remaining == 1000 - 800 - 190 + int(1000 / 60)


def test_output_is_reserved_and_what_was_not_used_is_given_back_at_the_end() -> None:
    one = account(output_tokens_per_minute=100)
    charge = admit(one, output_tokens=90)
    with pytest.raises(OutputTokensPerMinute) as refused:
        admit(one, output_tokens=90)
    assert refused.value.retry_after_s == pytest.approx(48.0)
    one.end(charge, Used(1, 0, 7), 0.0)
    with pytest.raises(OutputTokensPerMinute):
        admit(one, output_tokens=94)
    admit(one, output_tokens=93)


def test_output_beyond_its_reservation_is_owed_while_the_answer_still_runs() -> None:
    one = account(output_tokens_per_minute=100)
    charge = admit(one, output_tokens=10)
    charge.used = lambda: Used(1, 0, 400)
    with pytest.raises(OutputTokensPerMinute) as refused:
        admit(one, output_tokens=10, now_s=2.0)
    # 300 are owed, 10 wanted, and the two seconds since were filled in before.
    assert refused.value.retry_after_s == pytest.approx(310 * 0.6, rel=0.02)
    one.end(charge, Used(1, 0, 400), 2.0)
    with pytest.raises(OutputTokensPerMinute) as after:
        admit(one, output_tokens=10, now_s=2.0)
    assert after.value.retry_after_s == pytest.approx(refused.value.retry_after_s or 0.0)


def test_a_reservation_over_the_limit_is_the_limit() -> None:
    one = account(output_tokens_per_minute=100)
    admit(one, output_tokens=10**6)
    with pytest.raises(OutputTokensPerMinute):
        admit(one, output_tokens=1)


def test_of_two_limits_the_one_that_lasts_longer_is_named() -> None:
    one = account(input_tokens_per_minute=60, output_tokens_per_minute=60)
    admit(one, input_tokens=60, output_tokens=60)
    with pytest.raises(OutputTokensPerMinute):
        admit(one, input_tokens=10, output_tokens=20)
    with pytest.raises(InputTokensPerMinute):
        admit(one, input_tokens=20, output_tokens=10)


def test_what_nothing_was_done_for_counts_for_nothing() -> None:
    one = account(requests_per_minute=1, input_tokens_per_minute=100, output_tokens_per_minute=100)
    one.refuse(admit(one, input_tokens=100, output_tokens=100), 0.0)
    admit(one, input_tokens=100, output_tokens=100)


def test_another_gateway_halves_what_is_left_here_and_its_end_gives_it_back() -> None:
    one = account(requests_per_minute=60, max_concurrency=4)
    for _ in range(20):
        one.end(one.enter(0.0), Used(), 0.0)
    limits = Limits(requests_per_minute=60, max_concurrency=4)
    one.update(limits, Share(0, 2), 0.0)
    here = one.standings(0.0).requests
    assert here is not None
    assert (here.limit, here.remaining) == (60, 40)
    held = [one.enter(0.0), one.enter(0.0)]
    with pytest.raises(ConcurrencyExceeded):
        one.enter(0.0)
    one.update(limits, Share(0, 1), 0.0)
    assert len(held) == 2
    one.enter(0.0)
    after = one.standings(0.0).requests
    assert after is not None
    assert after.remaining == 40 - 4 - 1


def test_a_limit_may_come_and_go_while_requests_run() -> None:
    one = account()
    charge = admit(one, input_tokens=50)
    one.update(Limits(input_tokens_per_minute=100, requests_per_minute=1), Share(), 0.0)
    one.end(charge, Used(50, 0, 5), 0.0)
    admit(one, input_tokens=100)
    with pytest.raises(RequestsPerMinute):
        admit(one)
    one.update(Limits(), Share(), 0.0)
    admit(one, input_tokens=10**6)
