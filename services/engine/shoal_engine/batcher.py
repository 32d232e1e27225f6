"""Which rows run in the next step. Pure.

Decode rows of all choices always run: they are few, and a choice that skips a step shows it at once. Prompt chunks, and
the chunks that rerun emitted tokens, fill what is left of the step's row budget, in order of priority and arrival.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChunkWork:
    """A run of positions [start, end) that may be done in pieces, but stops at every position of `cuts` (ascending)."""

    start: int
    end: int
    cuts: tuple[int, ...]
    priority: int
    arrival: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBudget:
    """Limits of one step.

    rows        rows of a step, decode rows included
    chunk       most rows of one chunk
    min_chunk   rows left to chunks however many decode rows there are, so that prompts never starve
    """

    rows: int = 512
    chunk: int = 256
    min_chunk: int = 64

    def __post_init__(self) -> None:
        if min(self.rows, self.chunk, self.min_chunk) < 1:
            raise ValueError(f"step budget must be positive, got {self}")


def next_stop(start: int, end: int, cuts: Sequence[int]) -> int:
    """Where the rows that begin at `start` must stop: the first cut after it, or `end`."""
    place = bisect_right(cuts, start)
    return min(end, cuts[place]) if place < len(cuts) else end


def plan_chunks(works: Sequence[ChunkWork], decode_rows: int, budget: StepBudget) -> list[int]:
    """Rows each work runs in this step, 0 for none; order and length of `works`.

    The first in (greater priority, earlier arrival, earlier place in `works`) always gets at least one row.
    """
    left = max(budget.rows - decode_rows, budget.min_chunk)
    counts = [0] * len(works)
    for i in sorted(range(len(works)), key=lambda i: (-works[i].priority, works[i].arrival, i)):
        if left == 0:
            break
        work = works[i]
        counts[i] = min(next_stop(work.start, work.end, work.cuts) - work.start, budget.chunk, left)
        left -= counts[i]
    return counts
