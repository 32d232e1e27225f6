"""How likely each draft is to be accepted, all drafts before it included. Pure. Source: dspark.md section 5.3."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SMALLEST = 1e-6
"""A draft less likely than this is never worth a row."""


def survival(confidences: NDArray[np.float32], caps: NDArray[np.int64]) -> NDArray[np.float32]:
    """The chance that drafts 0 .. j of each choice are all accepted.

    confidences  float32 [R, S] in [0, 1]: of a draft, given that those before it are accepted
    caps         int64 [R]: drafts of a choice that may be verified
    returns      float32 [R, S], falling along S; 0 from the cap on, and where it is below `SMALLEST`
    """
    chances: NDArray[np.float32] = np.cumprod(confidences, axis=1, dtype=np.float32)
    chances[(np.arange(chances.shape[1]) >= caps[:, None]) | (chances < SMALLEST)] = 0.0
    return chances
