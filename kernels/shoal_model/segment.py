"""What a step is asked to run, as plain values: no torch, so that whoever plans steps needs none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """One sequence's consecutive rows in a step: a prefill chunk, a decode row, or a row with its drafts.

    Where decoder rows below some position are skipped on purpose (exact recovery of a long answer), that position is
    both `decoder_start` and `decoder_window_start`: rows D * (W - 1) positions later are not touched by the cut.
    """

    slot: int
    block_table: Sequence[int] | Ints  # block ids in position order, covering every position of the rows
    start: int  # position of the first row
    token_ids: Sequence[int] | Ints  # rows start .. start + n - 1
    lookback: Sequence[int] | Ints  # the three token ids before `start`, pad id before position 0
    encoder_start: int = 0  # window keys of encoder layers below are invisible (warm replay)
    entry_start: int = 0  # no compressed entry of positions below is stored: it is in the blocks already
    decoder_start: int | None = 0  # rows from this position on run the decoder half; None: no row does
    decoder_window_start: int = 0  # lowest position whose decoder window key exists (Lp - K of the prompt)
    outputs: Sequence[int] = ()  # offsets into the rows whose final hidden row is wanted, ascending


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBatch:
    """The segments of one step. Slots are distinct; rows keep the order of the segments."""

    segments: tuple[Segment, ...]
