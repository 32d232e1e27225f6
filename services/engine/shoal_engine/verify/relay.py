"""Confidences of earlier steps, found again by state slot."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class _Step:
    slots: NDArray[np.int64]
    generations: NDArray[np.int64]
    confidences: NDArray[np.float32]


class ConfidenceRelay:
    """The confidences of the last `age` steps.

    A slot's are given only to the generation that they were noted for: whoever takes over a slot inherits nothing.
    """

    def __init__(self, age: int) -> None:
        if age < 1:
            raise ValueError(f"age must be positive, got {age}")
        self._steps: deque[_Step] = deque(maxlen=age)

    def note(self, slots: NDArray[np.int64], generations: NDArray[np.int64], confidences: NDArray[np.float32]) -> None:
        """This step's: int64 [R], int64 [R], float32 [R, S]."""
        self._steps.append(_Step(slots, generations, confidences))

    def oldest(
        self, slots: NDArray[np.int64], generations: NDArray[np.int64], width: int
    ) -> NDArray[np.float32] | None:
        """Of the step `age` steps ago, float32 [R, width]; 1 where nothing is known. None before there is such a step.

        To be asked before this step's are noted.
        """
        if self._steps.maxlen is None or len(self._steps) < self._steps.maxlen:
            return None
        step = self._steps[0]
        found = np.ones((len(slots), width), dtype=np.float32)
        if len(step.slots) and len(slots):
            row_of = np.full(max(int(step.slots.max()), int(slots.max())) + 1, -1, dtype=np.int64)
            row_of[step.slots] = np.arange(len(step.slots))
            rows = row_of[slots]
            known = (rows >= 0) & (step.generations[rows] == generations)
            found[known] = step.confidences[rows[known]]
        return found
