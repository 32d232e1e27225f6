"""What is remembered of each row's past: when it was used last, and a class that tells what to expect of it."""

from __future__ import annotations

import numpy as np

from shoal_kv_cache.core.candidates import Rows
from shoal_kv_cache.core.table import SNAPSHOT, Table

OF_SNAPSHOT = 0x80
"""Class bit: a snapshot."""
PASSED = 0x40
"""Class bit: a snapshot with a later one further down its chain, so that only a branch will use it."""
_USES, _TURN, _TURNS = 0x03, 0x04, 0x1C
_MAX_AGE = 0xFFFF_FFFF


class History:
    """Time and classes. A step of time is one stored entry; a use within `window` steps of the last one is the same.

    The class of a row has how often it was used, up to 3, and for what is stored at the end of a chain how often that
    chain had grown after a pause, up to 7: turns of a conversation so far. A scan has neither.
    """

    def __init__(self, table: Table, *, window: int) -> None:
        self._table, self._window = table, window
        self.now = 0

    def advance(self, steps: int) -> None:
        """So many entries are about to be stored, all at one time."""
        self.now = (self.now + steps) & _MAX_AGE

    def stored(self, row: int, parent: int, *, is_continued: bool) -> None:
        """A block is new on `parent`, which ended its chain (`is_continued`), or branches off there."""
        table = self._table
        turns = 0
        if is_continued:
            turns = table.history.at[parent] & _TURNS
            if (self.now - table.last_use.at[parent]) & _MAX_AGE > self._window and turns < _TURNS:
                turns += _TURN
        table.history.at[row] = turns
        table.last_use.at[row] = self.now

    def stored_snapshot(self, row: int, block: int) -> None:
        """A snapshot of a block is new: the one before it on the chain is passed."""
        table = self._table
        table.history.at[row] = OF_SNAPSHOT | (table.history.at[block] & _TURNS)
        table.last_use.at[row] = self.now
        before = self.snapshot_before(block)
        if before:
            table.history.at[before] |= PASSED

    def snapshot_before(self, block: int) -> int:
        """The next snapshot up the chain from a block, itself excepted; 0 if there is none in reach."""
        table = self._table
        parents, first_child, state = table.parent.at, table.first_child.at, table.state.at
        for _ in range(1024):
            if not table.block_index.at[block]:
                return 0
            block = parents[block]
            first = first_child[block]
            if first and state[first] & SNAPSHOT:
                return int(first)
        return 0

    def ages(self, rows: Rows) -> Rows:
        """Steps since the last use of each row."""
        return np.uint32(self.now) - self._table.last_use.array[rows]

    def fresh(self, rows: Rows) -> Rows:
        """Those of the rows whose use now is more than the last one going on."""
        return rows[self.ages(rows) > self._window]

    def use(self, rows: Rows, fresh: Rows) -> None:
        """Rows are used now; `fresh` are those of them that it counts for."""
        table = self._table
        past = table.history.array[fresh]
        table.history.array[fresh] = np.where(past & _USES < _USES, past + 1, past)
        table.last_use.array[rows] = self.now
