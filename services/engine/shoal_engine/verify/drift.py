"""Whether the calibration still holds: the expected calibration error over recent drafts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BINS = 15
ALARM_ABOVE = 0.03
WINDOW = 16384  # drafts
LEAST = 4096  # fewer say little: that many well calibrated ones show an error of up to two per cent by chance


def expected_calibration_error(
    chances: NDArray[np.floating], hits: NDArray[np.bool_] | NDArray[np.floating], bins: int = BINS
) -> float:
    """Mean distance between what was expected and what came, over equal bins of the expectation, in [0, 1].

    chances, hits   [n]: expected chances in [0, 1], and whether it came; 0 for n = 0
    """
    if not len(chances):
        return 0.0
    at = np.minimum((chances * bins).astype(np.int64), bins - 1)
    apart = np.bincount(at, weights=chances.astype(np.float64), minlength=bins)
    apart -= np.bincount(at, weights=hits.astype(np.float64), minlength=bins)
    return float(np.abs(apart).sum() / len(chances))


class DriftWatch:
    """The error over the last drafts of one mode, in bounded memory."""

    def __init__(self, window: int = WINDOW, least: int = LEAST, alarm_above: float = ALARM_ABOVE) -> None:
        self._least, self._alarm_above = least, alarm_above
        self._bins = np.zeros(window, dtype=np.int64)
        self._apart = np.zeros(window)
        self._next = self._count = 0
        self._error: float | None = 0.0

    @property
    def error(self) -> float:
        """Expected calibration error over the window, 0 before the first draft."""
        if self._error is None:
            sums = np.bincount(self._bins, weights=self._apart, minlength=BINS)
            self._error = float(np.abs(sums).sum() / self._count)
        return self._error

    @property
    def is_alarmed(self) -> bool:
        """Whether the error is above the limit, with enough drafts to tell."""
        return self._count >= self._least and self.error > self._alarm_above

    def note(self, chances: NDArray[np.float32], hits: NDArray[np.bool_]) -> None:
        """Verified drafts: the expected chances that each and those before it are accepted, and whether they were."""
        if not len(chances):
            return
        window = len(self._apart)
        chances, hits = chances[-window:].astype(np.float64), hits[-window:]
        at = (self._next + np.arange(len(chances))) % window
        self._bins[at] = np.minimum((chances * BINS).astype(np.int64), BINS - 1)
        self._apart[at] = chances - hits
        self._next = int(at[-1] + 1) % window
        self._count = min(self._count + len(chances), window)
        self._error = None
