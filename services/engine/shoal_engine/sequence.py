"""The state of one request and of its sequences. No torch: what is kept here is ids, counts and bytes.

Positions 0 .. Lp - 1 are the prompt, Lp + i is output token i. A sequence's frontier is the number of positions whose
KV exists and counts. In generation the last emitted token has no KV yet: frontier = Lp + outputs - 1, and that token is
the first row of the next step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from shoal_common.draft_counts import DraftCounts
from shoal_common.errors import MeshError

from shoal_engine.acceptance import StopRule
from shoal_engine.block_pool import BLOCK_TOKENS
from shoal_engine.constraint import Matcher
from shoal_engine.events import ChoiceEnd, EngineUsage, FinishReason, PositionLogprobs
from shoal_engine.logical_rows import RowKind
from shoal_engine.replay import PromptRun
from shoal_engine.requests import GenerationRequest, PrefillRequest, TokenIds
from shoal_engine.snapshots import WindowCopies
from shoal_engine.token_history import TokenHistory

LOOKBACK = 3
"""Token ids before a row that Engram looks at."""


class Phase(Enum):
    """Where a request stands."""

    ADMITTED = "admitted"
    """Holds its blocks and slots; rows may be loaded."""
    LOADED = "loaded"
    """Its whole prompt was loaded; the next step samples the first tokens."""
    PREFILL = "prefill"
    """Its prompt is being run."""
    DECODE = "decode"
    """Its choices run."""
    WAITING = "waiting"
    """Lost its blocks and slots; runs again when they are free."""
    GONE = "gone"
    """Left the engine."""


@dataclass(slots=True)
class Sequence:
    """One choice of a request, or the prompt of a prefill request."""

    index: int
    output: list[int] = field(default_factory=list)
    history: TokenHistory | None = None  # of the output, where penalties need it
    matcher: Matcher | None = None  # behind the last output token, where the request has a constraint
    is_done: bool = False
    finish_reason: FinishReason | None = None
    is_paused: bool = False
    is_stuck: bool = False  # no token may come next: its request fails
    failure: MeshError | None = None  # of its constraint, why it is stuck
    slot: int | None = None
    slot_generation: int = 0
    blocks: list[int] = field(default_factory=list)
    frontier: int = 0
    drafts: list[int] = field(default_factory=list)
    confidence_logits: tuple[float, ...] = ()
    margins: tuple[float, ...] = ()
    decoder_window_start: int = 0
    draft_window_start: int = 0
    copies: WindowCopies = field(default_factory=lambda: WindowCopies(1))

    @property
    def capacity(self) -> int:
        """Positions its blocks cover."""
        return len(self.blocks) * BLOCK_TOKENS

    def end(self, reason: FinishReason | None) -> None:
        """No more rows run for it."""
        self.is_done, self.finish_reason = True, reason
        self.drop_drafts()

    def drop_drafts(self) -> None:
        """It has no drafts."""
        self.drafts, self.confidence_logits, self.margins = [], (), ()


@dataclass(slots=True, kw_only=True)
class RequestState:
    """A request in the engine.

    Invariant: every live choice holds a slot and blocks, except in Phase.WAITING and GONE, where nothing is held.
    """

    request: GenerationRequest | PrefillRequest
    number: int  # admission order, breaks ties of arrival
    sequences: list[Sequence]
    seeds: tuple[int, ...]
    rule: StopRule
    phase: Phase = Phase.ADMITTED
    lead: Sequence | None = None  # whose slot and blocks the prompt runs in; it may end before the prompt does
    is_started: bool = False
    run: PromptRun | None = None
    hit_tokens: int = 0
    has_snapshot: bool = True  # of the hit; a hit of 0 needs none
    branch_tokens: int = 0
    cached_tokens: int = 0
    cuts: tuple[int, ...] = ()
    stored: frozenset[int] = frozenset()  # snapshots that the prefill hands to the sink
    loaded: set[tuple[RowKind, int]] = field(default_factory=set)  # kind and first position of loaded rows
    exported_blocks: int = 0  # leading prompt blocks that the sink has, or that came from a cache
    exported_snapshots: set[int] = field(default_factory=set)
    has_entry: bool = False  # the sink has had an entry of it
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)  # of the prompt's rows that have run
    drafts: DraftCounts = field(default_factory=DraftCounts)
    decode_steps: int = 0

    @property
    def prompt_logprobs_wanted(self) -> int | None:
        """How many of the best per prompt position are still to be reported, see `SamplingSpec.prompt_logprobs`."""
        if isinstance(self.request, PrefillRequest) or self.sequences[0].output or self.sequences[0].is_done:
            return None
        return self.request.params.prompt_logprobs

    @property
    def prompt(self) -> TokenIds:
        return self.request.prompt_ids

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def is_prefill_only(self) -> bool:
        return isinstance(self.request, PrefillRequest)

    @property
    def order(self) -> tuple[int, float, int]:
        """Sort key: who is served first and gives up its blocks last."""
        return (-self.request.priority, self.request.arrival, self.number)

    @property
    def live(self) -> list[Sequence]:
        """Choices that have not ended."""
        return [s for s in self.sequences if not s.is_done]

    def position_limit(self, sequence: Sequence) -> int:
        """Positions that can ever get KV: the last output token never runs."""
        return self.prompt_length if self.is_prefill_only else self.prompt_length + self.rule.max_tokens - 1

    def tokens(self, sequence: Sequence, low: int, high: int) -> TokenIds:
        """Token ids of positions [low, high)."""
        length = self.prompt_length
        if high <= length:
            return self.prompt[low:high]
        output = np.array(sequence.output[max(0, low - length) : high - length], dtype=np.int64)
        return output if low >= length else np.concatenate([self.prompt[low:], output])

    def lookback(self, sequence: Sequence, start: int, pad_id: int) -> list[int]:
        """The three token ids before `start`, pads before position 0."""
        return [
            pad_id
            if p < 0
            else int(self.prompt[p])
            if p < self.prompt_length
            else sequence.output[p - self.prompt_length]
            for p in range(start - LOOKBACK, start)
        ]

    def next_indices(self) -> tuple[int, ...]:
        """Per choice, the output index of its next token."""
        return () if self.is_prefill_only else tuple(len(s.output) for s in self.sequences)

    def ends(self) -> list[ChoiceEnd]:
        """How every choice ended."""
        return [ChoiceEnd(finish_reason=s.finish_reason, token_count=len(s.output)) for s in self.sequences]

    def usage(self) -> EngineUsage:
        """Exact token counts so far."""
        return EngineUsage(
            prompt_tokens=self.prompt_length,
            output_tokens=sum(len(s.output) for s in self.sequences),
            cached_tokens=self.cached_tokens,
            draft_tokens=sum(self.drafts.verified),
            accepted_draft_tokens=sum(self.drafts.accepted),
            decode_steps=self.decode_steps,
            drafted_by_position=tuple(self.drafts.drafted),
            verified_by_position=tuple(self.drafts.verified),
            accepted_by_position=tuple(self.drafts.accepted),
        )
