"""From a request to its state: checks it against the model, and derives limits, seeds and choices. Pure."""

from __future__ import annotations

from collections.abc import Callable

from shoal_common.errors import InvalidArgument

from shoal_engine.acceptance import StopRule, end_after
from shoal_engine.admission import check_capacity, check_prompt, check_token_ids
from shoal_engine.constraint import Matcher
from shoal_engine.events import TokenEntry
from shoal_engine.model_port import ModelShape
from shoal_engine.requests import ChoiceStart, GenerationRequest, PrefillRequest
from shoal_engine.sequence import RequestState, Sequence

MAX_PROMPT_LOGPROBS = 1 << 18
"""Log-probabilities of one prompt that are reported: they travel in one message."""
_PREFILL_RULE = StopRule(stop_ids=frozenset(), min_tokens=0, max_tokens=1)
"""Of a request without output: blocks for the prompt, none for the one token that would get no KV anyway."""


def new_state(
    request: GenerationRequest | PrefillRequest,
    *,
    number: int,
    shape: ModelShape,
    max_context: int,
    choice_seed: Callable[[int, int], int],
) -> RequestState:
    """The state of a request that holds nothing yet.

    raises   PromptTooLong, TokenOutOfRange, InvalidArgument, ExceedsCapacity; what a matcher raises
    """
    is_generation = isinstance(request, GenerationRequest)
    length = len(request.prompt_ids)
    check_prompt(request.prompt_ids, vocab_size=shape.vocab_size, max_context=max_context, needs_output=is_generation)
    if isinstance(request, PrefillRequest):
        check_capacity(length, (ChoiceStart(),), _PREFILL_RULE, shape.block_count, shape.slot_count)
        return RequestState(request=request, number=number, sequences=[Sequence(0)], seeds=(), rule=_PREFILL_RULE)
    is_constrained = request.constraint is not None
    rule = StopRule.of(request.params, eos_id=shape.eos_id, room=max_context - length, is_constrained=is_constrained)
    check_token_ids("params.stop_token_ids", sorted(request.params.stop_token_ids), shape.vocab_size)
    check_token_ids("params.logit_bias", sorted(request.params.logit_bias), shape.vocab_size)
    for i, word in enumerate(request.params.bad_words):
        check_token_ids(f"params.bad_words[{i}]", word, shape.vocab_size)
    check_token_ids("params.forced_ids", request.params.forced_ids, shape.vocab_size)
    _check_forced_stops(request.params.forced_ids, rule)
    sequences = [_sequence(i, choice, rule, shape) for i, choice in enumerate(request.choices)]
    check_capacity(length, request.choices, rule, shape.block_count, shape.slot_count)
    for sequence in sequences:
        if not sequence.is_done:
            sequence.matcher = _matcher(request, sequence)
    return RequestState(
        request=request,
        number=number,
        sequences=sequences,
        seeds=tuple(choice_seed(request.seed, i) for i in range(len(sequences))),
        rule=rule,
    )


def check_prompt_logprobs(state: RequestState, replay_length: int) -> None:
    """Only rows of the decoder half have logits: of a prompt, the last `replay_length`. Raises InvalidArgument."""
    best = state.prompt_logprobs_wanted
    if best is None:
        return
    if state.prompt_length > replay_length:
        raise InvalidArgument.at(
            "params.prompt_logprobs",
            f"the last {replay_length} tokens of a prompt have logits here, this one has {state.prompt_length}",
            reason="PROMPT_LOGPROBS_NEED_FULL_REPLAY",
        )
    if state.prompt_length * (1 + best) > MAX_PROMPT_LOGPROBS:
        raise InvalidArgument.at(
            "params.prompt_logprobs",
            f"{state.prompt_length} tokens with {best} each are more than {MAX_PROMPT_LOGPROBS} values",
            reason="PROMPT_LOGPROBS_TOO_MANY",
        )


def entries_of_ended(state: RequestState) -> list[TokenEntry]:
    """Entries without tokens for choices that came with their last token, but without the word that it was.

    Nobody else can tell their readers, who wait for the end of every choice.
    """
    return [
        TokenEntry(
            request_id=state.request.request_id,
            attempt=state.request.attempt,
            choice=sequence.index,
            output_index=len(sequence.output),
            token_ids=(),
            finish_reason=sequence.finish_reason,
        )
        for sequence in state.sequences
        if sequence.finish_reason is not None
    ]


def _sequence(index: int, choice: ChoiceStart, rule: StopRule, shape: ModelShape) -> Sequence:
    field, output = f"choices[{index}].output_ids", list(choice.output_ids)
    check_token_ids(field, output, shape.vocab_size)
    if len(output) > rule.max_tokens:
        raise InvalidArgument.at(field, f"{len(output)} tokens are more than the {rule.max_tokens} that may come")
    sequence = Sequence(index, output=output, is_done=choice.is_finished)
    if output and not choice.is_finished:
        # It may have been interrupted between its last token and the word that it had ended.
        reason = end_after(output[-1], len(output), rule)
        if reason is not None:
            sequence.end(reason)
    return sequence


def _matcher(request: GenerationRequest, sequence: Sequence) -> Matcher | None:
    """Behind the tokens so far. Raises InvalidArgument for tokens that the constraint forbids, ConstraintFailed."""
    if request.constraint is None:
        return None
    matcher = request.constraint.matcher(avoids_end=request.params.ignore_eos)
    for place, token in enumerate(sequence.output):
        if not matcher.accept(token):
            field = f"choices[{sequence.index}].output_ids[{place}]"
            raise InvalidArgument.at(field, f"token {token} does not fit the constraint", reason="OUTPUT_UNFIT")
    return matcher


def _check_forced_stops(forced_ids: tuple[int, ...], rule: StopRule) -> None:
    for i, token in enumerate(forced_ids[: rule.min_tokens]):
        if token in rule.stop_ids:
            raise InvalidArgument.at(
                f"params.forced_ids[{i}]", f"token {token} ends the choice before min_tokens ({rule.min_tokens})"
            )
