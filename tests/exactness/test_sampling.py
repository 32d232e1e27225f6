"""Whatever shapes a distribution, tokens and log-probabilities do not depend on speculation, on company or on a move.

All kinds of `sampling_kinds` run side by side in one engine and are compared with what each says alone without drafts.
"""

from __future__ import annotations

import random

import pytest
from shoal_common.errors import InvalidArgument
from shoal_engine.errors import NothingAllowed
from shoal_engine.events import PositionLogprobs
from shoal_engine.planner import FixedWidth
from shoal_engine.requests import ChoiceStart
from support.engine_driver import Driver, request
from support.exactness import noisy_drafts
from support.sampling_kinds import (
    GREEDY,
    WARM,
    Kind,
    assert_all_said,
    driver,
    guided,
    kinds,
    own_drafts,
    said,
    said_alone,
)
from support.tiny_model import REPLAY

WIDTHS = (0, 1, 2, 3, 4, 5)


def run_all(d: Driver) -> None:
    d.submit(*(kind.request() for kind in kinds()))
    d.run()
    assert_all_said(d)


def test_at_random_widths_with_drafts_that_are_often_right() -> None:
    d = driver(guided())
    run_all(d)
    usages = [usage for _, usage in d.sink.ended.values()]
    assert sum(usage.accepted_draft_tokens for usage in usages) > 30
    assert sum(usage.draft_tokens - usage.accepted_draft_tokens for usage in usages) > 10


def test_with_draft_weights_replaced_by_noise() -> None:
    run_all(driver(noisy_drafts(), FixedWidth(5)))


def join_and_leave(d: Driver, salt: int) -> None:
    """The kinds come one after the other while others come and are cancelled."""
    turns = random.Random(salt)
    for number, kind in enumerate(kinds()):
        other = Kind(f"other {number}", 50 + number, {"temperature": 1.0, "top_p": 0.9})
        d.submit(kind.request(), other.request(max_tokens=100))
        for _ in range(turns.randint(0, 4)):
            d.core.step()
        d.core.cancel(other.name)
    d.run()
    assert_all_said(d)


def test_while_other_requests_join_and_leave() -> None:
    join_and_leave(driver(own_drafts(), chunk=16), 1)


def interrupt(d: Driver, salt: int) -> None:
    """Every choice comes with what it had said up to a random token."""
    cuts = random.Random(salt)
    begun: dict[str, list[int]] = {}
    for kind in kinds():
        alone = said_alone(kind)
        begun[kind.name] = [cuts.randint(0, len(tokens) - 1) for tokens, _, _ in alone]
        so_far = [ChoiceStart(output_ids=one[0][:cut]) for one, cut in zip(alone, begun[kind.name], strict=True)]
        d.submit(kind.request(so_far=so_far))
    d.run()
    assert not d.sink.failed
    for kind in kinds():
        wanted = [
            (tokens, logprobs[cut:], reason)
            for (tokens, logprobs, reason), cut in zip(said_alone(kind), begun[kind.name], strict=True)
        ]
        assert said(d, kind) == wanted, kind.name
    d.assert_at_baseline()


def test_interrupted_and_continued_at_random_tokens() -> None:
    interrupt(driver(own_drafts(), chunk=11), 1)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("width", WIDTHS)
def test_at_every_fixed_width(width: int) -> None:
    for model in (guided(width), own_drafts(), noisy_drafts()):
        run_all(driver(model, FixedWidth(width)))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("salt", range(8))
def test_in_many_random_shapes(salt: int) -> None:
    run_all(driver(guided(salt), salt=salt, chunk=(1, 7, 128)[salt % 3]))
    join_and_leave(driver(own_drafts(), salt=salt, chunk=16), salt)
    interrupt(driver(guided(salt), salt=salt), salt)


def test_the_kinds_do_what_they_are_named_for() -> None:
    by_name = {kind.name: (kind, said_alone(kind)) for kind in kinds()}
    bad, ((words, _, _),) = by_name["bad words"]
    ((free, _, _),) = said_alone(Kind("free", bad.seed, {"logit_bias": bad.spec["logit_bias"]}))
    assert any(contains(free, word) for word in bad.spec["bad_words"])
    assert not any(contains(words, word) for word in bad.spec["bad_words"])
    forced, ((tokens, logprobs, _),) = by_name["forced"]
    assert tokens[:5] == forced.spec["forced_ids"]
    assert all(one.emitted.logprob == 0.0 for one in logprobs[:5])
    assert [top.logprob for top in logprobs[0].top] == [0.0, -9999.0, -9999.0]
    stopped, ((tokens, _, reason),) = by_name["min tokens"]
    assert reason == "stop"
    assert len(tokens) > 5
    assert [token in stopped.spec["stop_token_ids"] for token in tokens] == [False] * (len(tokens) - 1) + [True]
    _, ((_, logprobs, _),) = by_name["cut"]
    assert all(len(one.top) == 3 for one in logprobs)
    assert len({tokens for tokens, _, _ in by_name["four choices"][1]}) == 4
    assert by_name["end of sequence"][1][0][2] == "stop"


