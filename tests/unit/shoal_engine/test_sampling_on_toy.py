"""Bans, forced tokens, reports of the prompt and drafts by position, on the toy model."""

from __future__ import annotations

from typing import Any

import pytest
from shoal_common.errors import InvalidArgument
from shoal_engine.errors import HitNotUsable, NothingAllowed
from shoal_engine.logical_rows import PrefixRows
from shoal_engine.planner import FixedWidth
from shoal_engine.requests import ChoiceStart
from support.engine_driver import RandomWidths, request
from support.toy_driver import driver, prompt_of
from support.toy_model import EOS, REPLAY, VOCAB, toy_output, toy_seed


def test_forced_tokens_begin_the_output_of_every_choice_and_are_accepted_as_drafts() -> None:
    forced = (9, 9, 5, 6, 7, 8, 10)
    d = driver(quality=100, planner=FixedWidth(5))
    d.submit(request(prompt_of(20), forced_ids=forced, max_tokens=12, ignore_eos=True, choices=[ChoiceStart()] * 2))
    d.run()
    for choice in range(2):
        assert tuple(d.sink.tokens["r", choice][:7]) == forced
    # One token without a draft, then six of which five were drafts.
    second = [entry for entry in d.sink.entries if entry.output_index == 1]
    assert [(entry.verified, entry.accepted) for entry in second] == [(5, 5)] * 2


def test_a_forced_stop_ends_the_choice() -> None:
    d = driver()
    (tokens,) = d.generate(request(prompt_of(20), forced_ids=(9, EOS, 7), max_tokens=12))
    assert tokens == [9, EOS]


def test_a_forced_stop_below_min_tokens_is_refused() -> None:
    with pytest.raises(InvalidArgument) as caught:
        driver().admit(request(prompt_of(20), forced_ids=(9, EOS, 7), min_tokens=2))
    assert caught.value.violations[0].field == "params.forced_ids[1]"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"bad_words": ((3,), (3, VOCAB))}, "params.bad_words[1][1]"),
        ({"forced_ids": (3, VOCAB)}, "params.forced_ids[1]"),
    ],
)
def test_ids_outside_of_the_vocabulary_are_refused(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        driver().admit(request(prompt_of(20), max_tokens=9, **given))
    assert caught.value.violations[0].field == field


def test_drafts_are_counted_by_position() -> None:
    d = driver(quality=60, planner=RandomWidths(3))
    d.generate(request(prompt_of(20), max_tokens=80, ignore_eos=True))
    _, usage = d.sink.ended["r"]
    steps = [(entry.drafted, entry.verified, entry.accepted) for entry in d.sink.entries]
    for found, number in (
        (usage.drafted_by_position, 0),
        (usage.verified_by_position, 1),
        (usage.accepted_by_position, 2),
    ):
        assert list(found) == [sum(step[number] > position for step in steps) for position in range(len(found))]
    assert sum(usage.verified_by_position) == usage.draft_tokens > sum(usage.accepted_by_position) > 0
    assert sum(usage.drafted_by_position) > usage.draft_tokens
    assert sum(usage.accepted_by_position) == usage.accepted_draft_tokens


@pytest.mark.parametrize("quality", [0, 100])
def test_one_stuck_choice_fails_its_request_and_nobody_else(quality: int) -> None:
    output = toy_output(prompt_of(20), toy_seed(7, 1), 5, frozenset())
    words = tuple((output[3], token) for token in range(VOCAB))
    first = output.index(output[3])
    other = toy_output(prompt_of(30), 8, 40, frozenset())
    d = driver(quality=quality)
    d.submit(
        request(prompt_of(20), bad_words=words, max_tokens=40, ignore_eos=True, choices=[ChoiceStart()] * 2),
        request(prompt_of(30), name="other", seed=8, max_tokens=40, ignore_eos=True),
    )
    d.run()
    error, indices = d.sink.failed["r"]
    assert isinstance(error, NothingAllowed)
    assert error.code == "INVALID_ARGUMENT"
    assert d.sink.tokens["r", 1] == output[: first + 1]
    assert indices[1] == first + 1
    assert d.sink.tokens["other", 0] == other
    d.assert_at_baseline()


def test_a_request_that_may_not_even_begin_fails_without_a_token() -> None:
    d = driver()
    d.submit(request(prompt_of(20), bad_words=tuple((token,) for token in range(VOCAB)), max_tokens=9))
    d.run()
    assert isinstance(d.sink.failed["r"][0], NothingAllowed)
    assert d.sink.tokens["r", 0] == []
    d.assert_at_baseline()


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_a_prompt_is_reported_once_with_the_first_tokens_in_any_chunks(chunk: int) -> None:
    prompt, reports = prompt_of(REPLAY), []
    for size in (chunk, 512):
        d = driver(chunk=size)
        d.submit(request(prompt, prompt_logprobs=2, max_tokens=5, choices=[ChoiceStart()] * 2))
        d.submit(request(prompt_of(40), name="other", max_tokens=5))
        d.run()
        told = [
            (entry.choice, entry.output_index, entry.prompt_logprobs)
            for entry in d.sink.entries
            if entry.prompt_logprobs
        ]
        assert [one[:2] for one in told] == [(0, 0)]
        reports.append(told[0][2])
    assert [one.emitted.token_id for one in reports[0]] == prompt[1:]
    assert reports[0] == reports[1]


def test_a_prompt_of_one_token_has_nothing_to_report() -> None:
    d = driver()
    d.generate(request(prompt_of(1), prompt_logprobs=2, max_tokens=3))
    assert not any(entry.prompt_logprobs for entry in d.sink.entries)


def test_a_prompt_that_is_to_be_reported_takes_no_hit() -> None:
    d = driver()
    d.admit(request(prompt_of(REPLAY), prompt_logprobs=0, max_tokens=9))
    with pytest.raises(HitNotUsable):
        d.core.load_prefix("r", PrefixRows(hit_tokens=0, blocks=[], encoder_window=None))
    d.core.start("r")
    d.run()
    assert "r" in d.sink.ended
