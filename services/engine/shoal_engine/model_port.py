"""What the engine needs of a model, as a Protocol: the seam behind which the real one or a test's toy stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from shoal_model.segment import Segment

from shoal_engine.constraint import Mask, Matcher
from shoal_engine.events import PositionLogprobs
from shoal_engine.logical_rows import RowKind
from shoal_engine.requests import SamplingSpec, TokenIds
from shoal_engine.token_history import TokenHistory


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The numbers of a model that the engine reckons with."""

    vocab_size: int
    max_context: int  # positions
    window: int  # W
    backtrack: int  # B
    encoder_layers: int  # E
    decoder_layers: int  # D
    draft_size: int  # drafts a round can make; 0 without a draft head
    eos_id: int
    pad_id: int
    block_count: int  # usable blocks, the null block not counted
    slot_count: int
    block_bytes: int
    has_open_pairs: bool  # some KV owner has ratio 2
    hidden_bytes: int  # of one final hidden row in bf16


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenContext:
    """Everything besides the logits that decides the token at one output index.

    output   tokens emitted so far; `assumed` the drafts that this row takes as emitted after them
    history  counts of this output; None: they are counted anew
    banned   ids that must not be chosen here, see `row_rules`; a forced id is `spec`'s
    mask     what the request's constraint allows here; None: anything
    """

    spec: SamplingSpec
    seed: int
    output_index: int
    prompt: TokenIds
    output: Sequence[int]
    assumed: Sequence[int] = ()
    history: TokenHistory | None = None
    banned: frozenset[int] = frozenset()
    mask: Mask | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """A chosen token; log-probabilities when the spec asks for them.

    is_stuck   no token may come here: token_id means nothing, and the request fails if this row counts
    """

    token_id: int
    logprobs: PositionLogprobs | None = None
    is_stuck: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStart:
    """Where a draft begins: the newest token, at `position`, not run yet; context keys below window_start do not exist.

    `context.output` ends with that token; the first draft is for output index context.output_index. `matcher` stands
    behind that token and is left there.
    """

    slot: int
    position: int
    token_id: int
    window_start: int
    context: TokenContext
    stop_ids: frozenset[int]  # banned at output indices below min_tokens
    min_tokens: int
    matcher: Matcher | None = None


@dataclass(frozen=True, slots=True)
class Draft:
    """Drafts of one choice.

    confidence_logits   the draft head's, per draft: raw
    margins             per draft: the largest minus the second of its logits with their noise; empty where unknown
    """

    token_ids: tuple[int, ...]
    confidence_logits: tuple[float, ...]
    margins: tuple[float, ...] = ()


Hidden = TypeVar("Hidden")


class StepModel(Protocol[Hidden]):
    """One model instance. Used by one thread. `Hidden` is a list of final hidden rows, opaque to the engine."""

    @property
    def shape(self) -> ModelShape: ...

    def forward(self, segments: Sequence[Segment]) -> Hidden:
        """Run one step; hidden rows in the order of the segments' outputs."""
        ...

    def sample(self, hidden: Hidden, rows: Sequence[int], contexts: Sequence[TokenContext]) -> list[Sampled]:
        """One token per (row, context) pair; a row may be used by several contexts."""
        ...

    def logprobs(
        self, hidden: Hidden, rows: Sequence[int], token_ids: Sequence[int], top: int
    ) -> list[PositionLogprobs]:
        """Per row the log-probability of the given token and of the `top` best, under the model: nothing processed."""
        ...

    def draft(self, starts: Sequence[DraftStart], width: int) -> list[Draft]:
        """`width` drafts (at most draft_size) per start, chosen with the noise of their output indices."""
        ...

    def choice_seed(self, seed: int, choice: int) -> int:
        """The noise seed of a choice."""
        ...

    def hidden_to_bytes(self, hidden: Hidden, row: int) -> bytes:
        """One hidden row as bf16, little endian."""
        ...

    def hidden_from_bytes(self, data: bytes) -> Hidden:
        """A list of one hidden row."""
        ...

    def clear_slot(self, slot: int) -> None:
        """A new sequence starts in this slot."""
        ...

    def copy_slot(self, source: int, target: int) -> None:
        """Make `target` hold what `source` holds."""
        ...

    def copy_block(self, source: int, target: int) -> None:
        """Make block `target` hold what `source` holds."""
        ...

    def read_block(self, block: int) -> bytes: ...

    def write_block(self, block: int, data: bytes | memoryview) -> None: ...

    def read_entries(self, block: int, num_tokens: int) -> bytes:
        """Logical rows of the first `num_tokens` positions of a block."""
        ...

    def write_entries(self, block: int, num_tokens: int, data: bytes | memoryview) -> None: ...

    def window_shape(self, kind: RowKind, positions: int) -> tuple[int, ...]:
        """[layers, positions, record bytes] of window rows."""
        ...

    def has_window(self, slot: int, kind: RowKind, low: int, high: int) -> bool:
        """Whether the rings hold every position of [low, high)."""
        ...

    def read_window(self, slot: int, kind: RowKind, low: int, high: int) -> bytes: ...

    def write_window(self, slot: int, kind: RowKind, low: int, high: int, data: bytes | memoryview) -> None: ...

    def open_pair_shape(self) -> tuple[int, ...]:
        """[ratio-2 sources, 2, head_dim] of float32."""
        ...

    def read_open_pair(self, slot: int, position: int) -> bytes: ...

    def write_open_pair(self, slot: int, position: int, data: bytes | memoryview) -> None: ...
