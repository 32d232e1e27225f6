"""What a copy is worth to its tier: tokens that it will save, per byte and step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal_kv_cache.core.candidates import Rows
from shoal_kv_cache.core.entries import BLOCK_TOKENS
from shoal_kv_cache.core.history import OF_SNAPSHOT, History
from shoal_kv_cache.core.hit_density import HitDensity
from shoal_kv_cache.core.holdings import Holdings


class TokensPerByte:
    """The policy: a block saves 128 tokens, a snapshot those that a warm replay in its stead would run."""

    def __init__(self, holdings: Holdings, history: History, density: HitDensity, *, snapshot_tokens: int) -> None:
        self._holdings, self._history, self._density = holdings, history, density
        self._snapshot_tokens = snapshot_tokens

    def scores(self, rows: Rows) -> NDArray[np.float64]:
        """The worth of each row."""
        classes = self._holdings.table.history.array[rows]
        tokens = np.where(classes & OF_SNAPSHOT, self._snapshot_tokens, BLOCK_TOKENS)
        density = self._density.density(classes, self._history.ages(rows))
        worth: NDArray[np.float64] = density * tokens / self._holdings.sizes(rows)
        return worth
