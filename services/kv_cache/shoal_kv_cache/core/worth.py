"""What a copy is worth to its tier: tokens that it is likely to save in the next second, per byte.

Greedy-Dual-Size-Frequency (Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching
Policy", HP Labs 1998) ranks by frequency x cost / size. Here the place of frequency is taken by the hazard of a next
turn, estimated for each conversation from its own pauses and those of its like, as LHD does for classes of objects
(Beckmann, Chen, Cidon, "LHD: Improving Cache Hit Rate by Maximizing Hit Density", NSDI 2018). What is added: turns
instead of single uses, known for what was evicted too; snapshots that a later one replaces go first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal_kv_cache.core.candidates import Rows
from shoal_kv_cache.core.entries import BLOCK_TOKENS
from shoal_kv_cache.core.history import History
from shoal_kv_cache.core.holdings import Holdings
from shoal_kv_cache.core.table import SNAPSHOT


class TokensPerByte:
    """The policy: a block saves 128 tokens, a snapshot those that a warm replay in its stead would run."""

    def __init__(self, holdings: Holdings, history: History, *, snapshot_tokens: int) -> None:
        self._holdings, self._history = holdings, history
        self._snapshot_tokens = snapshot_tokens

    def scores(self, rows: Rows) -> NDArray[np.float64]:
        """The worth of each row."""
        is_snapshot = self._holdings.table.state.array[rows] & SNAPSHOT
        tokens = np.where(is_snapshot, self._snapshot_tokens, BLOCK_TOKENS)
        worth: NDArray[np.float64] = self._history.chances(rows) * tokens / self._holdings.sizes(rows)
        return worth
