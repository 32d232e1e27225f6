"""One sequence driven by hand over a model: its tokens, its place in the cache, and the segments it puts into steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from shoal_model.draft import Anchor
from shoal_model.kv_layout import BLOCK_TOKENS
from shoal_model.model import Model
from shoal_model.rings import Ints
from shoal_model.rows import RowBatch, Segment
from shoal_model.trace import SILENT, Trace

LOOKBACK = 3


class SequenceRun:
    """A sequence in one state slot, with its own blocks.

    Invariant: the cache holds positions 0 .. length - 1 of `token_ids[:length]`; positions behind are never read.
    """

    def __init__(
        self,
        model: Model,
        *,
        slot: int,
        block_table: Sequence[int],
        prompt_length: int | None = None,
        replay_length: int | None = None,
    ) -> None:
        """`replay_length` K: rows before the prompt's last K skip the decoder half; None: no replay."""
        self.model = model
        self.slot = slot
        self.block_table = list(block_table)
        self.decoder_start = 0
        if replay_length is not None:
            if prompt_length is None:
                raise ValueError("replay needs the length of the prompt")
            self.decoder_start = max(0, prompt_length - replay_length)
        self.token_ids: list[int] = []
        model.cache.clear_slot(slot)

    @property
    def length(self) -> int:
        """Positions whose rows have run."""
        return len(self.token_ids)

    def lookback(self, start: int) -> Ints:
        """The three token ids before position `start`, pad id before the sequence."""
        engram = self.model.config.engram
        pad = engram.pad_token_id if engram else self.model.config.pad_token_id
        before = self.token_ids[max(0, start - LOOKBACK) : start]
        return np.array([pad] * (LOOKBACK - len(before)) + before, dtype=np.int64)

    def segment(self, token_ids: Sequence[int], outputs: Sequence[int]) -> Segment:
        """The rows that run `token_ids` next; `outputs` are the offsets whose hidden row is wanted."""
        return Segment(
            slot=self.slot,
            block_table=self.block_table,
            start=self.length,
            token_ids=token_ids,
            lookback=self.lookback(self.length),
            decoder_start=self.decoder_start,
            decoder_window_start=self.decoder_start,
            outputs=outputs,
        )

    def advance(self, token_ids: Sequence[int]) -> None:
        """These tokens have run."""
        self.token_ids.extend(token_ids)

    def rewind(self, length: int) -> None:
        """Forget the positions from `length` on: rejected drafts. The next rows overwrite them."""
        del self.token_ids[length:]

    def run(self, token_ids: Sequence[int], outputs: Sequence[int], trace: Trace = SILENT) -> Tensor:
        """Run tokens as a step of their own; hidden rows [outputs, D]."""
        result = self.model.forward(RowBatch(segments=(self.segment(token_ids, outputs),)), trace)
        self.advance(token_ids)
        return result.hidden

    def run_chunks(self, token_ids: Sequence[int], chunk: int) -> Tensor:
        """Run tokens in chunks; hidden row [1, D] of the last one."""
        for start in range(0, len(token_ids), chunk):
            part = token_ids[start : start + chunk]
            is_last = start + chunk >= len(token_ids)
            hidden = self.run(part, (len(part) - 1,) if is_last else ())
        return hidden

    def anchor(self, token_id: int) -> Anchor:
        """Where a draft after `token_id`, the newest token (not run yet), begins."""
        return Anchor(slot=self.slot, position=self.length, token_id=token_id, window_start=self.decoder_start)


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold `num_tokens` positions."""
    return -(-num_tokens // BLOCK_TOKENS)
