"""How many drafts a step verifies in all. Pure. Source: dspark.md section 5.3, stage 1."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Budget:
    """`drafts` to verify, all choices together, and the tokens per second that are expected then."""

    drafts: int
    rate: float


def budget(survivals: NDArray[np.float32], choices: int, costs: NDArray[np.float64]) -> Budget:
    """The number of drafts with the most expected tokens per second, by looking at every number.

    Costs are a staircase, so the rate has many local maxima and stopping at the first would lose much. On a tie the
    smaller number wins; then the tread it stands on is filled, since rows on it cost nothing.

    survivals  float32, any shape: of every draft that may be verified, see `survival`; zeros count as absent
    choices    R: each gives one token without any draft
    costs      float64 [at least drafts + 1]: seconds of a step that verifies 0, 1, 2 .. drafts; positive, never falling
    """
    if choices == 0:
        return Budget(0, 0.0)
    flat = survivals.ravel()
    best_first = -np.sort(-flat[flat > 0.0])
    tokens = np.empty(len(best_first) + 1)
    tokens[0] = choices
    np.cumsum(best_first, dtype=np.float64, out=tokens[1:])
    tokens[1:] += choices
    rates = tokens / costs[: len(tokens)]
    chosen = int(np.argmax(rates))
    if chosen == 0:
        return Budget(0, float(rates[0]))
    tread_end = int(np.searchsorted(costs, costs[chosen], side="right")) - 1
    return Budget(min(tread_end, len(best_first)), float(rates[chosen]))
