"""One request for every way to shape a distribution, what each says without speculation, and ways to run them all.

To add a kind, add it to `KINDS`; every shape then runs it beside the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from shoal_engine.events import PositionLogprobs, TokenEntry
from shoal_engine.planner import FixedWidth, WidthPlanner
from shoal_engine.requests import ChoiceStart, GenerationRequest
from shoal_engine.served_model import ServedModel
from shoal_model.sampler import choice_seed
from support.engine_driver import Driver, RandomWidths, request
from support.exactness import GuidedModel
from support.tiny_model import REPLAY, text, tiny_model

OUTPUT = 12
BLOCKS, SLOTS = 120, 48
Said = tuple[tuple[int, ...], tuple[PositionLogprobs, ...], str | None]
"""Tokens of one choice, their log-probabilities, and why it ended."""


@dataclass(frozen=True)
class Kind:
    """A name and what its request asks for. `spec` is of `SamplingSpec`, beside what all of them ask for."""

    name: str
    seed: int
    spec: Mapping[str, Any] = field(hash=False)
    length: int = 30
    choice_count: int = 1

    @property
    def prompt(self) -> list[int]:
        return text(self.length, self.seed)

    def request(self, *, so_far: Sequence[ChoiceStart] | None = None, **more: Any) -> GenerationRequest:
        """Its request; keywords replace its own."""
        values: dict[str, Any] = {"name": self.name, "seed": self.seed, "max_tokens": OUTPUT, "top_logprobs": 3}
        choices = so_far or [ChoiceStart()] * self.choice_count
        return request(self.prompt, choices=choices, **(values | {"ignore_eos": True} | {**self.spec} | more))


GREEDY = Kind("greedy", 1, {"temperature": 0.0})
WARM = Kind("warm", 2, {"temperature": 0.7, "top_p": 0.9})
# Two ids that the answer is full of, so that what must not follow on what matters.
BAD_WORDS = Kind(
    "bad words", 3, {"logit_bias": {7: 8.0, 11: 8.0}, "bad_words": ((7, 7), (11, 7, 11), (11, 11, 11), (5,))}
)
PENALTIES = {"presence_penalty": 0.8, "frequency_penalty": 0.5, "repetition_penalty": 1.3}


@cache
def kinds() -> tuple[Kind, ...]:
    """All of them."""
    return (
        GREEDY,
        WARM,
        Kind("cut", 4, {"temperature": 1.0, "top_k": 20, "min_p": 0.02, "top_p": 0.95}),
        Kind("penalties", 5, {"temperature": 1.0, **PENALTIES}),
        Kind("greedy penalties", 6, {"temperature": 0.0, **PENALTIES}),
        Kind("logit bias", 7, {"logit_bias": {7: 6.0, 11: 5.0, 5: -100.0}}),
        BAD_WORDS,
        Kind("forced", 9, {"forced_ids": (17, 4, 4, 250, 9)}),
        Kind("min tokens", 13, {"min_tokens": 5, "stop_token_ids": frozenset(range(100, 300))}),
        Kind("end of sequence", 10, {"ignore_eos": False, "min_tokens": 4, "logit_bias": {1: 5.0}}),
        Kind("four choices", 11, {"temperature": 0.8, "frequency_penalty": 0.4}, choice_count=4),
        Kind(
            "everything",
            12,
            {
                **PENALTIES,
                "top_p": 0.8,
                "top_k": 40,
                "logit_bias": {8: 3.0},
                "min_tokens": 8,
                "bad_words": ((8, 8), (9,)),
                "forced_ids": (8, 30),
                "stop_token_ids": frozenset({12}),
            },
            choice_count=2,
        ),
    )


def said(d: Driver, kind: Kind) -> list[Said]:
    """What its choices said in this engine."""
    found: list[Said] = []
    for choice in range(kind.choice_count):
        entries: list[TokenEntry] = [e for e in d.sink.entries if (e.request_id, e.choice) == (kind.name, choice)]
        reasons = [entry.finish_reason.value for entry in entries if entry.finish_reason is not None]
        found.append(
            (
                tuple(d.sink.tokens[kind.name, choice]),
                tuple(one for entry in entries for one in entry.logprobs),
                reasons[0] if reasons else None,
            )
        )
    return found


@cache
def said_alone(kind: Kind) -> tuple[Said, ...]:
    """What a kind says by itself: whole prompt, no drafts, and each choice as a request of its own."""
    whole: list[Said] = []
    for choice in range(kind.choice_count):
        one = replace(kind, choice_count=1)
        d = Driver(ServedModel(tiny_model(num_blocks=8, num_slots=1)), replay_length=REPLAY, planner=FixedWidth(0))
        d.generate(one.request(seed=choice_seed(kind.seed, choice)))
        whole += said(d, one)
    return tuple(whole)


def guided(salt: int = 0) -> ServedModel:
    """A model with room for all kinds whose drafts are often right."""
    answers = {
        (kind.length, choice_seed(kind.seed, choice)): one[0]
        for kind in kinds()
        for choice, one in enumerate(said_alone(kind))
    }
    return GuidedModel(tiny_model(num_blocks=BLOCKS, num_slots=SLOTS), answers, salt)


def own_drafts() -> ServedModel:
    """The same with the drafts of its head."""
    return ServedModel(tiny_model(num_blocks=BLOCKS, num_slots=SLOTS))


def driver(model: ServedModel, planner: WidthPlanner | None = None, *, chunk: int = 128, salt: int = 0) -> Driver:
    """A driver with random widths, unless told otherwise."""
    return Driver(model, replay_length=REPLAY, planner=planner or RandomWidths(salt), chunk=chunk)


def assert_all_said(d: Driver) -> None:
    """Every kind has said what it says alone, log-probabilities included, and nothing is held any more."""
    assert not d.sink.failed
    for kind in kinds():
        assert said(d, kind) == list(said_alone(kind)), kind.name
    d.assert_at_baseline()
