"""Which tokens of a verify step are emitted, and where a choice ends. Pure. Source: dspark.md sections 6 and 10.2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal_engine.events import FinishReason
from shoal_engine.requests import SamplingSpec


@dataclass(frozen=True, slots=True)
class StopRule:
    """When a choice ends.

    stop_ids     end-of-sequence (unless ignored) and stop tokens; the one that ends the choice is its last token
    min_tokens   no stop before this many output tokens: stop ids are banned at output indices below it
    max_tokens   output tokens at most: the request's limit and the context's end, whichever comes first
    is_constrained   a constraint may leave nothing but an end: then that counts, even if ignored or below min_tokens
    """

    stop_ids: frozenset[int]
    min_tokens: int
    max_tokens: int
    is_constrained: bool = False

    @classmethod
    def of(cls, params: SamplingSpec, *, eos_id: int, room: int, is_constrained: bool = False) -> StopRule:
        """The rule of a request whose prompt leaves `room` positions in the context."""
        ends = frozenset({eos_id}) if is_constrained or not params.ignore_eos else frozenset[int]()
        stop_ids = params.stop_token_ids | ends
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        return cls(stop_ids, params.min_tokens, max_tokens, is_constrained)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The outcome of a verify step.

    emitted         how many of the sampled tokens are emitted, at least 1
    frontier        how many of the step's rows stay: their tokens are part of the output and their KV is valid
    accepted        accepted drafts among the emitted tokens
    finish_reason   set when the choice ends here
    """

    emitted: int
    frontier: int
    accepted: int
    finish_reason: FinishReason | None

    def below(self, count: int) -> Accepted:
        """The first `count` (fewer than emitted) tokens of it; nothing follows them."""
        assert count < self.emitted, "below what is emitted"
        return Accepted(emitted=count, frontier=count, accepted=min(count, self.accepted), finish_reason=None)


def accept(drafts: Sequence[int], sampled: Sequence[int], output_count: int, rule: StopRule) -> Accepted:
    """Compare the drafts with what the model sampled after each row, and cut at the first end.

    drafts         tokens of rows 1..v; row 0 is the last emitted token
    sampled        v + 1 tokens: the one after each row
    output_count   tokens emitted before this step, below rule.max_tokens
    """
    assert len(sampled) == len(drafts) + 1, "one sampled token per row"
    matching = 0
    while matching < len(drafts) and drafts[matching] == sampled[matching]:
        matching += 1
    for i in range(matching + 1):
        reason = end_after(sampled[i], output_count + i + 1, rule)
        if reason is not None:
            # An emitted draft token has a row of its own; the token sampled at the frontier has none yet.
            accepted = min(i + 1, matching)
            return Accepted(emitted=i + 1, frontier=1 + accepted, accepted=accepted, finish_reason=reason)
    return Accepted(emitted=matching + 1, frontier=matching + 1, accepted=matching, finish_reason=None)


def end_after(token: int, output_count: int, rule: StopRule) -> FinishReason | None:
    """Why a choice ends with `token` as its last of `output_count` tokens; None if it goes on."""
    if token in rule.stop_ids and (rule.is_constrained or output_count > rule.min_tokens):
        return FinishReason.STOP
    if output_count >= rule.max_tokens:
        return FinishReason.LENGTH
    return None
