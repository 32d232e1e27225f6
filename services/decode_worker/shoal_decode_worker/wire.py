"""Between protobuf messages and this worker's values."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

from google.protobuf.internal.containers import RepeatedCompositeFieldContainer
from shoal.common.v1 import sampling_pb2, tokens_pb2
from shoal.decode.v1 import decode_service_pb2 as pb
from shoal_common.constraints import OutputConstraint
from shoal_common.constraints.wire import kind_and_text

from shoal_decode_worker.core import ChoiceStart
from shoal_decode_worker.entries import FinishReason, PositionLogprobs, TokenEntry, TokenLogprob
from shoal_decode_worker.frames import NextIndex
from shoal_decode_worker.generation import GenerationStart, PrefillTarget, SamplingSpec
from shoal_decode_worker.ledger import RequestLedger

_REASONS = {
    FinishReason.STOP: sampling_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: sampling_pb2.FINISH_REASON_LENGTH,
    FinishReason.UNKNOWN: sampling_pb2.FINISH_REASON_UNSPECIFIED,
}

_DEFAULTS = SamplingSpec(seed=0)


def start_from(request: pb.GenerateRequest, draw_seed: Callable[[], int]) -> GenerationStart:
    """The request as values; absent fields get their defaults, an absent seed is drawn."""
    choices = [ChoiceStart(output_ids=tuple(one.output_ids), is_finished=one.is_finished) for one in request.choices]
    return GenerationStart(
        request_id=request.request_id,
        attempt=request.attempt,
        gateway_id=request.gateway_id,
        numerics_id=request.numerics_id if request.HasField("numerics_id") else None,
        cache_root=request.cache_root if request.HasField("cache_root") else None,
        tenant_tag=request.tenant_tag,
        prompt_ids=array("I", request.prompt_ids),
        sampling=_sampling(request.params, draw_seed),
        choices=tuple(choices) or (ChoiceStart(),),
        prefill_targets=tuple(
            PrefillTarget(instance_id=one.instance_id, address=one.address) for one in request.prefill_targets
        ),
        priority=request.priority,
        cache_points=tuple(request.cache_points),
        is_exact=request.determinism == sampling_pb2.DETERMINISM_EXACT,
        constraint=_constraint(request.constraint) if request.HasField("constraint") else None,
        first_number=request.first_number,
    )


def _constraint(message: pb.OutputConstraint) -> OutputConstraint:
    kind, text = kind_and_text(message.constraint, "constraint.constraint")
    return OutputConstraint(kind=kind, text=text, engine=message.engine, start_after_ids=tuple(message.start_after_ids))


def _sampling(params: sampling_pb2.SamplingParams, draw_seed: Callable[[], int]) -> SamplingSpec:
    defaults = _DEFAULTS
    return SamplingSpec(
        seed=params.seed if params.HasField("seed") else draw_seed(),
        temperature=params.temperature if params.HasField("temperature") else defaults.temperature,
        top_k=params.top_k,
        top_p=params.top_p if params.HasField("top_p") else defaults.top_p,
        min_p=params.min_p,
        max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
        min_tokens=params.min_tokens,
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        logit_bias=dict(params.logit_bias),
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=(
            params.repetition_penalty if params.HasField("repetition_penalty") else defaults.repetition_penalty
        ),
        top_logprobs=params.top_logprobs if params.HasField("top_logprobs") else None,
        bad_words=tuple(tuple(word.ids) for word in params.bad_words),
        forced_ids=tuple(params.forced_ids),
        prompt_logprobs=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
    )


def next_indices_from(messages: Iterable[pb.NextIndex]) -> list[NextIndex]:
    """What a gateway wants next."""
    return [
        NextIndex(
            request_id=one.request_id,
            attempt=one.attempt,
            choice_index=one.choice_index,
            next_index=one.next_index,
        )
        for one in messages
    ]


def add_entry(entries: RepeatedCompositeFieldContainer[pb.Entry], request: RequestLedger, entry: TokenEntry) -> None:
    """Put an entry into a message, with the names of its request. Most have tokens and nothing else."""
    message = entries.add(
        request_id=request.request_id,
        attempt=request.attempt,
        choice_index=entry.choice_index,
        output_index=entry.output_index,
        token_ids=entry.token_ids,
    )
    if entry.drafted_count:
        message.drafted_count = entry.drafted_count
        message.verified_count = entry.verified_count
        message.accepted_count = entry.accepted_count
    if entry.logprobs:
        message.logprobs.extend(_position(one) for one in entry.logprobs)
    if entry.prompt_logprobs:
        message.prompt_logprobs.extend(_position(one) for one in entry.prompt_logprobs)
    if entry.cached_tokens is not None:
        message.cached_tokens = entry.cached_tokens
    if entry.finish_reason is not None:
        message.finish_reason = _REASONS[entry.finish_reason]


def _position(one: PositionLogprobs) -> tokens_pb2.PositionLogprobs:
    return tokens_pb2.PositionLogprobs(emitted=_logprob(one.emitted), top=[_logprob(other) for other in one.top])


def _logprob(one: TokenLogprob) -> tokens_pb2.TokenLogprob:
    return tokens_pb2.TokenLogprob(token_id=one.token_id, logprob=one.logprob)


def ended_message(request: RequestLedger) -> pb.Ended:
    """The last message of a request that is settled."""
    usage = request.usage
    ends = [choice.end for choice in request.choices]
    assert usage is not None
    return pb.Ended(
        choices=[
            pb.ChoiceEnd(finish_reason=_REASONS[end.finish_reason], token_count=end.token_count)
            for end in ends
            if end is not None
        ],
        usage=sampling_pb2.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=sum(end.token_count for end in ends if end is not None),
            cached_prompt_tokens=usage.cached_prompt_tokens,
            draft_tokens=usage.draft_tokens,
            accepted_draft_tokens=usage.accepted_draft_tokens,
            decode_step_count=usage.decode_step_count,
            drafted_by_position=usage.drafts.drafted,
            verified_by_position=usage.drafts.verified,
            accepted_by_position=usage.drafts.accepted,
        ),
    )
