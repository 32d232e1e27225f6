"""What an engine tells: tokens, ends, failures, rows. Plain values and the Protocol of their receiver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from shoal_common.errors import MeshError

from shoal_engine.logical_rows import LogicalRows
from shoal_engine.planner import PlannerStats


class FinishReason(Enum):
    """Why a choice ended."""

    STOP = "stop"
    """End-of-sequence or stop token, or the caller's finish."""
    LENGTH = "length"
    """max_tokens or the end of the context."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and the natural logarithm of its probability in the processed distribution, -9999.0 if it was removed."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Log-probabilities of one output position: the emitted token, and the best ones, best first."""

    emitted: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEntry:
    """Consecutive tokens of one choice that came out of one step.

    output_index     of the first token, from 0
    logprobs         one per token when asked for, else empty
    drafted, verified, accepted    drafts made for the step that made these tokens, those sent to verification, and
                     accepted ones
    prompt_logprobs  set in the first entry of choice 0 when asked for: one per prompt token after the first
    finish_reason    set in the last entry of a choice that ended by itself
    cached_tokens    set in the first entry of a request: prompt tokens whose KV was loaded
    """

    request_id: str
    attempt: int
    choice: int
    output_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceEnd:
    """How a choice ended. `finish_reason` is None for a choice that had ended before the request came here."""

    finish_reason: FinishReason | None
    token_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUsage:
    """What a request used here. Output tokens count over all choices, tokens so far included; drafts only here.

    draft_tokens   sent to verification
    decode_steps   counts each choice in each step, so that accepted_draft_tokens / decode_steps is the accept length
    *_by_position  drafts made, verified and accepted by their place in the draft, as far as there were any
    """

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    draft_tokens: int
    accepted_draft_tokens: int
    decode_steps: int
    drafted_by_position: tuple[int, ...] = ()
    verified_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmitInfo:
    """An admitted request: blocks and slots it holds."""

    blocks: int
    slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """One moment of an engine, taken after a step. Times in seconds; `_ema` are exponential moving averages.

    running      requests that hold blocks
    waiting      requests that lost their blocks and wait to be recovered here
    runnable     requests with rows that could run in the next step

    accept_length_ema, verify_width   drafts accepted and verified per choice and step, moving averages
    prefill_tokens_per_s_ema   rows per second of steps with prompt chunks; 0 before any
    """

    running: int = 0
    waiting: int = 0
    runnable: int = 0
    block_count: int = 0
    free_blocks: int = 0
    slot_count: int = 0
    free_slots: int = 0
    step_count: int = 0
    step_time_ema_s: float = 0.0
    prefill_tokens_per_s_ema: float = 0.0
    accept_length_ema: float = 0.0
    verify_width: float = 0.0
    planner: PlannerStats = field(default_factory=PlannerStats)


class EngineSink(Protocol):
    """Receives an engine's events on its step thread. Must not block and must not raise."""

    def on_tokens(self, step: int, entries: Sequence[TokenEntry]) -> None:
        """Tokens of one step, at most one entry per choice; without tokens, that a choice had ended when it came."""

    def on_ended(self, request_id: str, attempt: int, ends: Sequence[ChoiceEnd], usage: EngineUsage) -> None:
        """All choices of a request have ended; what it held is free. The last event of a request that did not fail."""

    def on_failed(self, request_id: str, attempt: int, error: MeshError, next_indices: Sequence[int]) -> None:
        """A request left without an end (Moved, Superseded, Internal ...); what it held is free. Its last event.

        next_indices   per choice the output index that the next token would have had
        """

    def on_full_blocks(
        self, request_id: str, choice: int | None, first_block_index: int, blocks: Sequence[bytes]
    ) -> None:
        """Full blocks below the accepted frontier, each once; `choice` is None for blocks of the prompt alone."""

    def on_snapshot(self, request_id: str, choice: int | None, position: int, rows: bytes) -> None:
        """The window snapshot at `position`: encoder rows of positions position - W .. position - 1."""

    def on_prefill_rows(self, request_id: str, rows: Sequence[LogicalRows]) -> None:
        """Rows of a prefill request as they become final."""

    def on_prefilled(self, request_id: str, hidden_row: bytes, computed_tokens: int) -> None:
        """A prefill request is done, all its rows are out; what it held is free. Its last event.

        hidden_row        final hidden row of the last prompt position after the last norm, bf16 little endian
        computed_tokens   prompt tokens that ran through the encoder
        """
