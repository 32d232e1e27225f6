"""Steps on empty slots, before a worker serves: to compile kernels, and to learn what steps cost."""

from __future__ import annotations

import numpy as np
from shoal_model.segment import Segment

from shoal_engine.block_pool import BLOCK_TOKENS, blocks_for
from shoal_engine.model_port import DraftStart, Hidden, StepModel, TokenContext
from shoal_engine.requests import SamplingSpec


def run_rows(model: StepModel[Hidden], rows: int, *, table: int = 1) -> Hidden:
    """So many rows, all of which run both halves and are wanted: of several sequences of a block, or of a long one.

    table   blocks of the longest sequence. There is nothing in front of its rows: no window row, and of entries what
            blocks happen to hold

    Slots are cleared afterwards; blocks keep rows that no request has a claim on.
    """
    each = rows if table > 1 else BLOCK_TOKENS * -(-blocks_for(rows) // model.shape.slot_count)
    behind = max(0, table - blocks_for(min(rows, each))) * BLOCK_TOKENS
    parts = enumerate(range(0, rows, each))
    return _run(model, [_segment(model, slot, first, min(each, rows - first), behind) for slot, first in parts])


def run_choices(model: StepModel[Hidden], choices: int) -> Hidden:
    """One row of each of so many sequences, each in a slot and a block of its own where there are enough."""
    blocks = model.shape.block_count
    return _run(model, [_segment(model, slot, slot % blocks * BLOCK_TOKENS, 1, 0) for slot in range(choices)])


def context_of(spec: SamplingSpec) -> TokenContext:
    """Something to sample a row for."""
    return TokenContext(spec=spec, seed=1, output_index=1, prompt=np.zeros(1, dtype=np.int64), output=[0])


def run_draft(model: StepModel[Hidden], specs: list[SamplingSpec], width: int) -> None:
    """A first draft of a choice of each spec: nothing of what they would have said is there, and nothing is read."""
    starts = [
        DraftStart(
            slot=slot,
            position=BLOCK_TOKENS,
            token_id=0,
            window_start=BLOCK_TOKENS,
            context=context_of(spec),
            stop_ids=frozenset(),
            min_tokens=0,
        )
        for slot, spec in enumerate(specs)
    ]
    model.draft(starts, min(width, model.shape.draft_size))


def _run(model: StepModel[Hidden], segments: list[Segment]) -> Hidden:
    for segment in segments:
        model.clear_slot(segment.slot)
    hidden = model.forward(segments)
    for segment in segments:
        model.clear_slot(segment.slot)
    return hidden


def _segment(model: StepModel[Hidden], slot: int, first: int, rows: int, behind: int) -> Segment:
    """`rows` rows in blocks of their own; `first`: rows of the segments in front."""
    block = 1 + blocks_for(first)
    return Segment(
        slot=slot,
        block_table=np.arange(block, block + blocks_for(behind + rows)),
        start=behind,
        token_ids=np.arange(rows) % model.shape.vocab_size,
        lookback=[model.shape.pad_id] * 3,
        encoder_start=behind,
        decoder_window_start=behind,
        outputs=range(rows),
    )
