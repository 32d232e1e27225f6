"""Between the values of shoal_engine and those of this service."""

from __future__ import annotations

import time

import numpy as np
from shoal_engine import events as engine_events
from shoal_engine.constraint import Constraint
from shoal_engine.requests import ChoiceStart, GenerationRequest, SamplingSpec

from shoal_decode_worker.engine_like import StepEntry
from shoal_decode_worker.entries import FinishReason, PositionLogprobs, TokenEntry, TokenLogprob
from shoal_decode_worker.generation import GenerationStart

_REASONS = {
    engine_events.FinishReason.STOP: FinishReason.STOP,
    engine_events.FinishReason.LENGTH: FinishReason.LENGTH,
}


def engine_key(request_id: str, attempt: int) -> str:
    """What an attempt is called in the engine."""
    return f"{request_id}#{attempt}"


def attempt_of(key: str) -> tuple[str, int]:
    """Inverse of `engine_key`."""
    request_id, _, attempt = key.rpartition("#")
    return request_id, int(attempt)


def engine_request(key: str, start: GenerationStart, constraint: Constraint | None = None) -> GenerationRequest:
    """What the engine is asked for, with its constraint compiled. It arrives now, on the monotonic clock."""
    sampling = start.sampling
    return GenerationRequest(
        request_id=key,
        prompt_ids=np.array(start.prompt_ids, dtype=np.int64),
        params=SamplingSpec(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            stop_token_ids=frozenset(sampling.stop_token_ids),
            ignore_eos=sampling.ignore_eos,
            logit_bias=sampling.logit_bias,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            top_logprobs=sampling.top_logprobs,
            bad_words=sampling.bad_words,
            forced_ids=sampling.forced_ids,
            prompt_logprobs=sampling.prompt_logprobs,
        ),
        seed=sampling.seed,
        choices=tuple(ChoiceStart(output_ids=one.output_ids, is_finished=one.is_finished) for one in start.choices),
        priority=start.priority,
        arrival=time.monotonic(),
        recover_in_place=not start.gateway_id,
        constraint=constraint,
        cache_points=start.cache_points,
        export_chain=start.cache_root is not None,
    )


def step_entry(one: engine_events.TokenEntry) -> StepEntry:
    """Tokens as the service keeps them."""
    request_id, attempt = attempt_of(one.request_id)
    entry = TokenEntry(
        choice_index=one.choice,
        output_index=one.output_index,
        token_ids=one.token_ids,
        logprobs=tuple(_position(each) for each in one.logprobs),
        drafted_count=one.drafted,
        verified_count=one.verified,
        accepted_count=one.accepted,
        prompt_logprobs=tuple(_position(each) for each in one.prompt_logprobs),
        finish_reason=_REASONS[one.finish_reason] if one.finish_reason is not None else None,
        cached_tokens=one.cached_tokens,
    )
    return StepEntry(request_id, attempt, entry)


def _position(one: engine_events.PositionLogprobs) -> PositionLogprobs:
    return PositionLogprobs(
        emitted=TokenLogprob(token_id=one.emitted.token_id, logprob=one.emitted.logprob),
        top=tuple(TokenLogprob(token_id=each.token_id, logprob=each.logprob) for each in one.top),
    )
