"""Which rows run in the next step: the batcher and the width planner applied to the states of all requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shoal_engine.batcher import ChunkWork, StepBudget, plan_chunks
from shoal_engine.block_pool import BLOCK_TOKENS
from shoal_engine.planner import WidthPlanner, WidthView
from shoal_engine.requests import GenerationRequest
from shoal_engine.sequence import Phase, RequestState, Sequence
from shoal_engine.step import ChunkRows, DecodeRows, draft_cap

Cover = Callable[[RequestState, Sequence, int], bool]
"""Make the blocks of a choice cover so many positions. False: it lost its blocks instead."""


def in_order(states: Iterable[RequestState], phase: Phase) -> list[RequestState]:
    """The requests in a phase, those that are served first in front."""
    return sorted((state for state in states if state.phase is phase), key=lambda state: state.order)


def is_caught_up(state: RequestState, sequence: Sequence) -> bool:
    """Whether the next row of a choice with output is its last emitted token."""
    return sequence.frontier == state.prompt_length + len(sequence.output) - 1


def is_runnable(state: RequestState) -> bool:
    """Whether a step could run rows of this request."""
    if state.phase is Phase.DECODE:
        return any(not sequence.is_paused for sequence in state.live)
    return state.phase in (Phase.PREFILL, Phase.LOADED)


class StepPlan:
    """Plans steps over the requests of one engine, which it only reads."""

    def __init__(
        self, requests: Iterable[RequestState], planner: WidthPlanner, budget: StepBudget, cover: Cover
    ) -> None:
        self._requests = requests
        self._planner = planner
        self._budget = budget
        self._cover = cover

    def decodes(self) -> list[DecodeRows]:
        """Rows of every choice that generates, with blocks to hold them; may take the blocks of younger requests."""
        ready = [
            (state, sequence)
            for state in in_order(self._requests, Phase.DECODE)
            for sequence in state.live
            if sequence.output and not sequence.is_paused and is_caught_up(state, sequence)
        ]
        views = [_view(state, sequence, self._planner.max_width) for state, sequence in ready]
        widths = self._planner.widths(views)
        rows = []
        for index, ((state, sequence), view) in enumerate(zip(ready, views, strict=True)):
            width = widths[index]
            assert 0 <= width <= view.cap, f"planned width {width} is not in [0, {view.cap}]"
            if state.phase is Phase.DECODE and self._cover(state, sequence, sequence.frontier + 1 + width):
                rows.append(DecodeRows(state, sequence, width, index))
        # A request planned early may have given up its blocks to one planned later.
        return [row for row in rows if row.state.phase is Phase.DECODE]

    def chunks(self, decode_rows: int) -> list[ChunkRows]:
        """Pieces of prompts, and of emitted tokens that are rerun, beside `decode_rows` decode rows."""
        works: list[tuple[RequestState, Sequence, ChunkWork]] = []
        for state in in_order(self._requests, Phase.PREFILL):
            assert state.lead is not None, "a prompt runs in its lead"
            works.append((state, state.lead, _work(state, state.lead.frontier, state.prompt_length, state.cuts)))
        for state in in_order(self._requests, Phase.DECODE):
            for sequence in state.live:
                if sequence.output and not sequence.is_paused and not is_caught_up(state, sequence):
                    end = state.prompt_length + len(sequence.output) - 1
                    cuts = tuple(range(0, end, BLOCK_TOKENS)) if state.request.export_chain else ()
                    works.append((state, sequence, _work(state, sequence.frontier, end, cuts)))
        counts = plan_chunks([work for _, _, work in works], decode_rows, self._budget)
        return [ChunkRows(state, s, count) for (state, s, _), count in zip(works, counts, strict=True) if count]


def _view(state: RequestState, sequence: Sequence, max_width: int) -> WidthView:
    request = state.request
    assert isinstance(request, GenerationRequest), "only choices are decoded"
    assert sequence.slot is not None, "decode rows hold a slot"
    return WidthView(
        cap=min(len(sequence.drafts), draft_cap(state, sequence, max_width)),
        confidence_logits=sequence.confidence_logits,
        margins=sequence.margins,
        is_greedy=request.params.is_greedy,
        context=sequence.frontier,
        slot=sequence.slot,
        generation=sequence.slot_generation,
    )


def _work(state: RequestState, start: int, end: int, cuts: tuple[int, ...]) -> ChunkWork:
    return ChunkWork(start, end, cuts, state.request.priority, state.request.arrival)
