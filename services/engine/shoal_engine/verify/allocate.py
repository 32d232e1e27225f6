"""Which drafts a budget goes to. Pure. Source: dspark.md section 5.3, stage 2."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def allocate(survivals: NDArray[np.float32], drafts: int) -> NDArray[np.int64]:
    """The widths that spend a budget on the likeliest drafts; ties go to the earlier draft, then to the lower choice.

    survivals  float32 [R, S], falling along S, see `survival`; zeros are never taken
    drafts     how many to take at most
    returns    int64 [R]: leading drafts of each choice, `drafts` in all or as many as there are
    """
    choices, slots = survivals.shape
    if drafts <= 0 or survivals.size == 0:
        return np.zeros(choices, dtype=np.int64)
    # By draft, then by choice: the order in which ties are served.
    ranked = np.ascontiguousarray(survivals.T).ravel()
    if drafts >= ranked.size:
        taken = ranked > 0.0
    else:
        least = max(np.partition(ranked, ranked.size - drafts)[ranked.size - drafts], np.float32(0.0))
        taken = ranked > least
        if least > 0.0:
            ties = np.flatnonzero(ranked == least)
            taken[ties[: drafts - int(np.count_nonzero(taken))]] = True
    widths: NDArray[np.int64] = taken.reshape(slots, choices).sum(axis=0, dtype=np.int64)
    return widths
