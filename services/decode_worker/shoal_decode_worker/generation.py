"""One Generate call as values: what is asked for, and whether this worker can ever do it. Pure."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal_common.constraints import MAX_START_IDS, OutputConstraint, engine_of
from shoal_common.errors import FailedPrecondition, NumericsMismatch
from shoal_common.sampling_limits import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_FORCED_IDS, MAX_TOP_LOGPROBS

from shoal_decode_worker.core import ChoiceStart
from shoal_decode_worker.wrong_field import wrong_field

MAX_CHOICES = 8
MAX_LOGIT_BIAS = 100.0
ROOT_BYTES = 32


class ExceedsCapacity(FailedPrecondition):
    """The request is larger than this whole worker."""

    reason = "EXCEEDS_CAPACITY"


class ConstraintMismatch(FailedPrecondition):
    """Constraints are compiled by other engines here, or by none."""

    reason = "CONSTRAINT_MISMATCH"


class NotDeterministic(FailedPrecondition):
    """The answer must be exact, and this worker's kernels do not give the same bits in every batch."""

    reason = "NOT_DETERMINISTIC"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSpec:
    """How tokens are chosen: SamplingParams with every default filled in. `max_tokens` None: to the context's end."""

    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    top_logprobs: int | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    forced_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTarget:
    """A prefill worker that may serve the prompt."""

    instance_id: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStart:
    """One attempt of one request.

    prompt_ids   typecode "I"
    cache_root   32 bytes, None: the KV cache is neither read nor written
    is_exact     refused by an engine that is not invariant
    constraint   what the output must be, as it came: it is checked where it is compiled
    first_number of choice 0 among the columns of the gateway's frames; 0: its choices have none
    """

    request_id: str
    attempt: int
    gateway_id: str
    numerics_id: str | None
    cache_root: bytes | None
    tenant_tag: bytes
    prompt_ids: array[int]
    sampling: SamplingSpec
    choices: tuple[ChoiceStart, ...]
    prefill_targets: tuple[PrefillTarget, ...] = ()
    priority: int = 0
    cache_points: tuple[int, ...] = ()
    is_exact: bool = False
    constraint: OutputConstraint | None = None
    first_number: int = 0

    def max_tokens(self, max_context: int) -> int:
        """Output tokens a choice may have, its tokens so far included, in a context of `max_context` tokens."""
        room = max_context - len(self.prompt_ids)
        wanted = self.sampling.max_tokens
        return room if wanted is None else min(room, wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What an engine is: identities, sizes in tokens, blocks and slots, and whether its kernels are invariant.

    constraint_id   what constraints are compiled with; empty: it takes none
    """

    model: str
    kv_id: str
    numerics_id: str
    draft_id: str
    vocab_size: int
    max_context: int
    block_count: int
    slot_count: int
    is_invariant: bool = True
    constraint_id: str = ""


def check(start: GenerationStart, facts: EngineFacts) -> None:
    """Raise InvalidArgument for a wrong field, FailedPrecondition for what this worker can never do."""
    if start.numerics_id is not None and start.numerics_id != facts.numerics_id:
        raise NumericsMismatch(
            "this worker computes other bits than the request was placed for",
            wanted=start.numerics_id,
            numerics_id=facts.numerics_id,
        )
    if start.is_exact and not facts.is_invariant:
        raise NotDeterministic("this worker's kernels do not give the same bits in every batch")
    if start.constraint is not None:
        _check_constraint(start.constraint, facts)
    _check_names(start)
    _check_prompt(start, facts)
    _check_sampling(start.sampling, facts)
    _check_choices(start, facts)
    if list(start.cache_points) != sorted(set(start.cache_points)):
        raise wrong_field("cache_points", "must ascend")


def _check_names(start: GenerationStart) -> None:
    if not start.request_id:
        raise wrong_field("request_id", "must not be empty")
    if start.attempt < 1:
        raise wrong_field("attempt", "counts from 1")
    if start.cache_root is not None and len(start.cache_root) != ROOT_BYTES:
        raise wrong_field("cache_root", f"must be {ROOT_BYTES} bytes, got {len(start.cache_root)}")


def _check_constraint(constraint: OutputConstraint, facts: EngineFacts) -> None:
    engine = engine_of(constraint.kind)
    if not facts.constraint_id or constraint.engine not in ("", engine):
        raise ConstraintMismatch(
            f"constraints of this kind are compiled by {engine if facts.constraint_id else 'nothing'} here",
            wanted=constraint.engine,
        )
    if len(constraint.start_after_ids) > MAX_START_IDS:
        raise wrong_field("constraint.start_after_ids", f"at most {MAX_START_IDS} tokens")
    for token_id in constraint.start_after_ids:
        _check_token("constraint.start_after_ids", token_id, facts)


def _check_prompt(start: GenerationStart, facts: EngineFacts) -> None:
    length = len(start.prompt_ids)
    if not length:
        raise wrong_field("prompt_ids", "must hold at least one token", reason="EMPTY_PROMPT")
    if length >= facts.max_context:
        raise wrong_field(
            "prompt_ids",
            f"{length} tokens leave no room in a context of {facts.max_context}",
            reason="PROMPT_TOO_LONG",
            prompt_tokens=length,
            max_context=facts.max_context,
        )
    _check_token("prompt_ids", max(start.prompt_ids), facts)


def _check_choices(start: GenerationStart, facts: EngineFacts) -> None:
    if not 1 <= len(start.choices) <= MAX_CHOICES:
        raise wrong_field("choices", f"1 to {MAX_CHOICES}, got {len(start.choices)}")
    if len(start.choices) > facts.slot_count:
        raise ExceedsCapacity(
            f"{len(start.choices)} choices, this worker has {facts.slot_count} slots", slot_count=facts.slot_count
        )
    room = start.max_tokens(facts.max_context)
    for index, choice in enumerate(start.choices):
        if choice.output_ids:
            _check_token(f"choices[{index}].output_ids", max(choice.output_ids), facts)
        if len(choice.output_ids) > room:
            raise wrong_field(
                f"choices[{index}].output_ids", f"{len(choice.output_ids)} tokens, at most {room} fit", max_tokens=room
            )


def _check_sampling(sampling: SamplingSpec, facts: EngineFacts) -> None:
    _check_range("temperature", sampling.temperature, 0.0, math.inf)
    _check_range("top_p", sampling.top_p, 0.0, 1.0)
    if sampling.top_p == 0.0:
        raise wrong_field("params.top_p", "must be above 0")
    _check_range("min_p", sampling.min_p, 0.0, 1.0)
    _check_range("presence_penalty", sampling.presence_penalty, -2.0, 2.0)
    _check_range("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0)
    _check_range("repetition_penalty", sampling.repetition_penalty, 0.0, math.inf)
    if sampling.repetition_penalty == 0.0:
        raise wrong_field("params.repetition_penalty", "must be above 0")
    if sampling.max_tokens is not None:
        if sampling.max_tokens < 1:
            raise wrong_field("params.max_tokens", "must be at least 1")
        if sampling.min_tokens > sampling.max_tokens:
            raise wrong_field("params.min_tokens", f"above max_tokens ({sampling.max_tokens})")
    _check_range("top_logprobs", sampling.top_logprobs or 0, 0, MAX_TOP_LOGPROBS)
    _check_range("prompt_logprobs", sampling.prompt_logprobs or 0, 0, MAX_TOP_LOGPROBS)
    _check_sequences(sampling, facts)
    for token_id in sampling.stop_token_ids:
        _check_token("params.stop_token_ids", token_id, facts)
    for token_id, bias in sampling.logit_bias.items():
        _check_token("params.logit_bias", token_id, facts)
        _check_range(f"logit_bias[{token_id}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)


def _check_sequences(sampling: SamplingSpec, facts: EngineFacts) -> None:
    if len(sampling.bad_words) > MAX_BAD_WORDS:
        raise wrong_field("params.bad_words", f"at most {MAX_BAD_WORDS}, got {len(sampling.bad_words)}")
    for index, word in enumerate(sampling.bad_words):
        field_name = f"params.bad_words[{index}]"
        if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
            raise wrong_field(field_name, f"1 to {MAX_BAD_WORD_TOKENS} tokens, got {len(word)}")
        _check_token(field_name, max(word), facts)
    if len(sampling.forced_ids) > MAX_FORCED_IDS:
        raise wrong_field("params.forced_ids", f"at most {MAX_FORCED_IDS}, got {len(sampling.forced_ids)}")
    if sampling.forced_ids:
        _check_token("params.forced_ids", max(sampling.forced_ids), facts)


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high or math.isinf(value):
        bounds = f"at least {low:g}" if math.isinf(high) else f"in [{low:g}, {high:g}]"
        raise wrong_field(f"params.{name}", f"must be {bounds}, got {value:g}")


def _check_token(field_name: str, token_id: int, facts: EngineFacts) -> None:
    if token_id >= facts.vocab_size:
        raise wrong_field(
            field_name,
            f"token {token_id} is not below the vocabulary size {facts.vocab_size}",
            reason="TOKEN_OUT_OF_RANGE",
            token_id=token_id,
            vocab_size=facts.vocab_size,
        )
