"""Every change of a row goes through here, so that counts, usage and candidates for eviction stay in step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shoal_kv_cache.core.candidates import Candidates, Rows
from shoal_kv_cache.core.changes import Changes
from shoal_kv_cache.core.entries import SEGMENT_BLOCKS, Entry, Key, Kind
from shoal_kv_cache.core.groups import GroupRecord, Groups
from shoal_kv_cache.core.leases import Leases
from shoal_kv_cache.core.table import LIST_BITS, NO_PLACE, PINNED, RAM, SNAPSHOT, SSD, VISIBLE, Table


class Holdings:
    """Visible rows and stubs: rows of blocks that are not visible but stand before one that is.

    Invariants: a visible row has a copy, and a row for its parent; `children` counts the visible children with such a
    copy; a stub has children and no copy; usage sums up the copies; a row that could go from a tier is among the
    tier's candidates.
    """

    def __init__(self, leases: Leases, max_rows: int) -> None:
        self.leases = leases
        self.table = Table(max_rows)
        self.groups = Groups()
        self.candidates = (Candidates(self.table, RAM), Candidates(self.table, SSD))
        self.visible_count = 0

    def key(self, row: int) -> Key:
        """Names what the row holds."""
        table = self.table
        if table.state.at[row] & SNAPSHOT:
            return Key(Kind.SNAPSHOT, table.hash_of(table.parent.at[row]))
        return Key(Kind.BLOCK, table.hash_of(row))

    def size_bytes(self, row: int) -> int:
        """Size of the payload."""
        table = self.table
        if table.state.at[row] & SNAPSHOT:
            return self.groups.form_bytes[table.first_child.at[row]]
        return self.groups.block_bytes[table.group.at[row]]

    def sizes(self, rows: Rows) -> NDArray[np.int64]:
        """The same for many rows."""
        table, groups = self.table, self.groups
        sizes: NDArray[np.int64] = np.array(groups.block_bytes)[table.group.array[rows]]
        snapshots = table.state.array[rows] & SNAPSHOT != 0
        if snapshots.any():
            sizes[snapshots] = np.array(groups.form_bytes)[table.first_child.array[rows[snapshots]]]
        return sizes

    def stub(self, block_hash: bytes) -> int:
        """A row for a block that is not visible."""
        row = self.table.take()
        self.table.history.at[row] = 0
        self.table.enter(row, block_hash)
        return row

    def snapshot(self, form_number: int) -> int:
        """A row for a snapshot."""
        row = self.table.take()
        self.table.state.at[row] |= SNAPSHOT
        self.table.first_child.at[row] = form_number
        return row

    def show(self, row: int, record: GroupRecord, parent: int, block_index: int, checksum: int) -> None:
        """Makes a row visible as a child of `parent`. The caller gives it a copy at once."""
        table = self.table
        state = table.state.at[row] | VISIBLE
        table.state.at[row] = state
        table.group.at[row] = record.number
        table.parent.at[row] = parent
        table.block_index.at[row] = block_index
        table.checksum.at[row] = checksum
        if block_index % SEGMENT_BLOCKS or state & SNAPSHOT:
            table.link(row)
        self.visible_count += 1

    def show_run(
        self, tier: int, record: GroupRecord, parent: int, entries: Sequence[Entry], places: Sequence[int]
    ) -> Rows:
        """Makes new blocks visible, each the child of the one before, with copies in one tier; many times faster."""
        table, count, other = self.table, len(entries), 1 - tier
        rows = table.take_run(count)
        table.enter_run(rows, [entry.key.block_hash for entry in entries])
        indexes = np.arange(entries[0].block_index, entries[0].block_index + count, dtype=np.uint32)
        shares_segment = indexes % SEGMENT_BLOCKS != 0
        table.state.array[rows] = table.state.array[rows] & LIST_BITS | VISIBLE
        table.group.array[rows] = record.number
        table.parent.array[rows] = np.concatenate([np.array([parent], np.uint32), rows[:-1]])
        table.block_index.array[rows] = indexes
        table.checksum.array[rows] = np.array([entry.checksum for entry in entries], np.uint64)
        table.places[tier].array[rows] = places
        table.places[other].array[rows] = NO_PLACE[other]
        table.next_sibling.array[rows] = table.previous_sibling.array[rows] = 0
        table.first_child.array[rows] = 0
        table.first_child.array[rows[:-1]] = np.where(shares_segment[1:], rows[1:], 0)
        table.children[tier].column.array[rows] = 1
        table.children[tier].column.array[rows[-1]] = 0
        table.children[other].column.array[rows] = 0
        if shares_segment[0]:
            table.link(int(rows[0]))
        table.children[tier].add(parent)
        self.visible_count += count
        size = self.groups.block_bytes[record.number]
        record.use[tier].block_count += count
        record.use[tier].used_bytes += count * size
        self.groups.tenant_bytes[tier][record.tenant] += count * size
        return rows

    def give_copy(self, tier: int, row: int, place: int) -> None:
        """The row has a copy in this tier now."""
        table = self.table
        table.places[tier].at[row] = place
        table.children[tier].add(table.parent.at[row])
        self._count(tier, row, 1)

    def take_copy(self, tier: int, row: int) -> int:
        """The row has its copy in this tier no more; returns its place. What stays visible is offered by the caller."""
        table = self.table
        places = table.places[tier].at
        place: int = places[row]
        places[row] = NO_PLACE[tier]
        table.children[tier].subtract(table.parent.at[row])
        self._count(tier, row, -1)
        return place

    def has_children(self, row: int) -> bool:
        """Whether visible rows stand on it."""
        children = self.table.children
        return bool(children[RAM].at[row] or children[SSD].at[row])

    def are_leaves(self, rows: Rows) -> NDArray[np.bool_]:
        """For which rows nothing visible stands on them."""
        children = self.table.children
        leaves: NDArray[np.bool_] = (children[RAM].column.array[rows] | children[SSD].column.array[rows]) == 0
        return leaves

    def offer(self, row: int) -> None:
        """The row may have become a candidate for eviction."""
        self.candidates[RAM].offer(row)
        self.candidates[SSD].offer(row)

    def hide(self, row: int, changes: Changes) -> None:
        """A row without copies is visible no more. It stays as a stub while something stands on it."""
        table = self.table
        changes.removed.append(self.key(row))
        state, parent = table.state.at[row], table.parent.at[row]
        is_snapshot = state & SNAPSHOT
        if is_snapshot or table.block_index.at[row] % SEGMENT_BLOCKS:
            table.unlink(row)
        self.visible_count -= 1
        if is_snapshot:
            table.give(row)
        elif self.has_children(row):
            table.state.at[row] = state & ~(VISIBLE | PINNED)
        else:
            self._forget(row)
        if not table.state.at[parent] & VISIBLE and not self.has_children(parent):
            self._forget(parent)

    def lose(self, tier: int, row: int, changes: Changes) -> None:
        """A row loses its copy in one tier, pinned or not, and keeps that in the other."""
        table = self.table
        place = self.take_copy(tier, row)
        if tier == RAM:
            # Its parent may look like a leaf in memory now, with readers at it.
            parent = table.parent.at[row]
            if table.state.at[parent] & VISIBLE and self.leases.pin_for_all(parent):
                table.state.at[parent] |= PINNED
            self._free_slab(place, changes)
        else:
            changes.freed_ssd.append((self.key(row), place))
        self.offer(row)
        self.offer(table.parent.at[row])

    def drop(self, row: int, changes: Changes) -> int:
        """Makes a row and all that stands on it in its segment invisible, pinned or not; returns how many."""
        table = self.table
        gone = self._descendants(row)
        parent = table.parent.at[row]
        shares_segment = table.state.at[row] & SNAPSHOT or table.block_index.at[row] % SEGMENT_BLOCKS
        # The lease's readers may still be reading what stood before it.
        self.leases.transfer(gone, parent if shares_segment else 0)
        for one in reversed(gone):
            table.state.at[one] &= ~PINNED
            if table.places[RAM].at[one] != NO_PLACE[RAM]:
                self._free_slab(self.take_copy(RAM, one), changes)
            if table.places[SSD].at[one] != NO_PLACE[SSD]:
                changes.freed_ssd.append((self.key(one), self.take_copy(SSD, one)))
            self.hide(one, changes)
        if table.state.at[parent] & VISIBLE:
            if self.leases.is_pinned(parent):
                table.state.at[parent] |= PINNED
            self.offer(parent)
        return len(gone)

    def _descendants(self, row: int) -> list[int]:
        """The row and what stands on it in its segment, parents first."""
        table = self.table
        found = [row]
        for one in found:
            if not table.state.at[one] & SNAPSHOT:
                child = table.first_child.at[one]
                while child:
                    found.append(child)
                    child = table.next_sibling.at[child]
        return found

    def _free_slab(self, slab: int, changes: Changes) -> None:
        if not self.leases.bury(slab):
            changes.freed_slabs.append(slab)

    def _forget(self, row: int) -> None:
        self.table.leave(row)
        self.table.give(row)

    def _count(self, tier: int, row: int, sign: int) -> None:
        table = self.table
        record = self.groups.of(table.group.at[row])
        use = record.use[tier]
        if table.state.at[row] & SNAPSHOT:
            size = self.groups.form_bytes[table.first_child.at[row]]
            use.snapshot_count += sign
        else:
            size = self.groups.block_bytes[record.number]
            use.block_count += sign
        use.used_bytes += sign * size
        self.groups.tenant_bytes[tier][record.tenant] += sign * size
