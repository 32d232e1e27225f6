"""Goes over what is held: pages, sums, and the steps of a flush."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from shoal_kv_cache.core.changes import Changes
from shoal_kv_cache.core.entries import Group, Kind
from shoal_kv_cache.core.groups import TierUse
from shoal_kv_cache.core.holdings import Holdings
from shoal_kv_cache.core.lookup import Lookup
from shoal_kv_cache.core.results import Flushed, Held, Usage
from shoal_kv_cache.core.table import RAM, SNAPSHOT, SSD, VISIBLE


class Listing:
    """Visible rows in the order of the table, which an entry never changes its place in."""

    def __init__(self, holdings: Holdings, lookup: Lookup) -> None:
        self._holdings, self._table, self._groups = holdings, holdings.table, holdings.groups
        self._lookup = lookup

    def page(self, cursor: int, limit: int, group: Group | None) -> tuple[list[Held], int | None]:
        """Some visible entries from `cursor` on and where to go on; None at the end."""
        rows, following = self._rows_from(cursor, limit)
        if group is not None:
            rows = rows[self._table.group.array[rows] == self._lookup.number_of(group)]
        return [self._lookup.held(row) for row in rows.tolist()], following

    def hash_page(self, cursor: int, limit: int) -> tuple[list[bytes], list[bytes], int | None]:
        """The same as hashes of blocks and of snapshots."""
        rows, following = self._rows_from(cursor, limit)
        keys = [self._holdings.key(row) for row in rows.tolist()]
        blocks = [key.block_hash for key in keys if key.kind is Kind.BLOCK]
        return blocks, [key.block_hash for key in keys if key.kind is Kind.SNAPSHOT], following

    def flush(
        self, changes: Changes, kv_id: str | None, tenant_tag: bytes | None, step_entries: int
    ) -> Iterator[Flushed]:
        """Drops every entry of the groups that match, in steps; `None` matches all."""
        for begin in range(1, self._table.used_end, step_entries):
            end = min(begin + step_entries, self._table.used_end)
            numbers = [
                record.number
                for record in self._groups.live()
                if kv_id in (None, record.group.kv_id) and tenant_tag in (None, record.group.tenant_tag)
            ]
            rows = np.arange(begin, end)
            state = self._table.state.array
            rows = rows[np.isin(self._table.group.array[begin:end], numbers) & (state[begin:end] & VISIBLE != 0)]
            first = len(changes.removed)
            for row in rows.tolist():
                if self._table.state.at[row] & VISIBLE:
                    self._holdings.drop(row, changes)
            removed = changes.removed[first:]
            snapshot_count = sum(key.kind is Kind.SNAPSHOT for key in removed)
            yield Flushed(len(removed) - snapshot_count, snapshot_count)

    def groups(self) -> dict[Group, tuple[Usage, Usage]]:
        """What memory and disk hold of every group that has something."""
        return {record.group: (_usage([record.use[RAM]]), _usage([record.use[SSD]])) for record in self._groups.live()}

    def usage(self) -> tuple[Usage, Usage]:
        """What memory and disk hold of all."""
        live = self._groups.live()
        return _usage([record.use[RAM] for record in live]), _usage([record.use[SSD] for record in live])

    def snapshot_count(self) -> int:
        """Visible snapshots, each once whatever copies it has. Looks at every row."""
        wanted = VISIBLE | SNAPSHOT
        return int(np.count_nonzero(self._table.state.array[: self._table.used_end] & wanted == wanted))

    def _rows_from(self, cursor: int, limit: int) -> tuple[NDArray[np.uint32], int | None]:
        begin, end = max(1, cursor), min(max(1, cursor) + limit, self._table.used_end)
        rows = np.arange(begin, end, dtype=np.uint32)
        rows = rows[self._table.state.array[begin:end] & VISIBLE != 0]
        return rows, end if end < self._table.used_end else None


def _usage(uses: Iterable[TierUse]) -> Usage:
    block_count = snapshot_count = used_bytes = 0
    for use in uses:
        block_count += use.block_count
        snapshot_count += use.snapshot_count
        used_bytes += use.used_bytes
    return Usage(block_count=block_count, snapshot_count=snapshot_count, used_bytes=used_bytes)
