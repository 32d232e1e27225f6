"""Acceptance of drafts against saying the same tokens one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal_engine.acceptance import StopRule, accept, end_after
from shoal_engine.events import FinishReason
from shoal_engine.requests import SamplingSpec

tokens = st.integers(0, 4)


@given(
    truth=st.lists(tokens, min_size=6, max_size=6),
    drafts=st.lists(tokens, max_size=5),
    stops=st.frozensets(tokens, max_size=2),
    minimum=st.integers(0, 6),
    maximum=st.integers(1, 12),
    count=st.integers(0, 5),
)
def test_a_verify_step_says_what_plain_decoding_says(
    truth: list[int], drafts: list[int], stops: frozenset[int], minimum: int, maximum: int, count: int
) -> None:
    rule = StopRule(stops, minimum, max(maximum, count + 1))
    # Rows after a wrong draft see another prefix: what they sample must not matter.
    right = next((i for i, d in enumerate(drafts) if d != truth[i]), len(drafts))
    sampled = truth[: right + 1] + [9] * (len(drafts) - right)
    outcome = accept(drafts, sampled, count, rule)

    plain: list[int] = []
    reason = None
    while len(plain) < right + 1 and reason is None:
        plain.append(truth[len(plain)])
        reason = end_after(plain[-1], count + len(plain), rule)
    assert sampled[: outcome.emitted] == plain
    assert outcome.finish_reason is reason
    # Rows that stay: the one before the drafts and one for each emitted draft.
    assert outcome.frontier == 1 + outcome.accepted
    assert outcome.accepted == min(len(plain), right)


def test_the_end_token_ends_unless_it_is_ignored() -> None:
    rule = StopRule.of(SamplingSpec(), eos_id=1, room=10)
    assert end_after(1, 1, rule) is FinishReason.STOP
    rule = StopRule.of(SamplingSpec(ignore_eos=True, stop_token_ids=frozenset({5})), eos_id=1, room=10)
    assert end_after(1, 1, rule) is None
    assert end_after(5, 1, rule) is FinishReason.STOP


def test_the_context_ends_before_max_tokens_when_it_is_shorter() -> None:
    assert StopRule.of(SamplingSpec(max_tokens=50), eos_id=1, room=10).max_tokens == 10
    assert StopRule.of(SamplingSpec(max_tokens=5), eos_id=1, room=10).max_tokens == 5
    assert StopRule.of(SamplingSpec(), eos_id=1, room=10).max_tokens == 10


def test_a_stop_token_at_the_limit_is_a_stop() -> None:
    assert end_after(1, 4, StopRule(frozenset({1}), 0, 4)) is FinishReason.STOP


@pytest.mark.parametrize("minimum", [0, 2])
def test_stops_below_min_tokens_do_not_end(minimum: int) -> None:
    rule = StopRule(frozenset({1}), minimum, 9)
    assert [end_after(1, count, rule) is FinishReason.STOP for count in (1, 2, 3)] == [c > minimum for c in (1, 2, 3)]
