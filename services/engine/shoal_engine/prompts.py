"""A prompt from its first row to the choices that share it."""

from __future__ import annotations

from typing import Generic

from shoal_engine.block_pool import BLOCK_TOKENS
from shoal_engine.handover import lead_of
from shoal_engine.logical_rows import RowKind
from shoal_engine.model_port import Hidden, StepModel
from shoal_engine.replay import PromptRun, plan_prompt, recovery_decoder_start
from shoal_engine.sequence import Phase, RequestState, Sequence
from shoal_engine.snapshots import WindowCopies, copies_kept, prefill_cuts, stored_snapshots


class Prompts(Generic[Hidden]):
    """Plans prompt runs and hands a complete prompt to the choices of its request."""

    def __init__(self, model: StepModel[Hidden], replay_length: int) -> None:
        self._model = model
        self._shape = model.shape
        self._replay_length = replay_length

    def prepare(self, state: RequestState) -> None:
        """The request has just taken its slots: they hold nothing yet."""
        state.phase, state.run = Phase.ADMITTED, None
        state.hit_tokens, state.has_snapshot = 0, True
        state.loaded.clear()
        for sequence in state.live:
            assert sequence.slot is not None, "live choices hold a slot"
            self._model.clear_slot(sequence.slot)
            sequence.frontier = 0
            sequence.drop_drafts()
            sequence.copies = WindowCopies(copies_kept(self._replay_length))

    def plan(self, state: RequestState) -> PromptRun:
        """Decide how the prompt is run from what is loaded, where it stops and which snapshots it stores."""
        state.run = plan_prompt(
            state.prompt_length,
            state.hit_tokens,
            state.has_snapshot,
            replay_length=self._replay_length,
            encoder_layers=self._shape.encoder_layers,
            window=self._shape.window,
        )
        arguments = (state.prompt_length, self._replay_length, state.request.cache_points, state.branch_tokens)
        state.cuts = prefill_cuts(state.hit_tokens, *arguments)
        state.stored = frozenset(stored_snapshots(*arguments))
        if not state.has_snapshot:
            # Warm replay rebuilds the window that ends at the hit, and gives it back to the cache.
            state.cuts = (state.hit_tokens, *state.cuts)
            state.stored |= {state.hit_tokens}
        return state.run

    def start(self, state: RequestState) -> None:
        """Run the prompt from the next step on."""
        lead, slot = lead_of(state)
        if any(kind is not RowKind.BLOCK for kind, _ in state.loaded):
            # Rows of a hand-over that never came to its end: the rings are not those of the hit any more.
            self._model.clear_slot(slot)
            state.has_snapshot = state.hit_tokens == 0
            state.loaded.clear()
            lead.copies = WindowCopies(copies_kept(self._replay_length))
        state.prompt_logprobs.clear()
        lead.frontier = self.plan(state).run_start
        state.phase = Phase.PREFILL

    def share(self, state: RequestState) -> list[Sequence]:
        """Give a complete prompt to every live choice; returns those that have said nothing yet."""
        lead, slot = lead_of(state)
        run, length = state.run, state.prompt_length
        assert run is not None, "a complete prompt was planned"
        has_context = state.phase is not Phase.LOADED or self._has_draft_window(slot, length)
        for sequence in state.live:
            if sequence is not lead:
                self._copy(lead, slot, sequence, length)
            sequence.frontier = length
            sequence.decoder_window_start = self._decoder_window_start(sequence, run, length)
            sequence.draft_window_start = sequence.decoder_window_start if has_context else length
        state.lead, state.phase = None, Phase.DECODE
        return [sequence for sequence in state.live if not sequence.output]

    def _copy(self, lead: Sequence, lead_slot: int, sequence: Sequence, length: int) -> None:
        """Full blocks are shared; the partial last one and the rings go on differently in each choice."""
        assert sequence.slot is not None, "live choices hold a slot"
        self._model.copy_slot(lead_slot, sequence.slot)
        if length % BLOCK_TOKENS:
            place = length // BLOCK_TOKENS
            self._model.copy_block(lead.blocks[place], sequence.blocks[place])
        sequence.copies = lead.copies.clone()

    def _decoder_window_start(self, sequence: Sequence, run: PromptRun, length: int) -> int:
        if not sequence.output:
            return run.decoder_start
        # Decoder rows of emitted tokens that nothing to come can depend on are not rerun.
        last, shape = length + len(sequence.output) - 1, self._shape
        reach = recovery_decoder_start(last, decoder_layers=shape.decoder_layers, window=shape.window)
        return max(run.decoder_start, reach)

    def _has_draft_window(self, slot: int, length: int) -> bool:
        low = max(0, length - self._shape.window)
        return self._shape.draft_size > 0 and self._model.has_window(slot, RowKind.DRAFT_WINDOW, low, length)
