"""What is asked of an engine. Plain values, checked when they are made; no clock, no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real

import numpy as np
from numpy.typing import NDArray
from shoal_common.errors import InvalidArgument
from shoal_common.sampling_limits import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_FORCED_IDS, MAX_TOP_LOGPROBS

from shoal_engine.constraint import Constraint

TokenIds = NDArray[np.int64]

GREEDY_BELOW = 1e-5
"""The likeliest token is taken at temperatures below this, as in `shoal_kernels.ops.sampling`."""
MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSpec:
    """How tokens are chosen and when they stop; meanings and ranges of `shoal.common.v1.SamplingParams`.

    max_tokens None means as many as the context has room for. top_logprobs None reports none, 0 the emitted token's;
    prompt_logprobs likewise, for the prompt.
    bad_words    token sequences that the output never contains, 1 to 32 tokens each, at most 128
    forced_ids   what the output begins with; no bad word is among them
    raises   InvalidArgument naming the field
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    top_logprobs: int | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    forced_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < GREEDY_BELOW

    def __post_init__(self) -> None:
        _within("temperature", self.temperature, 0.0, math.inf)
        _within("top_k", self.top_k, 0, 2**31, whole=True)
        _within("top_p", self.top_p, 0.0, 1.0, above_low=True)
        _within("min_p", self.min_p, 0.0, 1.0)
        if self.max_tokens is not None:
            _within("max_tokens", self.max_tokens, 1, 2**32, whole=True)
        most = math.inf if self.max_tokens is None else self.max_tokens
        _within("min_tokens", self.min_tokens, 0, most, whole=True)
        for token in self.stop_token_ids:
            _number("stop_token_ids", token, whole=True)
        for token, bias in self.logit_bias.items():
            _number("logit_bias", token, whole=True)
            _within(f"logit_bias[{token}]", bias, -100.0, 100.0)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _within("repetition_penalty", self.repetition_penalty, 0.0, math.inf, above_low=True)
        for name, count in (("top_logprobs", self.top_logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _within(name, count, 0, MAX_TOP_LOGPROBS, whole=True)
        self._check_sequences()

    @property
    def has_penalties(self) -> bool:
        """Whether what stands in the output, or in the prompt, changes the logits."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def _check_sequences(self) -> None:
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidArgument.at("bad_words", f"must be at most {MAX_BAD_WORDS}, got {len(self.bad_words)}")
        for i, word in enumerate(self.bad_words):
            if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
                raise InvalidArgument.at(
                    f"bad_words[{i}]", f"must have 1 to {MAX_BAD_WORD_TOKENS} tokens, got {len(word)}"
                )
        if len(self.forced_ids) > MAX_FORCED_IDS:
            raise InvalidArgument.at("forced_ids", f"must be at most {MAX_FORCED_IDS}, got {len(self.forced_ids)}")
        sequences = {f"bad_words[{i}]": word for i, word in enumerate(self.bad_words)} | {"forced_ids": self.forced_ids}
        for name, ids in sequences.items():
            for token in ids:
                _within(name, token, 0, 2**32 - 1, whole=True)
        forced = np.array(self.forced_ids, dtype=np.int64)
        for i, word in enumerate(self.bad_words):
            at = _first_occurrence(forced, word)
            if at is not None:
                raise InvalidArgument.at(f"bad_words[{i}]", f"is forced at output index {at}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceStart:
    """Where a choice stands when its request comes: the tokens emitted so far, and whether it had ended."""

    output_ids: tuple[int, ...] = ()
    is_finished: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One request for tokens.

    request_id, attempt   a greater attempt of the same id replaces a smaller one
    prompt_ids            int64, at least one
    seed                  0 .. 2**64 - 1; of choice 0, the others' are derived
    priority, arrival     greater priority first, then earlier arrival (seconds of any one clock)
    recover_in_place      after losing its blocks the request waits here; otherwise it ends with Moved
    max_width             most drafts verified in a step; None leaves it to the planner
    constraint            what the output must be; None: anything
    cache_points          token counts of the prompt after which a snapshot is kept, ascending
    export_chain          hand full blocks and snapshots to the sink (write-back)
    raises                InvalidArgument naming the field
    """

    request_id: str
    prompt_ids: TokenIds
    params: SamplingSpec
    seed: int
    attempt: int = 1
    choices: tuple[ChoiceStart, ...] = (ChoiceStart(),)
    priority: int = 0
    arrival: float = 0.0
    recover_in_place: bool = False
    max_width: int | None = None
    constraint: Constraint | None = None
    cache_points: tuple[int, ...] = ()
    export_chain: bool = False

    def __post_init__(self) -> None:
        _check_prompt(self.prompt_ids)
        _within("seed", self.seed, 0, MAX_SEED, whole=True)
        if not self.choices:
            raise InvalidArgument.at("choices", "must name at least one choice")
        if self.max_width is not None:
            _within("max_width", self.max_width, 0, math.inf, whole=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRequest:
    """One prompt to prefill for another engine; the sink gets its rows. Fields as in `GenerationRequest`."""

    request_id: str
    prompt_ids: TokenIds
    attempt: int = 1
    priority: int = 0
    arrival: float = 0.0
    cache_points: tuple[int, ...] = ()
    export_chain: bool = False

    def __post_init__(self) -> None:
        _check_prompt(self.prompt_ids)


def _check_prompt(prompt_ids: TokenIds) -> None:
    if prompt_ids.ndim != 1 or not len(prompt_ids):
        raise InvalidArgument.at("prompt_ids", "must hold at least one token id", reason="PROMPT_EMPTY")


def _within(name: str, value: float, low: float, high: float, *, above_low: bool = False, whole: bool = False) -> None:
    _number(name, value, whole=whole)
    is_inside = (value > low if above_low else value >= low) and value <= high and not math.isinf(value)
    if not is_inside:
        interval = f"{'above' if above_low else 'at least'} {low}"
        if not math.isinf(high):
            interval += f" and at most {high}"
        raise InvalidArgument.at(name, f"must be {interval}, got {value}")


def _number(name: str, value: object, *, whole: bool) -> None:
    # What the offline LLM is called with comes straight from its user; True and False are no numbers there.
    if not isinstance(value, Integral if whole else Real) or isinstance(value, bool):
        raise InvalidArgument.at(name, f"must be a {'whole ' if whole else ''}number, got {value!r}")


def _first_occurrence(ids: TokenIds, word: tuple[int, ...]) -> int | None:
    """Where `word` first stands in `ids`. Whole arrays at a time: both may be long, and requests come from anyone."""
    starts = np.arange(len(ids) - len(word) + 1)
    for i in reversed(range(len(word))):
        starts = starts[ids[starts + i] == word[i]]
        if not starts.size:
            return None
    return int(starts[0])
