"""Follows a sample of entries, held or not, to learn when entries of a class are used again."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from shoal_kv_cache.core.candidates import Rows
from shoal_kv_cache.core.history import History
from shoal_kv_cache.core.hit_density import Ages, Classes, HitDensity
from shoal_kv_cache.core.table import SNAPSHOT, Table

_SAMPLE = 1 << 14
_LIFETIMES = 4
"""For how many times what the table holds an entry is followed without being used."""
_AT_LEAST_ONE_IN = 8
_SNAPSHOT_SHARE = 8
_RENEWALS = 8
"""How often densities are renewed while as many entries are stored as the table holds."""
_MAX_AGE = 0xFFFF_FFFF


class ReuseSample:
    """Entries whose hash has a few zero bits: when each was last used or stored, and of which class it was then.

    At most a fixed number of them; the one not used for longest is given up. What comes back after it was evicted is
    stored anew, and counts as a use: so the sample sees the uses that a cache of any size would have had.
    """

    def __init__(self, table: Table, history: History, *, window: int) -> None:
        self._table, self._history, self._window = table, history, window
        one_in = _AT_LEAST_ONE_IN
        while one_in * _SAMPLE < _LIFETIMES * table.max_rows:
            one_in *= 2
        # A chain has few snapshots and many blocks.
        self._masks = np.array([one_in - 1, max(1, one_in // _SNAPSHOT_SHARE) - 1], np.uint64)
        self._last: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._renewed, self._renew_after = 0, max(1, table.max_rows // _RENEWALS)
        self.density = HitDensity(self._waiting)

    def note(self, rows: Rows) -> None:
        """Rows were used or stored now, and are of their new classes."""
        table = self._table
        if (self._history.now - self._renewed) & _MAX_AGE >= self._renew_after:
            self._renewed = self._history.now
            self.density.renew()
        is_snapshot = (table.state.array[rows] & SNAPSHOT) // SNAPSHOT
        blocks = np.where(is_snapshot, table.parent.array[rows], rows)
        sampled = np.flatnonzero(table.hash_words[blocks, 1] & self._masks[is_snapshot] == 0)
        for place in sampled.tolist():
            key = table.hash_of(int(blocks[place])) + (b"s" if is_snapshot[place] else b"")
            self._note(key, table.history.at[int(rows[place])])

    def reclassify(self, row: int) -> None:
        """A snapshot is of another class now, without having been used."""
        key = self._table.hash_of(self._table.parent.at[row]) + b"s"
        past = self._last.get(key)
        if past is not None:
            self._last[key] = self._table.history.at[row], past[1]

    def _waiting(self) -> tuple[Classes, Ages]:
        if not self._last:
            return np.empty(0, np.uint16), np.empty(0, np.uint32)
        past = np.array(list(self._last.values()), np.uint32)
        return past[:, 0].astype(np.uint16), np.uint32(self._history.now) - past[:, 1]

    def _note(self, key: bytes, one_class: int) -> None:
        now = self._history.now
        past = self._last.pop(key, None)
        if past is not None:
            age = (now - past[1]) & _MAX_AGE
            if age > self._window:
                self.density.used(past[0], age)
        self._last[key] = one_class, now
        if len(self._last) > _SAMPLE:
            _, (its_class, since) = self._last.popitem(last=False)
            self.density.given_up(its_class, (now - since) & _MAX_AGE)
