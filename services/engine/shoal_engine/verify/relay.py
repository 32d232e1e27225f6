"""Confidences of earlier steps, found again by state slot."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

UNTOLD = 0.7
"""Confidence of any draft before the first one is known: much is verified where rows are cheap, nothing where not."""


@dataclass(frozen=True, slots=True)
class _Step:
    slots: NDArray[np.int64]
    generations: NDArray[np.int64]
    confidences: NDArray[np.float32]


class ConfidenceRelay:
    """The confidences of the last `age` steps, and what is expected of choices that had none then.

    A slot's are given only to the generation that they were noted for: whoever takes over a slot inherits nothing.
    Choices that are not known count as if they were like those that are: to take them for certain, as one may where few
    come and go, cost up to five per cent of all tokens under a load of short requests (`bench.dspark_sim`).
    """

    def __init__(self, age: int) -> None:
        if age < 1:
            raise ValueError(f"age must be positive, got {age}")
        self._age = age
        self._steps: deque[_Step] = deque()
        self._others: NDArray[np.float32] | None = None  # of the last step that is old enough and knew any

    def note(self, slots: NDArray[np.int64], generations: NDArray[np.int64], confidences: NDArray[np.float32]) -> None:
        """Of this step, those choices that have drafts: int64 [R], int64 [R], float32 [R, S]."""
        self._steps.append(_Step(slots, generations, confidences))
        if len(self._steps) > self._age:
            self._steps.popleft()
        if len(self._steps) == self._age and len(self._steps[0].slots):
            self._others = self._steps[0].confidences

    def oldest(self, slots: NDArray[np.int64], generations: NDArray[np.int64], width: int) -> NDArray[np.float32]:
        """Of the step `age` steps ago, float32 [R, width]; for choices not known then, see above.

        To be asked before this step's are noted.
        """
        if self._others is None:
            return np.full((len(slots), width), UNTOLD, dtype=np.float32)
        found = self._others[np.arange(len(slots)) % len(self._others)]
        step = self._steps[0]
        if len(step.slots) and len(slots):
            row_of = np.full(max(int(step.slots.max()), int(slots.max())) + 1, -1, dtype=np.int64)
            row_of[step.slots] = np.arange(len(step.slots))
            rows = row_of[slots]
            known = (rows >= 0) & (step.generations[rows] == generations)
            found[known] = step.confidences[rows[known]]
        return found
