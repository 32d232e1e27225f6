"""Copies of visible entries that come, move, or turn out to be damaged."""

from __future__ import annotations

from shoal_kv_cache.core.changes import Changes
from shoal_kv_cache.core.entries import Entry, Key
from shoal_kv_cache.core.holdings import Holdings
from shoal_kv_cache.core.lookup import Lookup
from shoal_kv_cache.core.storing import Storing
from shoal_kv_cache.core.table import NO_PLACE, RAM, SSD


class Copies:
    """Changes where the copies of an entry lie. A place that counts no more changes nothing."""

    def __init__(self, holdings: Holdings, lookup: Lookup, storing: Storing) -> None:
        self._holdings, self._table = holdings, holdings.table
        self._lookup, self._storing = lookup, storing

    def attach(self, tier: int, entry: Entry, place: int) -> bool:
        """Takes a copy of a visible entry; False if it is gone, other, or has one in this tier."""
        row = self._lookup.row(self._lookup.number_of(entry.group), entry.key)
        return bool(row) and self._storing.attach(tier, row, entry.checksum, place)

    def move(self, tier: int, key: Key, old_place: int, new_place: int) -> bool:
        """The copy lies elsewhere now; False if `old_place` counts no more."""
        row = self._at(tier, key, old_place)
        if row:
            self._table.places[tier].at[row] = new_place
        return bool(row)

    def lose(self, tier: int, key: Key, place: int, changes: Changes) -> bool:
        """The copy is damaged; without another the entry is dropped. False if `place` counts no more."""
        row = self._at(tier, key, place)
        other = SSD if tier == RAM else RAM
        if not row:
            return False
        if self._table.places[other].at[row] == NO_PLACE[other]:
            self._holdings.drop(row, changes)
        else:
            self._holdings.lose(tier, row, changes)
        return True

    def _at(self, tier: int, key: Key, place: int) -> int:
        row = self._lookup.any_row(key)
        return row if row and self._table.places[tier].at[row] == place else 0
