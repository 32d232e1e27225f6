"""Frames against a naive model that keeps every token for ever."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule
from shoal_decode_worker.entries import FinishReason, RequestUsage, TokenEntry
from shoal_decode_worker.frames import Frames, FramesNotOpen, NextIndex, TooManyGateways
from shoal_decode_worker.ledger import MAX_UNACKNOWLEDGED, ChoiceLedger, RequestLedger

GATEWAY = "gateway"
STEP_TOKENS = 6


def frames(max_gateways: int = 4) -> Frames:
    return Frames(expiry_s=30.0, max_gateways=max_gateways, step_tokens=STEP_TOKENS)


def request(choices: int = 1, *, request_id: str = "r", attempt: int = 1, first_index: int = 0) -> RequestLedger:
    ledgers = [ChoiceLedger(first_index=first_index, is_finished=False) for _ in range(choices)]
    return RequestLedger(request_id=request_id, attempt=attempt, gateway_id=GATEWAY, choices=ledgers)


def entry(output_index: int, count: int, *, choice_index: int = 0, reason: FinishReason | None = None) -> TokenEntry:
    tokens = tuple(range(output_index, output_index + count))
    return TokenEntry(choice_index=choice_index, output_index=output_index, token_ids=tokens, finish_reason=reason)


def wants(next_index: int, choice_index: int = 0) -> list[NextIndex]:
    return [NextIndex(request_id="r", attempt=1, choice_index=choice_index, next_index=next_index)]


def indices(taken: list[tuple[RequestLedger, TokenEntry]]) -> list[int]:
    return [token for _, one in taken for token in one.token_ids]


class AgainstAListOfTokens(RuleBasedStateMachine):
    """One gateway, two choices. Token at output index i is i, so that every gap and repeat shows.

    The model: per choice what was emitted, and what the gateway holds (a prefix; streams lose what they carry when they
    break).
    """

    streams = Bundle("streams")

    @initialize(first_index=st.integers(0, 300))
    def start(self, first_index: int) -> None:
        self.frames = frames()
        self.request = request(2, first_index=first_index)
        self.first = first_index
        self.emitted = [first_index, first_index]
        self.ended = [False, False]
        self.held = [first_index, first_index]
        self.acked = [first_index, first_index]
        self.stream = 1
        self.wire: list[TokenEntry] = []
        self.frames.open_stream(GATEWAY, 1, [], 0.0)
        self.frames.add(self.request)

    @rule(choice=st.integers(0, 1), count=st.integers(1, STEP_TOKENS), is_end=st.booleans())
    def engine_steps(self, choice: int, count: int, is_end: bool) -> None:
        ledger = self.request.choices[choice]
        if self.ended[choice] or self.emitted[choice] + count > ledger.limit:
            return
        reason = FinishReason.STOP if is_end else None
        ledger.emit(entry(self.emitted[choice], count, choice_index=choice, reason=reason))
        assert self.frames.emitted(self.request) == (self.stream or None)
        self.emitted[choice] += count
        self.ended[choice] = is_end

    @precondition(lambda self: self.stream)
    @rule(max_tokens=st.integers(1, 40))
    def worker_writes(self, max_tokens: int) -> None:
        self.wire += [one for _, one in self.frames.take(GATEWAY, self.stream, max_tokens)]

    @rule()
    def gateway_reads(self) -> None:
        for one in self.wire:
            if one.output_index <= self.held[one.choice_index]:
                self.held[one.choice_index] = max(self.held[one.choice_index], one.next_index)
            else:
                raise AssertionError(f"gap: {one.output_index} after {self.held[one.choice_index]}")
        self.wire = []

    @rule(choice=st.integers(0, 1), back=st.integers(0, 10))
    def gateway_acknowledges(self, choice: int, back: int) -> None:
        index = max(self.first, self.held[choice] - back)
        self.frames.acknowledge(GATEWAY, wants(index, choice))
        self.acked[choice] = max(self.acked[choice], index)

    @precondition(lambda self: self.stream)
    @rule()
    def stream_breaks(self) -> None:
        self.frames.close_stream(GATEWAY, self.stream)
        self.wire = []
        self.stream = 0

    @rule(stream=st.integers(2, 1 << 30))
    def gateway_opens(self, stream: int) -> None:
        wanted = [one for choice in (0, 1) for one in wants(self.held[choice], choice)]
        self.frames.open_stream(GATEWAY, stream, wanted, 0.0)
        self.wire = []
        self.stream = stream
        self.acked = list(self.held)

    @rule(choice=st.integers(0, 1), back=st.integers(0, 10))
    def gateway_finishes(self, choice: int, back: int) -> None:
        index = max(self.first, self.held[choice] - back)
        before = self.request.choices[choice].end
        if before is not None and before.token_count <= index:
            return
        self.request.choices[choice].end_at(index, is_taken_over=True)
        self.wire = [one for one in self.wire if one.choice_index != choice]
        self.emitted[choice] = self.held[choice] = self.acked[choice] = index
        self.ended[choice] = True

    @invariant()
    def never_more_than_the_bound_is_kept(self) -> None:
        for choice, ledger in enumerate(self.request.choices):
            assert ledger.acknowledged == self.acked[choice]
            assert ledger.emitted == self.emitted[choice]
            assert ledger.emitted - ledger.acknowledged <= MAX_UNACKNOWLEDGED

    @invariant()
    def status_never_overtakes_tokens(self) -> None:
        self.request.usage = RequestUsage(prompt_tokens=1)
        everything = all(self.ended) and self.acked == self.emitted
        assert not self.request.is_settled or everything

    def teardown(self) -> None:
        """From any state: re-open, read and acknowledge everything, and the gateway has every token."""
        if not hasattr(self, "frames"):
            return
        for choice in (0, 1):
            if not self.ended[choice] and self.emitted[choice] < self.request.choices[choice].limit:
                self.engine_steps(choice, 1, True)
        self.gateway_opens(1 << 31)
        while taken := self.frames.take(GATEWAY, 1 << 31, 50):
            self.wire += [one for _, one in taken]
        self.gateway_reads()
        for choice in (0, 1):
            self.gateway_acknowledges(choice, 0)
        assert self.held == self.emitted
        if all(self.ended):
            assert self.request.is_settled


TestAgainstAListOfTokens = AgainstAListOfTokens.TestCase
TestAgainstAListOfTokens.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_request_of_a_gateway_without_a_stream_is_refused() -> None:
    with pytest.raises(FramesNotOpen):
        frames().add(request())


def test_a_choice_stops_at_256_unacknowledged_tokens() -> None:
    ledger = ChoiceLedger(first_index=10, is_finished=False)
    ledger.emit(entry(10, 256))
    assert ledger.limit == ledger.emitted == 266
    ledger.acknowledge(11)
    assert ledger.limit == 267


def test_a_paused_request_is_not_runnable() -> None:
    one = request()
    one.is_started = True
    one.choices[0].emit(entry(0, MAX_UNACKNOWLEDGED - STEP_TOKENS))
    assert one.is_runnable(STEP_TOKENS)
    one.choices[0].emit(entry(MAX_UNACKNOWLEDGED - STEP_TOKENS, 1))
    assert not one.is_runnable(STEP_TOKENS)


def test_a_request_that_waits_for_its_prompt_is_not_runnable() -> None:
    many = frames()
    many.open_stream(GATEWAY, 1, [], 0.0)
    one = request()
    many.add(one)
    assert many.runnable_count(GATEWAY) == 0
    one.is_started = True
    assert many.runnable_count(GATEWAY) == 1


def test_a_new_stream_replaces_the_old_one_which_then_gets_nothing() -> None:
    many = frames()
    many.open_stream(GATEWAY, 1, [], 0.0)
    one = request()
    many.add(one)
    one.choices[0].emit(entry(0, 5))
    many.emitted(one)
    replaced, _ = many.open_stream(GATEWAY, 2, wants(3), 1.0)
    assert replaced == 1
    assert many.take(GATEWAY, 1, 100) == []
    assert indices(many.take(GATEWAY, 2, 100)) == [3, 4]


def test_the_end_of_a_replaced_stream_changes_nothing() -> None:
    many = frames()
    many.open_stream(GATEWAY, 1, [], 0.0)
    many.open_stream(GATEWAY, 2, [], 0.0)
    many.close_stream(GATEWAY, 1)
    one = request()
    many.add(one)
    one.choices[0].emit(entry(0, 1))
    assert many.emitted(one) == 2


def test_a_silent_gateway_expires_with_its_stream_and_requests() -> None:
    many = frames()
    many.open_stream(GATEWAY, 1, [], 0.0)
    one = request()
    many.add(one)
    many.heard(GATEWAY, 5.0)
    assert many.expired(34.9).requests == ()
    gone = many.expired(35.0)
    assert (gone.stream_ids, gone.requests) == ((1,), (one,))


def test_a_gateway_without_stream_and_requests_is_forgotten() -> None:
    many = frames(max_gateways=1)
    many.open_stream(GATEWAY, 1, [], 0.0)
    with pytest.raises(TooManyGateways):
        many.open_stream("other", 2, [], 0.0)
    one = request()
    many.add(one)
    many.close_stream(GATEWAY, 1)
    with pytest.raises(TooManyGateways):
        many.open_stream("other", 2, [], 0.0)
    many.remove(one)
    many.open_stream("other", 2, [], 0.0)


def test_an_end_without_tokens_is_sent_once_and_needs_no_acknowledgement() -> None:
    one = request()
    one.choices[0].emit(entry(0, 0, reason=FinishReason.LENGTH))
    assert [each.finish_reason for each in one.take(10)] == [FinishReason.LENGTH]
    one.usage = RequestUsage(prompt_tokens=1)
    assert one.is_settled


def test_a_finish_without_frames_still_sends_the_tokens_below_it() -> None:
    one = request()
    one.choices[0].emit(entry(0, 5))
    one.choices[0].end_at(3, is_taken_over=False)
    assert [token for each in one.take(10) for token in each.token_ids] == [0, 1, 2]


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("others", [0, 1])
def test_what_a_full_frame_has_no_room_for_is_in_the_next(choices: int, others: int) -> None:
    many = frames()
    many.open_stream(GATEWAY, 1, [], 0.0)
    emitted = []
    for number in range(1 + others):
        one = request(choices, request_id=f"r{number}")
        many.add(one)
        for choice in range(choices):
            # Steps with drafts are not joined, so that several entries wait.
            for step in range(3):
                drafted = TokenEntry(choice_index=choice, output_index=2 * step, token_ids=(0, 0), drafted_count=1)
                one.choices[choice].emit(drafted)
                emitted.append((one.request_id, choice, 2 * step))
        many.emitted(one)
    taken: list[tuple[str, int, int]] = []
    while some := many.take(GATEWAY, 1, 3):
        taken += [(one.request_id, each.choice_index, each.output_index) for one, each in some]
    assert taken == emitted