def contains(tokens: tuple[int, ...], word: tuple[int, ...]) -> bool:
    return any(tokens[i : i + len(word)] == word for i in range(len(tokens)))


def test_one_choice_says_what_the_first_of_four_says() -> None:
    d = driver(own_drafts(), FixedWidth(4))
    d.submit(*(kind.request(so_far=[ChoiceStart()] * 4) for kind in kinds()))
    d.run()
    for kind in kinds():
        assert said(d, kind)[: kind.choice_count] == list(said_alone(kind)), kind.name
        assert d.sink.tokens[kind.name, 3] != d.sink.tokens[kind.name, 0] or kind.spec.get("temperature") == 0.0


PROMPT = Kind("prompt", 21, {"prompt_logprobs": 4, "temperature": 0.7}, length=REPLAY)


def prompt_report(chunk: int, kind: Kind = PROMPT) -> tuple[PositionLogprobs, ...]:
    d = driver(own_drafts(), chunk=chunk)
    # Beside others, so that its rows are not the only ones of a step.
    d.submit(GREEDY.request(), kind.request(so_far=[ChoiceStart()] * 2))
    d.run()
    first, *others = [entry for entry in d.sink.entries if entry.request_id == kind.name]
    assert not any(entry.prompt_logprobs for entry in others)
    d.assert_at_baseline()
    return first.prompt_logprobs


def test_a_prompt_is_reported_alike_whole_and_in_chunks() -> None:
    whole = prompt_report(128)
    assert [one.emitted.token_id for one in whole] == PROMPT.prompt[1:]
    assert all(len(one.top) == 4 for one in whole)
    for chunk in (1, 7):
        assert prompt_report(chunk) == whole


def test_a_prompt_is_reported_as_the_model_s_own_distribution() -> None:
    whole = prompt_report(128)
    for position in (1, 2, 9, REPLAY - 1):
        d = driver(own_drafts())
        d.submit(request(PROMPT.prompt[:position], temperature=1.0, top_logprobs=4, max_tokens=1))
        d.run()
        (sampled,) = d.sink.entries[0].logprobs
        assert whole[position - 1].top == sampled.top


def test_a_prompt_longer_than_the_replay_is_not_reported() -> None:
    d = driver(own_drafts())
    with pytest.raises(InvalidArgument) as caught:
        d.admit(Kind("long", 1, {"prompt_logprobs": 0}, length=REPLAY + 1).request())
    assert caught.value.reason == "PROMPT_LOGPROBS_NEED_FULL_REPLAY"
    assert caught.value.violations[0].field == "params.prompt_logprobs"


def test_a_prompt_that_was_reported_is_not_reported_again_after_a_move() -> None:
    d = driver(own_drafts())
    kind = Kind("moved", 21, {"prompt_logprobs": 1}, length=60)
    d.submit(kind.request(so_far=[ChoiceStart(output_ids=(5,)), ChoiceStart()]))
    d.run()
    assert not any(entry.prompt_logprobs for entry in d.sink.entries)
    assert kind.name in d.sink.ended


@pytest.mark.parametrize("width", [0, 5])
def test_a_request_that_may_say_nothing_fails_alone_behind_what_it_had_said(width: int) -> None:
    # The stops are banned, and so is every other token behind the third.
    spec = {"temperature": 0.0, "min_tokens": 12, "stop_token_ids": frozenset(range(128, 512))}
    ((free, _, _),) = said_alone(Kind("free", 1, spec))
    first = free.index(free[2])
    stuck = Kind("stuck", 1, {**spec, "bad_words": tuple((free[2], token) for token in range(128))})
    d = driver(own_drafts(), FixedWidth(width))
    d.submit(stuck.request(), WARM.request())
    d.run()
    error, (index,) = d.sink.failed[stuck.name]
    assert isinstance(error, NothingAllowed)
    assert tuple(d.sink.tokens[stuck.name, 0]) == free[: first + 1]
    assert index == first + 1
    assert said(d, WARM) == list(said_alone(WARM))
    d.assert_at_baseline()
