"""Where a constraint allows nothing, or costs too much, on nano: its request fails alone, at the same token always."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from shoal_common.constraints import ConstraintKind, OutputConstraint, normalise
from shoal_common.errors import MeshError
from shoal_engine.constraint import Constraint
from shoal_engine.constraints import CompilerLimits, ConstraintCompiler, GrammarTokenizer
from shoal_engine.llm import model_directory
from shoal_engine.planner import FixedWidth, WidthPlanner
from shoal_engine.replay import default_replay_length
from shoal_engine.requests import ChoiceStart
from shoal_engine.served_model import ServedModel
from support.engine_driver import Driver, RandomWidths, request
from support.grammar_walk import ids_of, text_of, tokenizer

NO_X = tuple((token,) for token in range(3569) if tokenizer().decode([token]).startswith("x"))
COSTLY = normalise(ConstraintKind.REGEX, "[ab]*a[ab]{12}y")


@cache
def model() -> ServedModel:
    return ServedModel.load(model_directory("nano"), block_count=60, slot_count=12)


@cache
def of_its_vocabulary() -> GrammarTokenizer:
    shape = model().shape
    path = model_directory("nano") / "tokenizer.json"
    return GrammarTokenizer.from_file(path, vocab_size=shape.vocab_size, eos_id=shape.eos_id)


def compiled(source: OutputConstraint) -> Constraint:
    """Anew, with a lexer that a dozen tokens use up."""
    return ConstraintCompiler(of_its_vocabulary(), CompilerLimits(lexer_states=150)).compile(source).result(30)


def requests(so_far: dict[str, tuple[int, ...]]) -> dict[str, dict[str, Any]]:
    """What is asked for by name; the first two fail."""
    asked: dict[str, dict[str, Any]] = {
        "nothing": {"constraint": normalise(ConstraintKind.REGEX, "[a-f]{3,5}x[0-9]{9}"), "bad_words": NO_X},
        "too much": {"constraint": COSTLY, "max_tokens": 60, "temperature": 9.0},
        "plain": {"temperature": 0.0},
        "fits": {"constraint": normalise(ConstraintKind.REGEX, "[a-f]{3,5}x[0-9]{9}")},
    }
    return {
        name: {**fields, "choices": [ChoiceStart(output_ids=so_far.get(name, ()))]} for name, fields in asked.items()
    }


def run(planner: WidthPlanner, so_far: dict[str, tuple[int, ...]], *names: str) -> dict[str, Any]:
    """Tokens of every request, or why and where it failed."""
    shape = model().shape
    d = Driver(model(), replay_length=default_replay_length(shape.window, shape.backtrack), planner=planner)
    asked = requests(so_far)
    for number, (name, fields) in enumerate(asked.items()):
        if name in names or not names:
            values = {"max_tokens": 12, **fields}
            if "constraint" in values:
                values["constraint"] = compiled(values["constraint"])
            d.submit(request([0, *ids_of("Sort these: 42 7")], name=name, seed=number, **values))
    d.run()
    d.assert_at_baseline()
    found: dict[str, Any] = {}
    for name in asked:
        if name in d.sink.failed:
            error, (place,) = d.sink.failed[name]
            assert isinstance(error, MeshError)
            found[name] = (error.reason, place, tuple(d.sink.tokens[name, 0]))
        elif name in names or not names:
            found[name] = tuple(d.sink.tokens[name, 0])
    return found


@cache
def alone() -> dict[str, Any]:
    """Every request by itself, without drafts."""
    return {name: run(FixedWidth(0), {}, name)[name] for name in requests({})}


def test_each_fails_by_its_own_reason_and_the_others_fit() -> None:
    reason, place, tokens = alone()["nothing"]
    assert reason == "NOTHING_ALLOWED"
    assert place == len(tokens) > 0
    assert set(text_of(list(tokens))) <= set("abcdef")
    reason, place, tokens = alone()["too much"]
    assert reason == "CONSTRAINT_FAILED"
    assert place == len(tokens) > 2
    assert len(alone()["plain"]) == 12
    assert "x" in text_of(list(alone()["fits"]))


@pytest.mark.parametrize("width", [5, None])
def test_in_company_and_with_drafts_each_says_and_fails_as_alone(width: int | None) -> None:
    assert run(RandomWidths(3) if width is None else FixedWidth(width), {}) == alone()


def test_continued_each_says_and_fails_as_in_one_go() -> None:
    said = {name: one[2] if isinstance(one[0], str) else one for name, one in alone().items()}
    assert run(FixedWidth(2), {name: tokens[:3] for name, tokens in said.items()}) == alone()
