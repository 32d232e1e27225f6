"""What an entry of a class is worth at an age: the hits to come per step, if it is kept for the best length of time.

After Beckmann, Chen, Cidon, "LHD: Improving Cache Hit Rate by Maximizing Hit Density" (NSDI 2018): counts of uses by
class and age give for each age the chance of a next use and the time it takes. Differences: the counts come from a
sample that is followed whether or not it is still held, so that what is evicted early does not seem useless for it;
with that, density is taken up to the age at which it is best to give up (the Gittins index); ages are in logarithmic
bins; and a class of which little is known leans on what is known of its like.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

CLASSES = 1024
_ALIKE = 32
"""Classes that differ in their lowest bits only (the origin) are alike."""
_BINS_PER_OCTAVE = 2
_BINS = 32 * _BINS_PER_OCTAVE
_DECAY = 0.97
_LEAN_EVENTS = 20.0
"""How many events of its like a class is taken to have had."""

Ages = NDArray[np.uint32]
Classes = NDArray[np.uint16]


def _bins(ages: Ages) -> NDArray[np.int64]:
    return (np.log2(np.maximum(ages, 1).astype(np.float32)) * _BINS_PER_OCTAVE).astype(np.int64)


class HitDensity:
    """Densities by class and age. They are renewed from time to time; older events count less and less."""

    def __init__(self, waiting: Callable[[], tuple[Classes, Ages]]) -> None:
        """waiting: what is followed now, by class and age; it has gone without a use so far."""
        self._waiting = waiting
        self._hits = np.zeros((CLASSES, _BINS), np.float32)
        self._ends = np.zeros((CLASSES, _BINS), np.float32)  # hits and those given up
        self._widths = np.diff(2.0 ** (np.arange(_BINS + 1) / _BINS_PER_OCTAVE))
        self._density = np.zeros((CLASSES, _BINS), np.float32)
        self._learn()

    def density(self, classes: Classes, ages: Ages) -> NDArray[np.float32]:
        """Hits to come per step."""
        found: NDArray[np.float32] = self._density[classes, _bins(ages)]
        return found

    def used(self, one_class: int, age: int) -> None:
        """An entry of the sample was used at this age."""
        place = one_class, int(math.log2(max(age, 1)) * _BINS_PER_OCTAVE)
        self._hits[place] += 1
        self._end(place)

    def given_up(self, one_class: int, age: int) -> None:
        """An entry of the sample was not used up to this age, and is followed no more."""
        self._end((one_class, int(math.log2(max(age, 1)) * _BINS_PER_OCTAVE)))

    def _end(self, place: tuple[int, int]) -> None:
        self._ends[place] += 1

    def renew(self) -> None:
        """Takes in what has happened since, and lets what happened before count a little less."""
        self._learn()
        self._hits *= _DECAY
        self._ends *= _DECAY

    def _learn(self) -> None:
        """For each class that something is known of; the others get what is known of their like.

        Where nothing has happened density falls with age as 1 / age: LRU.
        """
        all_ends = self._ends.copy()
        classes, ages = self._waiting()
        np.add.at(all_ends, (classes, _bins(ages)), np.float32(1))
        known = all_ends.reshape(-1, _ALIKE, _BINS).sum(axis=1)
        share = _LEAN_EVENTS / (known.sum(axis=1, keepdims=True) + _LEAN_EVENTS)
        like_hits = self._hits.reshape(-1, _ALIKE, _BINS).sum(axis=1) * share + 1 / _BINS
        like_ends = known * share + 1 / _BINS
        self._density.reshape(-1, _ALIKE, _BINS)[:] = self._best(like_hits, like_ends)[:, None]
        active = np.flatnonzero(all_ends.sum(axis=1) > 0.5)
        hits, ends = self._hits[active] + like_hits[active // _ALIKE], all_ends[active] + like_ends[active // _ALIKE]
        self._density[active] = self._best(hits, ends)

    def _best(self, hits: NDArray[np.float32], ends: NDArray[np.float32]) -> NDArray[np.float64]:
        """For each age the greatest ratio of hits to time, over the ages up to which one may wait."""
        alive = np.cumsum(ends[:, ::-1], axis=1, dtype=np.float64)[:, ::-1]
        hits_to = np.cumsum(hits, axis=1, dtype=np.float64)
        time_to = np.cumsum((alive - ends / 2) * self._widths, axis=1)
        best = np.zeros(hits.shape)
        for age in range(_BINS):
            before = (hits_to[:, age - 1 : age], time_to[:, age - 1 : age]) if age else (0.0, 0.0)
            best[:, age] = ((hits_to[:, age:] - before[0]) / (time_to[:, age:] - before[1])).max(axis=1)
        return best
