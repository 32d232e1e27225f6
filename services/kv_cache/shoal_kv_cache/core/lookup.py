"""Finds chains and entries. Changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal_kv_cache.core.entries import BLOCK_TOKENS, HASH_BYTES, SEGMENT_BLOCKS, Entry, Group, Key, Kind
from shoal_kv_cache.core.found import NO_LOCATION, NO_SLAB, Found, FoundSnapshot, Usable
from shoal_kv_cache.core.holdings import Holdings
from shoal_kv_cache.core.in_memory import InMemory
from shoal_kv_cache.core.results import Held
from shoal_kv_cache.core.table import RAM, SNAPSHOT, SSD, VISIBLE

_NO_GROUP = -1
_KNOWN_INDEXES = 8192
_SNAPSHOTS = bytes(bool(state & SNAPSHOT) for state in range(256))
_VISIBLE_BLOCK = bytes(state for state in range(256) if state & (VISIBLE | SNAPSHOT) == VISIBLE)


class Lookup:
    """Reads rows. Relies on visible blocks being prefix-closed in each segment."""

    def __init__(self, holdings: Holdings) -> None:
        self._holdings, self._table, self._groups = holdings, holdings.table, holdings.groups
        self._first_indexes = np.arange(_KNOWN_INDEXES, dtype=np.uint32).tobytes()

    def number_of(self, group: Group) -> int:
        """The number of a group; one that no row has if the group is unknown."""
        record = self._groups.find(group)
        return _NO_GROUP if record is None else record.number

    def block(self, number: int, block_hash: bytes) -> int:
        """The row of a visible block of a group, or 0."""
        row = self._table.find(block_hash)
        return row if row and self._table.state.at[row] & VISIBLE and self._table.group.at[row] == number else 0

    def row(self, number: int, key: Key) -> int:
        """The row of a visible entry of a group, or 0."""
        block = self.block(number, key.block_hash)
        return block if key.kind is Kind.BLOCK or not block else self._table.snapshot_of(block)

    def any_row(self, key: Key) -> int:
        """The row of a visible entry of any group, or 0."""
        block = self._table.find(key.block_hash)
        if not block or not self._table.state.at[block] & VISIBLE:
            return 0
        return block if key.kind is Kind.BLOCK else self._table.snapshot_of(block)

    def reach(self, group: Group, hashes: Sequence[bytes], first_index: int) -> list[tuple[int, int]]:
        """How far the leading visible blocks reach: for each segment how many there are up to its last, and its row.

        Segments in order, by their last block; the first that is not whole is bisected.
        """
        table, number = self._table, self.number_of(group)
        heads, bucket_count, bucket_next = table.heads.at, table.bucket_count, table.bucket_next.at
        known, state, groups = table.hashes, table.state.at, table.group.at

        def probe(block_hash: bytes) -> int:  # `block` with everything at hand: most of the time of a lookup is here
            row: int = heads[hash(block_hash) % bucket_count]
            while row and known[row * HASH_BYTES : row * HASH_BYTES + HASH_BYTES] != block_hash:
                row = bucket_next[row]
            return row if row and state[row] & VISIBLE and groups[row] == number else 0

        reached: list[tuple[int, int]] = []
        begin, count = 0, len(hashes)
        while begin < count:
            end = min(count, begin + SEGMENT_BLOCKS - (first_index + begin) % SEGMENT_BLOCKS)
            row = probe(hashes[end - 1])
            if row:
                reached.append((end, row))
                begin = end
                continue
            low, high, last = begin, end - 1, 0
            while low < high:
                middle = (low + high) // 2
                row = probe(hashes[middle])
                if row:
                    low, last = middle + 1, row
                else:
                    high = middle
            if last:
                reached.append((low, last))
            break
        return reached

    def find(self, group: Group, hashes: Sequence[bytes], first_index: int) -> Found:
        """The leading visible blocks of a chain with their copies."""
        table = self._table
        rows = self._path(group, hashes, first_index)
        if isinstance(rows, range):
            # A slice reads faster than rows one by one, but would show what changes later: `_copied` ends that.
            where: slice | NDArray[np.uint32] = slice(rows.start, rows.stop)
            numbers = np.arange(rows.start, rows.stop, dtype=np.uint32)
        else:
            where = numbers = rows
        firsts = table.first_child.array[where]
        snapshot_places = np.flatnonzero(table.state.array[firsts] & SNAPSHOT)
        record = self._groups.find(group)
        return Found(
            group=group,
            first_index=first_index,
            rows=numbers,
            slabs=_copied(table.places[RAM].array[where]),
            locations=_copied(table.places[SSD].array[where]),
            checksums=_copied(table.checksum.array[where]),
            form=record.block_form if record is not None and len(rows) else None,
            snapshot_places=snapshot_places,
            snapshot_in_ram=table.places[RAM].array[firsts[snapshot_places]] != NO_SLAB,
            describe_snapshot=self._snapshot,
        )

    def find_in_memory(
        self, group: Group, hashes: Sequence[bytes], first_index: int, max_blocks: int
    ) -> InMemory | None:
        """The same where it is simple: see InMemory. None says nothing; `find` does."""
        record = self._groups.find(group)
        rows = self._path(group, hashes, first_index) if record is not None else range(0)
        if not len(rows) or record is None or record.block_form is None:
            return None
        table = self._table
        places, children = table.places[RAM], table.first_child
        if isinstance(rows, range):
            begin, end = rows.start, rows.stop
            slabs, checksums = places.at[begin:end].tolist(), table.checksum.at[begin:end].tolist()
            firsts = children.array[begin:end]
        else:
            slabs, checksums = places.array[rows].tolist(), table.checksum.array[rows].tolist()
            firsts = children.array[rows]
        if NO_SLAB in slabs:
            return None
        snapshots = table.state.array.take(firsts).tobytes().translate(_SNAPSHOTS)
        at = snapshots.rfind(1)
        while at >= 0:
            if places.at[children.at[rows[at]]] == NO_SLAB:
                return None
            at = snapshots.rfind(1, 0, at)
        present = first_index + len(rows)
        bound = min(present, max_blocks)
        at = snapshots.rfind(1, 0, max(0, bound - first_index))
        snapshot, hit = (self._snapshot(int(rows[at])), first_index + at + 1) if at >= 0 else (None, 0)
        replay = bound if bound > hit else 0
        usable = Usable(hit * BLOCK_TOKENS, replay * BLOCK_TOKENS, present * BLOCK_TOKENS, snapshot)
        return InMemory(group, first_index, rows, slabs, checksums, record.block_form, usable)

    def held(self, row: int) -> Held:
        """All that is known of a visible row."""
        table = self._table
        record = self._groups.of(table.group.at[row])
        parent = table.parent.at[row]
        if table.state.at[row] & SNAPSHOT:
            key = Key(Kind.SNAPSHOT, table.hash_of(parent))
            parent = table.parent.at[parent]
            form = self._groups.forms[table.first_child.at[row]]
        else:
            key = Key(Kind.BLOCK, table.hash_of(row))
            assert record.block_form is not None
            form = record.block_form
        entry = Entry(
            key=key,
            group=record.group,
            parent_hash=table.hash_of(parent),
            position_end=(table.block_index.at[row] + 1) * BLOCK_TOKENS,
            form=form,
            checksum=table.checksum.at[row],
        )
        slab, location = table.places[RAM].at[row], table.places[SSD].at[row]
        return Held(entry, None if slab == NO_SLAB else slab, None if location == NO_LOCATION else location)

    def _path(self, group: Group, hashes: Sequence[bytes], first_index: int) -> range | NDArray[np.uint32]:
        """Rows of the leading visible blocks. Each is compared with its hash: a writer may name a wrong parent."""
        reached = self.reach(group, hashes, first_index)
        if not reached:
            return range(0)
        count, last = reached[-1]
        # Blocks stored together mostly have rows in sequence.
        rows = range(last + 1 - count, last + 1)
        if rows.start > 0 and self._are_in_sequence(rows.start, rows.stop, hashes[:count], first_index):
            return rows
        found = self._walk(reached)
        if not self._are(found, hashes[:count], first_index):
            found = self._one_by_one(group, hashes, first_index)
        return np.array(found, np.uint32)

    def _are_in_sequence(self, begin: int, end: int, hashes: Sequence[bytes], first_index: int) -> bool:
        """Whether rows [begin, end) are the visible blocks with these hashes. A free row may have the hash it had."""
        table = self._table
        # As bytes, which are compared faster than arrays of this length.
        return (
            table.hashes[begin * HASH_BYTES : end * HASH_BYTES] == b"".join(hashes)
            and not table.state.at[begin:end].tobytes().translate(None, _VISIBLE_BLOCK)
            and table.block_index.at[begin:end].tobytes() == self._indexes(first_index, first_index + end - begin)
        )

    def _are(self, rows: Sequence[int], hashes: Sequence[bytes], first_index: int) -> bool:
        """The same for any rows."""
        table, where = self._table, np.array(rows, np.int64)
        return (
            table.hash_words[where].tobytes() == b"".join(hashes)
            and not table.state.array[where].tobytes().translate(None, _VISIBLE_BLOCK)
            and table.block_index.array[where].tobytes() == self._indexes(first_index, first_index + len(rows))
        )

    def _indexes(self, begin: int, end: int) -> bytes:
        """Numbers [begin, end) as a column of the table has them."""
        if end <= _KNOWN_INDEXES:
            return self._first_indexes[begin * 4 : end * 4]
        return np.arange(begin, end, dtype=np.uint32).tobytes()

    def _one_by_one(self, group: Group, hashes: Sequence[bytes], first_index: int) -> list[int]:
        number, path = self.number_of(group), []
        for index, block_hash in enumerate(hashes, first_index):
            row = self.block(number, block_hash)
            if not row or self._table.block_index.at[row] != index:
                break
            path.append(row)
        return path

    def _walk(self, reached: Sequence[tuple[int, int]]) -> list[int]:
        parents = self._table.parent.at
        path: list[int] = []
        for end, row in reached:
            part = [row]
            for _ in range(end - len(path) - 1):
                row = parents[row]
                part.append(row)
            part.reverse()
            path += part
        return path

    def _snapshot(self, block: int) -> FoundSnapshot:
        row = self._table.snapshot_of(block)
        held = self.held(row)
        return FoundSnapshot(
            row=row,
            block_index=held.entry.block_index,
            form=held.entry.form,
            checksum=held.entry.checksum,
            slab=held.slab,
            location=held.location,
        )


def _copied(values: NDArray[Any]) -> NDArray[Any]:
    """The values, in memory of their own."""
    return values if values.base is None else values.copy()
