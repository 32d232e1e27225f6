"""What a row is worth: least hit density, learned from this node's own hits.

Source: Beckmann, Chen, Cidon, "LHD: Improving Cache Hit Rate by Maximizing Hit Density", NSDI 2018. An entry of class c
that was last used a steps ago is worth (expected hits still to come) / (expected time it will lie here), each learned
as counts of hits and evictions by class and age. Differences to the paper: ages are in logarithmic bins, a step is one
stored entry, and only leaves of the hash tree are compared.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

AGE_BINS = 128
_BINS_PER_OCTAVE = 4
CLASSES = 256
_DECAY = 0.9

Ages = NDArray[np.uint32]
Classes = NDArray[np.uint8]


def age_bins(ages: Ages) -> NDArray[np.int64]:
    """The bin of each age: four to an octave, 0 for ages below 2."""
    return (np.log2(np.maximum(ages, 1).astype(np.float64)) * _BINS_PER_OCTAVE).astype(np.int64)


class HitDensity:
    """Densities by class and age of one tier, renewed after so many events; older events count less and less."""

    def __init__(self, *, renew_after: int = 1 << 16, prior_hits: float = 1.0) -> None:
        self._hits = np.zeros((CLASSES, AGE_BINS))
        self._evictions = np.zeros((CLASSES, AGE_BINS))
        edges = 2.0 ** (np.arange(AGE_BINS + 1) / _BINS_PER_OCTAVE)
        self._widths = np.diff(edges)
        self._prior = prior_hits
        self._renew_after, self._events = renew_after, 0
        self._density = self._learned()

    def density(self, classes: Classes, ages: Ages) -> NDArray[np.float64]:
        """Hits to come, per step."""
        found: NDArray[np.float64] = self._density[classes, age_bins(ages)]
        return found

    def hit(self, classes: Classes, ages: Ages) -> None:
        """Rows of these classes were used at these ages."""
        np.add.at(self._hits, (classes, age_bins(ages)), 1.0)
        self._count(len(classes))

    def evicted(self, row_class: int, age: int, count: int) -> None:
        """So many rows of one class went at this age."""
        self._evictions[row_class, int(math.log2(max(age, 1)) * _BINS_PER_OCTAVE)] += count
        self._count(count)

    def _count(self, events: int) -> None:
        self._events += events
        if self._events >= self._renew_after:
            self._events = 0
            self._density = self._learned()
            self._hits *= _DECAY
            self._evictions *= _DECAY

    def _learned(self) -> NDArray[np.float64]:
        """Hits from here on over lifetime from here on. With no events it falls as 1 / age, as LRU would have it."""
        hits = self._hits + self._prior / AGE_BINS
        ends = hits + self._evictions
        hits_on = np.cumsum(hits[:, ::-1], axis=1)[:, ::-1]
        ends_on = np.cumsum(ends[:, ::-1], axis=1)[:, ::-1]
        time_on = np.cumsum(((ends_on - ends / 2) * self._widths)[:, ::-1], axis=1)[:, ::-1]
        density: NDArray[np.float64] = hits_on / time_on
        return density
