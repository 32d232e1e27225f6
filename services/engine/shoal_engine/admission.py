"""What a request must hold, and who gives up its blocks. Pure. Source: mesh.md section 4.4."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal_common.errors import InvalidArgument

from shoal_engine.acceptance import StopRule
from shoal_engine.block_pool import BLOCK_TOKENS, blocks_for
from shoal_engine.errors import ExceedsCapacity, PromptTooLong, TokenOutOfRange
from shoal_engine.requests import ChoiceStart, TokenIds
from shoal_engine.sequence import RequestState


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """How many blocks a choice holds ahead of what it needs.

    admitted_output   output tokens for which blocks are held from admission on
    blocks            what it grows by when they are used up
    """

    admitted_output: int = 2048
    blocks: int = 16

    def __post_init__(self) -> None:
        if min(self.admitted_output, self.blocks) < 1:
            raise ValueError(f"growth must be positive, got {self}")


def check_prompt(prompt_ids: TokenIds, *, vocab_size: int, max_context: int, needs_output: bool) -> None:
    """Raises PromptTooLong or TokenOutOfRange."""
    room = 1 if needs_output else 0
    if len(prompt_ids) + room > max_context:
        raise PromptTooLong.at(
            "prompt_ids",
            f"{len(prompt_ids)} tokens leave no room in a context of {max_context}",
            reason=PromptTooLong.reason,
        )
    outside = (prompt_ids < 0) | (prompt_ids >= vocab_size)
    if outside.any():
        first = int(outside.argmax())
        raise _out_of_range(f"prompt_ids[{first}]", int(prompt_ids[first]), vocab_size)


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises TokenOutOfRange naming the first id that is not in [0, vocab_size)."""
    for i, token in enumerate(token_ids):
        if not 0 <= token < vocab_size:
            raise _out_of_range(f"{field}[{i}]", token, vocab_size)


def _out_of_range(field: str, token: int, vocab_size: int) -> InvalidArgument:
    description = f"token id {token} is not below the vocabulary size {vocab_size}"
    return TokenOutOfRange.at(field, description, reason=TokenOutOfRange.reason)


def shared_blocks(prompt_length: int) -> int:
    """Full blocks of the prompt: one copy serves all choices."""
    return prompt_length // BLOCK_TOKENS


def own_blocks(prompt_length: int, outputs: int) -> int:
    """Blocks of one choice beyond the shared ones, for `outputs` tokens of which the last gets no KV."""
    return blocks_for(prompt_length + max(outputs - 1, 0)) - shared_blocks(prompt_length)


def blocks_to_admit(
    prompt_length: int, choices: Iterable[ChoiceStart], rule: StopRule, growth: Growth
) -> tuple[int, list[int]]:
    """Shared blocks, and the own blocks of every unfinished choice, that the request holds from admission on.

    These cover prompt + tokens so far + min(rest, growth.admitted_output).
    """
    own = []
    for choice in choices:
        if not choice.is_finished:
            so_far = len(choice.output_ids)
            own.append(own_blocks(prompt_length, so_far + min(rule.max_tokens - so_far, growth.admitted_output)))
    # Without a choice to run the prompt does not run either.
    return shared_blocks(prompt_length) if own else 0, own


def check_capacity(prompt_length: int, choices: Sequence[ChoiceStart], rule: StopRule, blocks: int, slots: int) -> None:
    """Raises ExceedsCapacity when prompt + max_tokens over all choices do not fit into an empty engine."""
    unfinished = sum(not choice.is_finished for choice in choices)
    if unfinished > slots:
        raise ExceedsCapacity(f"{unfinished} choices do not fit {slots} slots", choices=unfinished, slot_count=slots)
    wanted = shared_blocks(prompt_length) + unfinished * own_blocks(prompt_length, rule.max_tokens)
    if wanted > blocks:
        raise ExceedsCapacity(
            f"{prompt_length} prompt tokens and {rule.max_tokens} output tokens of {unfinished} choices need {wanted} "
            f"blocks of {blocks}",
            wanted=wanted,
            block_count=blocks,
        )


def choose_victim(holders: Iterable[RequestState]) -> RequestState:
    """Who gives up its blocks: the youngest request of the lowest priority. `holders` is not empty."""
    return max(holders, key=lambda state: state.order)


def choice_starts(state: RequestState) -> list[ChoiceStart]:
    """The choices of a request as they stand now."""
    return [ChoiceStart(output_ids=tuple(s.output), is_finished=s.is_done) for s in state.sequences]
