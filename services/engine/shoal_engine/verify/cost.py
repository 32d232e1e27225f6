"""What a step costs, from a table measured at start and the steps since. Source: dspark.md section 5.2."""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from shoal_engine.planner import StepTimes

LEAST_RISE = 1.05
"""A table whose largest step costs less than this times its smallest says nothing: every draft would look free."""

_WINDOW = 4096  # steps that the context's slope is estimated from
_REFINE_EVERY = 64  # steps
_LEAST_PER_BUCKET = 10
_RECENT, _LEAST_RECENT = 9, 5
_RECENT_ALL = 257
_COST_BELOW_BASE = 0.5  # corrections never make a step cheaper than this share of its table's cost


class FlatCosts(ValueError):
    """A cost table that must not steer a planner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """Measured seconds. Raises FlatCosts where they cannot be told from a constant, ValueError for broken numbers.

    rows, step_s          rows of a step, ascending from 1, and what a step of so many takes with the choice of a token
                          from each
    choices, sampler_s    choices of a step, ascending from 1, and what so many take beyond the cost of their rows
    draft_s               what drafting for so many choices takes, all draft positions
    is_staircase          a step runs padded to the next of `rows`; else costs between them are interpolated
    """

    rows: tuple[int, ...]
    step_s: tuple[float, ...]
    choices: tuple[int, ...]
    sampler_s: tuple[float, ...]
    draft_s: tuple[float, ...]
    is_staircase: bool = False

    def __post_init__(self) -> None:
        for name, counts, times in (
            ("step_s", self.rows, (self.step_s,)),
            ("choices", self.choices, (self.sampler_s, self.draft_s)),
        ):
            if not counts or counts[0] != 1 or any(b <= a for a, b in itertools.pairwise(counts)):
                raise ValueError(f"{name}: counts must ascend from 1, got {list(counts)}")
            for values in times:
                if len(values) != len(counts) or not all(math.isfinite(v) and v >= 0.0 for v in values):
                    raise ValueError(f"{name}: {len(counts)} times of at least 0 s wanted, got {list(values)}")
        if self.step_s[0] <= 0.0:
            raise ValueError("step_s: a step of one row takes no time")
        if len(self.rows) < 2 or max(self.step_s) < LEAST_RISE * min(self.step_s):
            raise FlatCosts(
                f"a step of {self.rows[-1]} rows takes {max(self.step_s) * 1e3:.3g} ms, one of 1 row "
                f"{min(self.step_s) * 1e3:.3g} ms: no rise"
            )

    def by_rows(self, most: int) -> NDArray[np.float64]:
        """float64 [most + 1]: seconds of a step of 0 .. most rows, never falling; beyond the table its last slope."""
        rows, times = np.array(self.rows), np.maximum.accumulate(np.array(self.step_s))
        wanted = np.arange(most + 1)
        slope = (times[-1] - times[0]) / (rows[-1] - rows[0])
        beyond = np.maximum(wanted - rows[-1], 0) * slope
        if self.is_staircase:
            found = times[np.minimum(np.searchsorted(rows, wanted), len(rows) - 1)]
        else:
            found = np.interp(wanted, rows, times)
        result: NDArray[np.float64] = found + beyond
        return result

    def bucket_of(self, rows: int) -> int:
        """Which of `rows` a step belongs to: the next one, the last for larger steps."""
        return min(int(np.searchsorted(self.rows, rows)), len(self.rows) - 1)


class CostModel:
    """Seconds of a step = base[rows] + s * context + draft[drafted choices] + sampler[choices].

    base is the table's. s, sampler and draft are corrected by medians over steps without prompt rows: s is the median
    over row counts of the median residual per position of context (never negative), sampler and draft the median of the
    last few steps with so many choices, or else of all recent steps.
    """

    def __init__(self, table: CostTable, max_rows: int) -> None:
        self._table = table
        self._base = table.by_rows(max_rows)
        self._slope = 0.0
        self._steps: deque[tuple[int, float, int]] = deque(maxlen=_WINDOW)  # bucket, residual, context
        self._since_refined = 0
        self._sampler = _Correction(table.choices, table.sampler_s)
        self._draft = _Correction(table.choices, table.draft_s)

    @property
    def context_slope(self) -> float:
        """s, in seconds per position."""
        return self._slope

    def draft_s(self, choices: int) -> float:
        """Seconds of drafting for so many choices; 0 for none."""
        return max(self._draft.at(choices), 0.0) if choices else 0.0

    def costs(self, rows: int, count: int, *, choices: int, context: int, drafted: int) -> NDArray[np.float64]:
        """float64 [count + 1]: seconds of steps of rows, rows + 1 .. rows + count rows. Positive, never falling."""
        if rows + count >= len(self._base):
            self._base = self._table.by_rows(2 * (rows + count))
        base = self._base[rows : rows + count + 1]
        constant = self._slope * context + self._sampler.at(choices)
        # A correction learned from slower steps may be below zero, but a step is never free.
        constant = max(constant, (_COST_BELOW_BASE - 1.0) * float(base[0]))
        return base + (constant + self.draft_s(drafted))

    def observe(self, step: StepTimes) -> None:
        """Learn from a step. Steps with prompt rows, or without choices, say nothing about decoding."""
        if step.drafted:
            self._draft.note(step.drafted, step.draft_s)
        if step.prompt_rows or not step.choices or step.rows >= len(self._base):
            return
        residual = step.step_s - float(self._base[step.rows])
        self._steps.append(
            (self._table.bucket_of(step.rows), residual - self._sampler.measured(step.choices), step.context)
        )
        self._sampler.note(step.choices, residual - self._slope * step.context)
        self._since_refined += 1
        if self._since_refined >= _REFINE_EVERY:
            self._since_refined = 0
            self._refine_slope()

    def _refine_slope(self) -> None:
        buckets, residuals, contexts = (np.array(column) for column in zip(*self._steps, strict=True))
        per_position = residuals / np.maximum(contexts, 1)
        medians = [
            float(np.median(per_position[buckets == bucket]))
            for bucket in np.unique(buckets)
            if np.count_nonzero(buckets == bucket) >= _LEAST_PER_BUCKET
        ]
        if medians:
            self._slope = max(0.0, median(medians))


class _Correction:
    """Seconds by number of choices: measured at start, then medians of what steps took."""

    def __init__(self, counts: tuple[int, ...], measured_s: tuple[float, ...]) -> None:
        self._counts, self._measured_s = counts, measured_s
        self._recent: dict[int, deque[float]] = {}
        self._apart: deque[float] = deque(maxlen=_RECENT_ALL)  # of every step: what it took beyond the measured
        self._noted = 0
        self._offset = 0.0

    def measured(self, count: int) -> float:
        """As measured at start."""
        return float(np.interp(count, self._counts, self._measured_s))

    def at(self, count: int) -> float:
        """Seconds for so many choices, by what is known now."""
        recent = self._recent.get(count)
        if recent is not None and len(recent) >= _LEAST_RECENT:
            return median(recent)
        return self.measured(count) + self._offset

    def note(self, count: int, seconds: float) -> None:
        """A step took so long for so many choices."""
        self._recent.setdefault(count, deque(maxlen=_RECENT)).append(seconds)
        self._apart.append(seconds - self.measured(count))
        self._noted += 1
        if self._noted % _LEAST_RECENT == 0:
            self._offset = median(self._apart)
