"""What is remembered of each row's past: when it was used last, and a class that tells what to expect of it."""

from __future__ import annotations

import numpy as np

from shoal_kv_cache.core.candidates import Rows
from shoal_kv_cache.core.entries import HASH_BYTES
from shoal_kv_cache.core.table import SNAPSHOT, Table

OF_SNAPSHOT, PASSED = 0x200, 0x100
"""Class bits: a snapshot; one with a later one further down its chain, so that only a branch will use it."""
_USE, _USES, _CONTINUED, _ORIGIN = 0x40, 0xC0, 0x20, 0x1F
_MAX_AGE = 0xFFFF_FFFF


class History:
    """Time and classes. A step of time is one stored entry; a use within `window` steps of the last one is the same.

    The class of a row has how often it was used, up to 3; whether its chain had grown before after a pause, as
    conversations do; and its origin: a number drawn from the first block of its chain, so that what begins with one
    system prompt, be it chats, agents or a scan, is learned of together.
    """

    def __init__(self, table: Table, *, window: int) -> None:
        self._table, self._window = table, window
        self.now = 0

    def advance(self, steps: int) -> None:
        """So many entries are about to be stored, all at one time."""
        self.now = (self.now + steps) & _MAX_AGE

    def stored(self, row: int, parent: int, *, is_leaf: bool) -> None:
        """A block is new on `parent`, which ended its chain so far (`is_leaf`), or from which it branches off."""
        table = self._table
        if not table.block_index.at[row]:
            past = table.hashes[row * HASH_BYTES] & _ORIGIN
        elif is_leaf:
            is_pause = (self.now - table.last_use.at[parent]) & _MAX_AGE > self._window
            past = table.history.at[parent] & (_CONTINUED | _ORIGIN) | (_CONTINUED if is_pause else 0)
        else:
            past = table.history.at[parent] & _ORIGIN
        table.history.at[row] = past
        table.last_use.at[row] = self.now

    def stored_run(self, rows: Rows, parent: int) -> None:
        """Blocks are new on one that is new itself, one after the other."""
        table = self._table
        table.history.array[rows] = table.history.at[parent]
        table.last_use.array[rows] = self.now

    def stored_snapshot(self, row: int, block: int) -> int:
        """A snapshot of a block is new: the one before it on the chain is passed. Returns that, or 0."""
        table = self._table
        table.history.at[row] = OF_SNAPSHOT | (table.history.at[block] & (_CONTINUED | _ORIGIN))
        table.last_use.at[row] = self.now
        before = self.snapshot_before(block)
        if before:
            table.history.at[before] |= PASSED
        return before

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

    def use(self, rows: Rows) -> None:
        """Rows are used now."""
        table = self._table
        fresh = rows[self.ages(rows) > self._window]
        past = table.history.array[fresh]
        table.history.array[fresh] = np.where(past & _USES < _USES, past + _USE, past)
        table.last_use.array[rows] = self.now
