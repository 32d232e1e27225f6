"""What is known of conversations by how they begin: whether another turn comes, and after how long."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

ORIGINS = 256
_DECAY = 0.98
_PRIOR_PACE = 6.0
_PRIOR_HITS, _PRIOR_WAITS = 1.0, 2.0


class Origins:
    """Counts by origin, a number drawn from the first block of a chain: what begins with one system prompt is alike.

    Of each origin: in how many of the last hundred or so waits a next turn came, separately for the first wait of a
    conversation and for later ones, and the mean of the logarithm of how long it took. An origin that nothing is known
    of has an even chance and waits a minute.
    """

    def __init__(self) -> None:
        self._hits = np.full(2 * ORIGINS, _PRIOR_HITS)
        self._waits = np.full(2 * ORIGINS, _PRIOR_WAITS)
        self._pace_sums = np.full(ORIGINS, _PRIOR_PACE)
        self._pace_counts = np.ones(ORIGINS)

    def waits(self, origin: int, *, has_returned: bool) -> None:
        """A conversation waits for its next turn; `has_returned`: not for its second."""
        place = origin + ORIGINS * has_returned
        self._hits[place] *= _DECAY
        self._waits[place] = self._waits[place] * _DECAY + 1

    def returns(self, origin: int, pause_s: float, *, has_returned: bool) -> None:
        """The next turn came after this pause."""
        self._hits[origin + ORIGINS * has_returned] += 1
        self._pace_sums[origin] = self._pace_sums[origin] * _DECAY + math.log2(pause_s)
        self._pace_counts[origin] = self._pace_counts[origin] * _DECAY + 1

    def pace(self, origin: int) -> float:
        """Mean of log2 of the pauses in seconds."""
        return float(self._pace_sums[origin] / self._pace_counts[origin])

    def chances(self, places: NDArray[np.integer]) -> NDArray[np.float64]:
        """Share of waits that ended in a turn; a place is the origin, plus `ORIGINS` where a turn came before."""
        found: NDArray[np.float64] = np.minimum(self._hits[places] / self._waits[places], 1.0)
        return found
