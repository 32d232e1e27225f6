"""A constraint begins behind the end of the thinking, wherever in a drafted block that lies, and not before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from shoal_common.constraints import ConstraintKind, OutputConstraint, normalise
from shoal_engine.model_port import Draft, DraftStart
from shoal_engine.planner import FixedWidth
from shoal_engine.requests import ChoiceStart
from shoal_engine.served_model import ServedModel
from support.sampling_kinds import THINK_END, Kind, compiled, driver, said, said_alone
from support.seldom import seldom
from support.tiny_model import tiny_model

ENDS = ((THINK_END,), (THINK_END, 60, THINK_END))
REGEX = "[a-f]{3,30}"


class KnownAnswers(ServedModel):
    """Drafts exactly what each answer is known to go on with."""

    def __init__(self, answers: Mapping[tuple[int, int], Sequence[int]]) -> None:
        super().__init__(tiny_model(num_blocks=80, num_slots=16))
        self._answers = answers

    def draft(self, starts: Sequence[DraftStart], width: int) -> list[Draft]:
        made = []
        for start in starts:
            answer = self._answers[len(start.context.prompt), start.context.seed]
            index = start.context.output_index
            ahead = [*answer[index : index + width], *[5] * width][:width]
            made.append(Draft(tuple(ahead), (9.0,) * width))
        return made


def gated(place: int, ends: tuple[int, ...]) -> Kind:
    """The end of the thinking stands at output index `place`."""
    constraint: OutputConstraint = normalise(ConstraintKind.REGEX, REGEX, start_after_ids=ends)
    spec = {"temperature": 1.0, "forced_ids": (61,) * place + ends, "max_tokens": 20, "ignore_eos": False}
    return Kind(f"{len(ends)} at {place}", 300 + place, spec, length=30 + len(ends), constraint=constraint)


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("width", [5, *seldom(1)])
def test_the_end_of_thinking_may_lie_at_every_draft_position(ends: tuple[int, ...], width: int) -> None:
    kinds = [gated(place, ends) for place in range(8)]
    answers = {(kind.length, kind.seed): said_alone(kind)[0][0] for kind in kinds}
    d = driver(KnownAnswers(answers), FixedWidth(width))
    d.submit(*(kind.request() for kind in kinds))
    d.run()
    assert not d.sink.failed
    for place, kind in enumerate(kinds):
        assert said(d, kind) == list(said_alone(kind))
        usage = d.sink.ended[kind.name][1]
        # None of the right drafts was refused: masks are right on both sides of the boundary.
        assert usage.accepted_draft_tokens == usage.draft_tokens > 0
        assert kind.constraint is not None
        matcher = compiled(kind.constraint).matcher()
        tokens = d.sink.tokens[kind.name, 0]
        assert all(matcher.commit(token) for token in tokens)
        inner = compiled(normalise(ConstraintKind.REGEX, REGEX)).matcher()
        assert all(inner.commit(token) for token in tokens[place + len(ends) :])


@pytest.mark.parametrize("ends", ENDS)
def test_an_answer_that_is_interrupted_around_the_end_of_thinking_goes_on_alike(ends: tuple[int, ...]) -> None:
    kind = gated(3, ends)
    [(tokens, _, _)] = said_alone(kind)
    for cut in range(1, 3 + len(ends) + 3):
        d = driver(KnownAnswers({(kind.length, kind.seed): tokens}), FixedWidth(5))
        d.submit(kind.request(so_far=[ChoiceStart(output_ids=tokens[:cut])]))
        d.run()
        assert tuple(d.sink.tokens[kind.name, 0]) == tokens


def test_an_answer_does_not_end_while_it_thinks() -> None:
    """Tokens that would end it are masked, whatever the model says."""
    constraint = normalise(ConstraintKind.REGEX, REGEX, start_after_ids=(THINK_END,))
    kind = Kind("thinks", 5, {"temperature": 1.0, "logit_bias": {1: 100.0}, "ignore_eos": False}, constraint=constraint)
    [(tokens, _, reason)] = said_alone(kind)
    assert reason == "length"
    assert 1 not in tokens
