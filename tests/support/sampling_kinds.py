"""One request for every way to shape a distribution, what each says without speculation, and ways to run them all.

To add a kind, add it to `KINDS`; every shape then runs it beside the others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from shoal_common.constraints import ConstraintKind, OutputConstraint, normalise
from shoal_engine.constraint import Constraint
from shoal_engine.constraints import ConstraintCompiler, GrammarTokenizer
from shoal_engine.events import PositionLogprobs, TokenEntry
from shoal_engine.planner import FixedWidth, WidthPlanner
from shoal_engine.requests import ChoiceStart, GenerationRequest
from shoal_engine.served_model import ServedModel
from shoal_model.config import ModelConfig
from shoal_model.sampler import choice_seed
from support.engine_driver import Driver, RandomWidths, request
from support.exactness import GuidedModel
from support.tiny_model import REPLAY, TINY, text, tiny_model

OUTPUT = 12
BLOCKS, SLOTS = 200, 80
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
    constraint: OutputConstraint | None = None

    @property
    def prompt(self) -> list[int]:
        return text(self.length, self.seed)

    def request(self, *, so_far: Sequence[ChoiceStart] | None = None, **more: Any) -> GenerationRequest:
        """Its request; keywords replace its own."""
        values: dict[str, Any] = {"name": self.name, "seed": self.seed, "max_tokens": OUTPUT, "top_logprobs": 3}
        choices = so_far or [ChoiceStart()] * self.choice_count
        if self.constraint is not None:
            values["constraint"] = compiled(self.constraint)
        return request(self.prompt, choices=choices, **(values | {"ignore_eos": True} | {**self.spec} | more))


GREEDY = Kind("greedy", 1, {"temperature": 0.0})
WARM = Kind("warm", 2, {"temperature": 0.7, "top_p": 0.9})
# Two ids that the answer is full of, so that what must not follow on what matters.
BAD_WORDS = Kind(
    "bad words", 3, {"logit_bias": {7: 8.0, 11: 8.0}, "bad_words": ((7, 7), (11, 7, 11), (11, 11, 11), (5,))}
)
PENALTIES = {"presence_penalty": 0.8, "frequency_penalty": 0.5, "repetition_penalty": 1.3}


SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": -99, "maximum": 9999},
        "b": {"type": "array", "items": {"enum": ["x", "yy", None]}, "maxItems": 2},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOL = {
    "name": "get",
    "parameters": {
        "type": "object",
        "properties": {"q": {"type": "string", "maxLength": 5}, "n": {"type": "integer", "maximum": 99, "minimum": 0}},
        "required": ["q"],
        "additionalProperties": False,
    },
}
EBNF = 'root ::= term (" + " term)*\nterm ::= [0-9]{1,2} | "(" root ")"'
REGEX = "([a-f]{1,3}[0-9]){2,4}(x|yz)"
THINK_END = 6


def _held(name: str, seed: int, kind: ConstraintKind, value: Any, spec: Mapping[str, Any], **more: Any) -> Kind:
    text = value if isinstance(value, str) else json.dumps(value)
    after = more.pop("after", ())
    return Kind(name, seed, spec, constraint=normalise(kind, text, start_after_ids=after), **more)


# Without these the tiny model fills JSON with blanks.
BLANKS = dict.fromkeys((207, 208, 211, 230), -100.0)
_LONG = {"max_tokens": 28, "top_logprobs": 1}
_CALLS = {"type": "tool_calls", "choice": "required", "parallel": False, "tools": [TOOL]}
CONSTRAINED = (
    _held(
        "schema",
        31,
        ConstraintKind.JSON_SCHEMA,
        SCHEMA,
        {"temperature": 1.0, "ignore_eos": False, "logit_bias": BLANKS, **_LONG},
    ),
    _held("schema greedy", 32, ConstraintKind.JSON_SCHEMA, SCHEMA, {"temperature": 0.0, **_LONG}),
    _held("json object", 33, ConstraintKind.JSON_OBJECT, "", {**PENALTIES, "top_p": 0.9}, choice_count=3),
    _held(
        "regex",
        34,
        ConstraintKind.REGEX,
        "([a-f]{1,3}[0-9]){2,4}(x|yz)",
        {"temperature": 0.7, "min_tokens": 25, **_LONG},
    ),
    _held("ebnf", 35, ConstraintKind.EBNF, EBNF, {"temperature": 1.0, "ignore_eos": False}),
    _held("tool call", 36, ConstraintKind.STRUCTURAL_TAG, _CALLS, {"temperature": 1.0, **_LONG, "max_tokens": 60}),
    _held(
        "after thinking",
        37,
        ConstraintKind.JSON_SCHEMA,
        SCHEMA,
        # The thinking ends early, and at different places in the drafts of different steps.
        {"temperature": 1.0, "logit_bias": {THINK_END: 9.0, **BLANKS}, **_LONG},
        after=(THINK_END,),
        choice_count=2,
    ),
)


@cache
def compiler() -> ConstraintCompiler:
    """For the tiny model."""
    config = ModelConfig.load(TINY)
    path = TINY / "tokenizer.json"
    return ConstraintCompiler(
        GrammarTokenizer.from_file(path, vocab_size=config.vocab_size, eos_id=config.eos_token_id)
    )


def compiled(constraint: OutputConstraint) -> Constraint:
    """Its compiled form."""
    return compiler().compile(constraint).result()


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
        *CONSTRAINED,
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
