"""What generation gives: tokens of one choice out of one step, and how a choice ended."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from shoal_common.draft_counts import DraftCounts


class FinishReason(Enum):
    """Why a choice ended."""

    STOP = "stop"
    """End-of-sequence token, stop token, or the caller said so."""
    LENGTH = "length"
    """max_tokens or the end of the context."""
    UNKNOWN = "unknown"
    """It had ended before the request came here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """One token and the natural logarithm of its probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionLogprobs:
    """Log-probabilities of one output position; `top` best first."""

    emitted: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(slots=True, kw_only=True)
class TokenEntry:
    """Consecutive tokens of one choice that came out of one step, or of several of which no reader was told yet. No
    tokens: only the end of the choice. Never changed once made; freezing it costs more than the rest of its way.

    logprobs        empty, or one per token
    drafted_count   drafts made for that step; `verified_count` of them were sent to verification, and
                    `accepted_count` of those accepted
    prompt_logprobs set in the first entry of choice 0 if asked for: one per prompt token after the first
    finish_reason   set in the last entry of a choice
    cached_tokens   set in the first entry of a request: prompt tokens whose KV was loaded
    """

    choice_index: int
    output_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()
    drafted_count: int = 0
    verified_count: int = 0
    accepted_count: int = 0
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    cached_tokens: int | None = None

    @property
    def next_index(self) -> int:
        """Output index after the last token."""
        return self.output_index + len(self.token_ids)

    @property
    def is_plain(self) -> bool:
        """Tokens and draft counts, nothing else."""
        return not (
            self.finish_reason is not None or self.logprobs or self.cached_tokens is not None or self.prompt_logprobs
        )

    def followed_by(self, other: TokenEntry) -> TokenEntry | None:
        """Both as one, where nothing is lost by it: log-probabilities and draft counts are of one step each."""
        if self.drafted_count or other.drafted_count or self.logprobs or other.logprobs or not self.token_ids:
            return None
        if other.prompt_logprobs or other.cached_tokens is not None:
            return None
        return TokenEntry(
            choice_index=self.choice_index,
            output_index=self.output_index,
            token_ids=self.token_ids + other.token_ids,
            prompt_logprobs=self.prompt_logprobs,
            finish_reason=other.finish_reason,
            cached_tokens=self.cached_tokens,
        )

    def from_index(self, index: int) -> TokenEntry:
        """Without the tokens below output index `index`."""
        drop = max(0, index - self.output_index)
        if drop == 0:
            return self
        return replace(
            self,
            output_index=self.output_index + drop,
            token_ids=self.token_ids[drop:],
            logprobs=self.logprobs[drop:],
            prompt_logprobs=(),
        )

    def below_index(self, index: int) -> TokenEntry:
        """Without the tokens at output index `index` and above; what follows is not the end then."""
        keep = max(0, index - self.output_index)
        if keep >= len(self.token_ids):
            return self
        return replace(self, token_ids=self.token_ids[:keep], logprobs=self.logprobs[:keep], finish_reason=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceEnd:
    """How a choice ended and how many output tokens it has, those from before a move included."""

    finish_reason: FinishReason
    token_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestUsage:
    """What a request used on this worker; token counts of the choices are in their ends.

    drafts   by draft position; `draft_tokens` counts those that were verified
    """

    prompt_tokens: int
    cached_prompt_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    decode_step_count: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)
