"""What leaves an engine besides tokens: copies kept aside, blocks and snapshots for the cache, rows of a prefill."""

from __future__ import annotations

from typing import Generic

from shoal_engine.block_pool import BLOCK_TOKENS
from shoal_engine.events import EngineSink
from shoal_engine.handover import Exporter
from shoal_engine.model_port import Hidden
from shoal_engine.sequence import RequestState, Sequence
from shoal_engine.snapshots import floor_to_block


class WriteBack(Generic[Hidden]):
    """Follows the frontiers of sequences. Invariant: each block and snapshot of a request goes to the sink once."""

    def __init__(self, exporter: Exporter[Hidden], sink: EngineSink) -> None:
        self._exporter = exporter
        self._sink = sink

    def prompt_advanced(self, state: RequestState, lead: Sequence) -> None:
        """The prompt's frontier has moved, and the rings hold the window that ends at it."""
        request, position = state.request, lead.frontier
        rows: bytes | None = None
        if request.export_chain and position in state.cuts and position >= state.hit_tokens:
            rows = self._exporter.keep_copy(lead, position)
        if request.export_chain or state.is_prefill_only:
            self._export_blocks(state, lead)
        # After its block: the cache keeps no snapshot of a block that it does not have.
        if rows is not None and position in state.stored and position not in state.exported_snapshots:
            state.exported_snapshots.add(position)
            self._sink.on_snapshot(request.request_id, None, position, rows)
        if state.is_prefill_only:
            piece = self._exporter.window_piece(state, position)
            if piece:
                self._sink.on_prefill_rows(request.request_id, piece)

    def choice_advanced(self, state: RequestState, sequence: Sequence, old: int) -> None:
        """The accepted frontier of a choice has moved from `old`; the next step has not written yet."""
        position = floor_to_block(sequence.frontier)
        if state.request.export_chain and position > old:
            self._exporter.keep_copy(sequence, position)

    def choice_ended(self, state: RequestState, sequence: Sequence) -> None:
        """A normal end: full blocks below the output's end, and S(L) when its copy is kept."""
        request = state.request
        if not request.export_chain:
            return
        length = min(sequence.frontier, state.prompt_length + len(sequence.output))
        first, end = state.prompt_length // BLOCK_TOKENS, length // BLOCK_TOKENS
        if end > first:
            blocks = self._exporter.blocks(sequence, first, end)
            self._sink.on_full_blocks(request.request_id, sequence.index, first, blocks)
        position = self._exporter.stored_position(length)
        if position == 0 or position in state.exported_snapshots:
            return
        rows = sequence.copies.get(position)
        if rows is not None:
            if position <= state.prompt_length:
                state.exported_snapshots.add(position)
            choice = sequence.index if position > state.prompt_length else None
            self._sink.on_snapshot(request.request_id, choice, position, rows)

    def _export_blocks(self, state: RequestState, lead: Sequence) -> None:
        first, end = state.exported_blocks, lead.frontier // BLOCK_TOKENS
        if end <= first:
            return
        request_id = state.request.request_id
        blocks = self._exporter.blocks(lead, first, end)
        state.exported_blocks = end
        if state.is_prefill_only:
            self._sink.on_prefill_rows(request_id, self._exporter.block_rows(first, blocks))
        if state.request.export_chain:
            self._sink.on_full_blocks(request_id, None, first, blocks)
