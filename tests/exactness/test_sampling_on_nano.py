"""The kinds of `sampling_kinds` once more on nano, whose own drafts are often right. Run by make test-long."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from shoal_engine.events import EngineUsage
from shoal_engine.llm import model_directory
from shoal_engine.planner import FixedWidth, WidthPlanner
from shoal_engine.replay import default_replay_length
from shoal_engine.requests import ChoiceStart
from shoal_engine.served_model import ServedModel
from support.engine_driver import Driver, RandomWidths, request
from tokenizers import Tokenizer

OUTPUT = 48
Found = dict[tuple[str, str], Any]
"""By request, its tokens and its log-probabilities per choice."""
TEXTS = ("Sort these numbers: 42 7 19 3", "The cat sat on the mat, and the dog")
PENALTIES = {"presence_penalty": 0.6, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "warm": {"temperature": 0.7, "top_p": 0.9},
    "penalties": PENALTIES,
    "greedy penalties": {"temperature": 0.0, **PENALTIES},
    "cut": {"top_k": 20, "min_p": 0.02, "temperature": 1.3},
    "logit bias": {"logit_bias": {49: 4.0, 50: 3.0, 13: -100.0}},
    "bad words": {
        "temperature": 0.0,
        "logit_bias": {49: 9.0, 50: 9.0},
        "bad_words": ((49, 49), (50, 49, 50), (50, 50)),
    },
    "forced": {"temperature": 0.5, "forced_ids": (49, 50, 51, 52)},
    "min tokens": {"ignore_eos": False, "min_tokens": 20},
}


@cache
def prompts() -> tuple[list[int], ...]:
    tokenizer = Tokenizer.from_file(str(model_directory("nano") / "tokenizer.json"))
    return tuple([0, *tokenizer.encode(text, add_special_tokens=False).ids] for text in TEXTS)


@cache
def model() -> ServedModel:
    return ServedModel.load(model_directory("nano"), block_count=200, slot_count=48)


def driver(planner: WidthPlanner) -> Driver:
    shape = model().shape
    return Driver(model(), replay_length=default_replay_length(shape.window, shape.backtrack), planner=planner)


def run(planner: WidthPlanner, *, cut: int = 0) -> tuple[Found, list[EngineUsage]]:
    """What every kind says about every prompt, two choices each."""
    d, names = driver(planner), []
    for kind, fields in KINDS.items():
        for number, prompt in enumerate(prompts()):
            names.append(f"{kind} {number}")
            values = {"max_tokens": OUTPUT, "top_logprobs": 2, "ignore_eos": True, **fields}
            so_far: Sequence[ChoiceStart] = [ChoiceStart()] * 2
            if cut:
                so_far = [ChoiceStart(output_ids=tuple(t[:cut])) for t in said_without_drafts()[names[-1], "tokens"]]
            d.submit(request(prompt, name=names[-1], seed=number + 3, choices=so_far, **values))
    d.run()
    assert not d.sink.failed
    found: Found = {}
    for name in names:
        found[name, "tokens"] = [list(d.sink.tokens[name, choice]) for choice in range(2)]
        found[name, "logprobs"] = [
            [one for e in d.sink.entries if (e.request_id, e.choice) == (name, choice) for one in e.logprobs]
            for choice in range(2)
        ]
    d.assert_at_baseline()
    return found, [usage for _, usage in d.sink.ended.values()]


@cache
def said_without_drafts() -> Found:
    return run(FixedWidth(0))[0]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, None])
def test_tokens_and_logprobs_are_those_without_drafts(width: int | None) -> None:
    found, usages = run(RandomWidths(7) if width is None else FixedWidth(width))
    assert found == said_without_drafts()
    assert sum(usage.accepted_draft_tokens for usage in usages) > 100


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cut", [1, 5, 13])
def test_interrupted_answers_go_on_as_they_would_have(cut: int) -> None:
    found, _ = run(RandomWidths(cut), cut=cut)
    wanted = said_without_drafts()
    for (name, what), values in found.items():
        whole = wanted[name, what]
        assert values == (whole if what == "tokens" else [one[cut:] for one in whole]), name
