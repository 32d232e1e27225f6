"""Which rows leases keep where they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from shoal_kv_cache.core.changes import Changes
from shoal_kv_cache.core.entries import SEGMENT_BLOCKS, Group, Key
from shoal_kv_cache.core.found import NO_SLAB, Found, FoundSnapshot
from shoal_kv_cache.core.history import History
from shoal_kv_cache.core.holdings import Holdings
from shoal_kv_cache.core.in_memory import InMemory
from shoal_kv_cache.core.leases import Lease
from shoal_kv_cache.core.lookup import Lookup
from shoal_kv_cache.core.table import PINNED


class Pins:
    """Opens and ends leases on rows. Invariant: a visible row is marked PINNED while an open lease names it."""

    def __init__(self, holdings: Holdings, lookup: Lookup, history: History) -> None:
        self._holdings, self._table, self._leases = holdings, holdings.table, holdings.leases
        self._lookup, self._history = lookup, history

    def pin(
        self,
        lease_id: str,
        owner_id: str,
        ends_at_s: float,
        found: Found | InMemory,
        *,
        block_count: int,
        snapshot: FoundSnapshot | None,
    ) -> Lease:
        """Leading blocks of what was just found, and a snapshot; counts as a use of all that was found.

        Raises TooManyLeases, then pins nothing.
        """
        pins = found.ends(block_count) if isinstance(found, InMemory) else ends(found, block_count)
        if snapshot is not None:
            pins.append(snapshot.row)
        lease = self._pin(lease_id, owner_id, ends_at_s, pins)
        self._history.asked(found.rows)
        if snapshot is not None:
            self._history.used_snapshot(snapshot.row)
        return lease

    def hold(self, lease_id: str, owner_id: str, ends_at_s: float, group: Group, keys: Iterable[Key]) -> Lease:
        """Single entries, those of them that are visible; no use is counted. Raises TooManyLeases."""
        number = self._lookup.number_of(group)
        rows = [row for row in (self._lookup.row(number, key) for key in keys) if row]
        return self._pin(lease_id, owner_id, ends_at_s, rows)

    def release(self, lease_id: str, changes: Changes) -> bool:
        """Ends a lease, if it is open."""
        rows = self._leases.release(lease_id)
        if rows is None:
            return False
        for row in rows:
            self._table.state.at[row] &= ~PINNED & 0xFF
            self._holdings.offer(row)
        changes.freed_slabs += self._leases.exhume()
        return True

    def _pin(self, lease_id: str, owner_id: str, ends_at_s: float, rows: Sequence[int]) -> Lease:
        lease = self._leases.open(lease_id, owner_id, rows, ends_at_s)
        for row in rows:
            self._table.state.at[row] |= PINNED
        return lease


def ends(found: Found, block_count: int) -> list[int]:
    """The rows to pin so that the leading blocks stay.

    Leaf-first eviction keeps what stands before a pinned block; where a copy in memory is missing, nothing does.
    """
    rows = found.rows[:block_count]
    if not len(rows):
        return []
    absent = found.slabs[:block_count] == NO_SLAB
    if not absent.any():
        first = SEGMENT_BLOCKS - 1 - found.first_index % SEGMENT_BLOCKS
        ends: list[int] = rows[first:-1:SEGMENT_BLOCKS].tolist()
        return [*ends, int(rows[-1])]
    is_end = (np.arange(found.first_index, found.first_index + len(rows)) + 1) % SEGMENT_BLOCKS == 0
    is_end[-1:] = True
    is_end |= absent
    is_end[:-1] |= absent[1:]
    pins: list[int] = rows[is_end].tolist()
    return pins
