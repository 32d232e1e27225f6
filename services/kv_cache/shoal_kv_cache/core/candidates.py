"""Rows that can go from a tier: the leaves."""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

from shoal_kv_cache.core.table import IN_LIST, NO_PLACE, PINNED, Table

Rows = NDArray[np.uint32]


class Candidates:
    """Rows that may be able to go from one tier, each once.

    A row can go when it has a copy in the tier, is not pinned, and no child has a copy there; and, so that no visible
    block loses its parent, when it has a copy in the other tier or no child there either. Rows are offered when one of
    these may have become true, and dismissed when they are looked at and it is not.
    """

    def __init__(self, table: Table, tier: int) -> None:
        self._table = table
        self._rows = array("I")
        self._bit = IN_LIST[tier]
        self._none, self._other_none = NO_PLACE[tier], NO_PLACE[1 - tier]
        self._places, self._other_places = table.places[tier], table.places[1 - tier]
        self._children, self._other_children = table.children[tier], table.children[1 - tier]
        self._state = table.state

    def __len__(self) -> int:
        return len(self._rows)

    def offer(self, row: int) -> None:
        """Takes a row that may be able to go."""
        state = self._state.at
        if not state[row] & self._bit:
            state[row] |= self._bit
            self._rows.append(row)

    def can_go(self, row: int) -> bool:
        """Whether the row can go now."""
        return (
            self._places.at[row] != self._none
            and not self._state.at[row] & PINNED
            and not self._children.at[row]
            and (self._other_places.at[row] != self._other_none or not self._other_children.at[row])
        )

    def draw(self, positions: NDArray[np.int64]) -> tuple[Rows, NDArray[np.int64], NDArray[np.int64]]:
        """The rows at some positions that can go, where they are, and where those are that cannot.

        Positions are good until the list changes.
        """
        rows = np.frombuffer(self._rows, np.uint32)[positions]
        fits = (
            (self._places.array[rows] != self._none)
            & (self._state.array[rows] & PINNED == 0)
            & (self._children.column.array[rows] == 0)
            & ((self._other_places.array[rows] != self._other_none) | (self._other_children.column.array[rows] == 0))
        )
        return rows[fits], positions[fits], positions[~fits]

    def dismiss(self, positions: NDArray[np.int64]) -> None:
        """Takes rows at these positions off the list."""
        rows, state, keep = self._rows, self._state.at, ~self._bit & 0xFF
        for position in np.sort(positions)[::-1].tolist():
            state[rows[position]] &= keep
            last = rows.pop()
            if position < len(rows):
                rows[position] = last
