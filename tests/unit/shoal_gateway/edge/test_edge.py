"""The door: who gets in, what a request carries from there, and what is on record when it leaves."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import pytest
from shoal.common.v1 import sampling_pb2
from shoal_common.api_keys import digest
from shoal_common.errors import Draining, Internal, InvalidArgument
from shoal_common.presence import Presence
from shoal_common.telemetry import Metrics
from shoal_gateway.edge.account import Standings
from shoal_gateway.edge.caller import Caller, Tell
from shoal_gateway.edge.edge import Edge
from shoal_gateway.edge.errors import (
    ConcurrencyExceeded,
    InputTokensPerMinute,
    InvalidApiKey,
    OutputTokensPerMinute,
    RequestsPerMinute,
)
from shoal_gateway.edge.keys import ApiKey
from shoal_gateway.edge.limits import Limits, Share
from shoal_gateway.edge.live import LiveGateways
from shoal_gateway.edge.usage import MAX_KEY_LABELS, OTHERS, UsageBook
from shoal_gateway.encode import Prepared

SECRET = "a-secret-that-is-long-enough"


def key(name: str = "alice", secret: str = SECRET, **more: Any) -> ApiKey:
    limits = Limits(**more.pop("limits", {}))
    return ApiKey(key_id=name, digests=(digest(secret.encode()),), tenant=f"{name}s", limits=limits, **more)


def prepared(prompt_tokens: int = 3, max_tokens: int = 10, choice_count: int = 1) -> Prepared:
    return Prepared(
        prompt_ids=[5] * prompt_tokens,
        params=sampling_pb2.SamplingParams(seed=1, max_tokens=max_tokens),
        choice_count=choice_count,
        user_id="u",
        output=None,
    )


@dataclass
class FakeAnswer:
    """What an answer tells of itself."""

    request_id: str = "r1"
    is_admitted: bool = True
    attempts: int = 1
    outcome: str = "ok"
    spent: sampling_pb2.Usage = field(
        default_factory=lambda: sampling_pb2.Usage(
            prompt_tokens=3, cached_prompt_tokens=2, completion_tokens=7, reasoning_tokens=1
        )
    )

    def usage(self) -> sampling_pb2.Usage:
        return self.spent


class Bench:
    def __init__(self, *keys: ApiKey, is_open: bool = False) -> None:
        self.metrics = Metrics()
        self.now_s = 0.0
        self.date_s = 1_000.0
        self.share = Share()
        self.edge = Edge(
            is_open=is_open,
            share=lambda: self.share,
            reservation=100,
            usage=UsageBook(self.metrics),
            clock=lambda: self.now_s,
            calendar=lambda: self.date_s,
            blind=b"b",
        )
        self.edge.use(keys)

    def enter(
        self, *, secret: str = SECRET, api: str = "chat", tell: Tell | None = None
    ) -> AbstractContextManager[Caller]:
        return self.edge.enter(self.edge.authenticate(secret.encode()), api=api, tell=tell)

    def visit(self, answer: FakeAnswer | None = None, *, secret: str = SECRET, **sizes: int) -> Prepared:
        """One request from its head to its end."""
        with self.enter(secret=secret) as caller:
            owned = caller.admit(prepared(**sizes))
            caller.follow(answer or FakeAnswer())
            return owned

    def shown(self, start: str) -> list[str]:
        lines = self.metrics.render().decode().splitlines()
        return [one.removeprefix("shoal_") for one in lines if one.startswith("shoal_" + start)]


def test_a_request_carries_the_tenant_and_the_priority_of_its_key() -> None:
    owned = Bench(key(priority=5)).visit()
    assert (owned.tenant, owned.priority, owned.user_id) == ("alices", 5, "u")


def test_with_keys_off_everyone_is_nobody_in_particular() -> None:
    bench = Bench(is_open=True)
    owned = bench.visit(secret="whatever")
    assert (owned.tenant, owned.priority) == ("", 0)
    assert 'key_requests_total{key="(none)",outcome="ok"} 1.0' in bench.shown("key_requests_total")


@pytest.mark.parametrize(
    "secret", ["wrong", "another-secret-long-enough", "old-secret-of-somebody", "expired-secret-of-bob"]
)
def test_a_key_that_is_wrong_was_taken_out_or_expired_is_refused_alike(secret: str) -> None:
    bench = Bench(key(), key("old", "old-secret-of-somebody"), key("bob", "expired-secret-of-bob", expires_s=999.0))
    bench.edge.use([key(), key("bob", "expired-secret-of-bob", expires_s=999.0)])
    with pytest.raises(InvalidApiKey) as refused:
        bench.visit(secret=secret)
    assert refused.value.message == "the API key is not valid"
    assert not refused.value.metadata
    assert bench.shown("unauthenticated_requests_total") == ["unauthenticated_requests_total 1.0"]


def test_a_request_without_a_key_is_told_how_to_bring_one() -> None:
    with pytest.raises(InvalidApiKey, match=r"Authorization: Bearer KEY.* or .x-api-key: KEY"):
        Bench(key()).edge.authenticate(b"")


def test_requests_under_way_go_on_when_their_key_is_taken_out() -> None:
    bench = Bench(key(limits={"max_concurrency": 1}))
    with bench.enter() as caller:
        bench.edge.use([])
        with pytest.raises(InvalidApiKey):
            bench.visit()
        caller.admit(prepared())
        caller.follow(FakeAnswer())
    bench.edge.use([key(limits={"max_concurrency": 1})])
    bench.visit()


def test_the_slot_of_a_key_that_came_back_is_still_taken_by_what_runs() -> None:
    bench = Bench(key(limits={"max_concurrency": 1}))
    with bench.enter():
        bench.edge.use([])
        bench.edge.use([key(limits={"max_concurrency": 1})])
        with pytest.raises(ConcurrencyExceeded):
            bench.visit()


@pytest.mark.parametrize("error", [InvalidArgument("bad"), KeyError("bug"), GeneratorExit(), None])
def test_however_a_request_leaves_its_slot_is_free_and_it_counts_as_one(error: BaseException | None) -> None:
    bench = Bench(key(limits={"max_concurrency": 1, "requests_per_minute": 2}))

    def leave() -> None:
        with bench.enter():
            if error is not None:
                raise error

    if error is None:
        leave()
    else:
        with pytest.raises(type(error)):
            leave()
    bench.visit()
    with pytest.raises(RequestsPerMinute):
        bench.visit()


def test_what_we_could_not_serve_counts_for_nothing() -> None:
    bench = Bench(key(limits={"requests_per_minute": 1, "output_tokens_per_minute": 100}))
    for _ in range(3):
        with pytest.raises(Draining), bench.enter():
            raise Draining("leaving")
        # A stream that had its status already ends without an exception.
        bench.visit(FakeAnswer(is_admitted=False, outcome="no_workers"))
    bench.visit(max_tokens=100)


def test_an_admitted_answer_counts_what_it_used_however_it_ended() -> None:
    bench = Bench(key(limits={"output_tokens_per_minute": 100}))
    bench.visit(FakeAnswer(outcome="cancelled"), max_tokens=100)
    bench.visit(FakeAnswer(outcome="too_many_attempts", attempts=3), max_tokens=93)
    bench.visit(FakeAnswer(), max_tokens=86)
    with pytest.raises(OutputTokensPerMinute):
        bench.visit(max_tokens=80)


def test_an_error_that_only_the_client_heard_of_is_the_outcome_on_record(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(key())
    with caplog.at_level(logging.INFO), bench.enter() as caller:
        caller.admit(prepared())
        caller.follow(FakeAnswer(outcome="cancelled"))
        caller.failed(Internal("unexpected"))
    assert [one.__dict__["outcome"] for one in caplog.records] == ["internal"]


def test_every_choice_reserves_its_tokens_up_to_the_reservation() -> None:
    bench = Bench(key(limits={"output_tokens_per_minute": 1000}))
    with bench.enter() as caller:
        caller.admit(prepared(choice_count=8, max_tokens=10**6))
        with pytest.raises(OutputTokensPerMinute):
            bench.visit(choice_count=3, max_tokens=70)
        bench.visit(choice_count=2, max_tokens=100)


def test_all_prompts_of_a_body_are_booked_together_and_carry_the_key() -> None:
    bench = Bench(key(limits={"input_tokens_per_minute": 10}))
    with pytest.raises(InputTokensPerMinute), bench.enter() as caller:
        caller.admit_all([prepared(6), prepared(5)])
    with bench.enter() as caller:
        owned = caller.admit_all([prepared(5), prepared(5)])
    assert [one.tenant for one in owned] == ["alices", "alices"]


def test_all_prompts_of_a_body_are_one_request_whose_tokens_are_booked_together() -> None:
    bench = Bench(key(limits={"requests_per_minute": 1, "input_tokens_per_minute": 10}, priority=2))
    with pytest.raises(InputTokensPerMinute), bench.enter() as caller:
        caller.admit_all([prepared(prompt_tokens=6), prepared(prompt_tokens=5)])
    with bench.enter() as caller:
        owned = caller.admit_all([prepared(prompt_tokens=6), prepared(prompt_tokens=4)])
    assert [(one.tenant, one.priority) for one in owned] == [("alices", 2)] * 2


def test_one_line_and_the_metrics_say_what_was_used(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(key())
    with caplog.at_level(logging.INFO), bench.enter(api="messages") as caller:
        caller.admit(prepared())
        caller.follow(FakeAnswer(attempts=2, outcome="cancelled"))
        bench.now_s += 1.5
    (line,) = caplog.records
    said = {name: value for name, value in vars(line).items() if name not in vars(logging.makeLogRecord({}))}
    said.pop("message", None)
    assert line.getMessage() == "usage"
    assert said == {
        "request_id": "r1",
        "key": "alice",
        "api": "messages",
        "outcome": "cancelled",
        "attempts": 2,
        "duration_s": 1.5,
        "prompt_tokens": 3,
        "cached_prompt_tokens": 2,
        "completion_tokens": 7,
        "reasoning_tokens": 1,
    }
    assert set(bench.shown("key_tokens_total")) == {
        'key_tokens_total{key="alice",kind="input"} 1.0',
        'key_tokens_total{key="alice",kind="cached_input"} 2.0',
        'key_tokens_total{key="alice",kind="output"} 7.0',
    }


def test_refusals_are_counted_by_their_reason() -> None:
    bench = Bench(key(limits={"requests_per_minute": 1, "input_tokens_per_minute": 10}))
    with pytest.raises(InputTokensPerMinute):
        bench.visit(prompt_tokens=11)
    bench.visit()
    with pytest.raises(RequestsPerMinute):
        bench.visit()
    assert set(bench.shown("key_refusals_total")) == {
        'key_refusals_total{key="alice",reason="input_tokens_per_minute"} 1.0',
        'key_refusals_total{key="alice",reason="requests_per_minute"} 1.0',
    }


def test_labels_of_keys_are_bounded() -> None:
    bench = Bench(*(key(f"k{index}", f"secret-number-{index}-of-many") for index in range(MAX_KEY_LABELS + 5)))
    for index in range(MAX_KEY_LABELS + 5):
        bench.visit(secret=f"secret-number-{index}-of-many")
    shown = bench.shown("key_requests_total")
    assert len(shown) == MAX_KEY_LABELS + 1
    assert f'key_requests_total{{key="{OTHERS}",outcome="ok"}} 5.0' in shown


def test_the_limits_are_told_when_they_change_and_when_they_refuse() -> None:
    bench = Bench(key(limits={"requests_per_minute": 2, "input_tokens_per_minute": 10}))
    told: list[Standings] = []
    with bench.enter(tell=told.append) as caller:
        caller.admit(prepared(prompt_tokens=4))
        caller.follow(FakeAnswer())
    last = told[-1]
    assert last.requests is not None
    assert last.input is not None
    assert (last.requests.limit, last.requests.remaining, last.requests.reset_s) == (2, 1, 30.0)
    assert (last.input.limit, last.input.remaining) == (10, 6)
    assert last.output is None
    with pytest.raises(InputTokensPerMinute), bench.enter(tell=told.append) as caller:
        caller.admit(prepared(prompt_tokens=9))
    bench.visit(prompt_tokens=1)
    told.clear()
    with pytest.raises(RequestsPerMinute), bench.enter(tell=told.append) as caller:
        caller.admit(prepared(prompt_tokens=1))
    assert told[-1].requests is not None
    assert told[-1].requests.remaining == 0


def test_nobody_is_told_of_limits_that_there_are_not() -> None:
    told: list[Standings] = []
    with Bench(key(limits={"max_concurrency": 3})).enter(tell=told.append):
        pass
    assert not told


def gateway(instance_id: str, *, is_draining: bool = False) -> Presence:
    return Presence(instance_id=instance_id, role="gateway", address="h:1", is_draining=is_draining)


def test_the_share_follows_the_gateways_that_take_requests() -> None:
    live = LiveGateways("b")
    assert live.share == Share(0, 1)
    for name in "abc":
        live.announced(gateway(name))
    assert live.share == Share(1, 3)
    live.announced(gateway("a", is_draining=True))
    assert live.share == Share(0, 2)
    live.announced(gateway("b", is_draining=True))
    assert live.share == Share(0, 2)
    live.lapsed("c")
    live.lapsed("b")
    assert live.share == Share(0, 1)
