"""Rows of the index in flat arrays: under 100 bytes an entry, no Python object per entry.

A row is a number from 1 on; 0 stands for none. Rows are found by block hash in chained buckets: deleting needs no
tombstones, and a miss costs one probe.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from shoal_common.errors import ResourceExhausted

from shoal_kv_cache.core.entries import HASH_BYTES
from shoal_kv_cache.core.found import NO_LOCATION, NO_SLAB

NO_PLACE = (NO_SLAB, NO_LOCATION)

VISIBLE, SNAPSHOT, PINNED = 1, 2, 4
"""Bits of a row's state: it counts; it is a snapshot; a lease names it."""
IN_LIST = (8, 16)
"""Bits of a row's number, whatever entry it holds: it is among the tier's candidates for eviction."""
LIST_BITS = IN_LIST[0] | IN_LIST[1]
RAM, SSD = 0, 1
"""Tiers, where something is there for each."""
MAX_GROUPS = 1 << 16
_MAX_CHILDREN = 255


class IndexFull(ResourceExhausted):
    """The table has no rows left: evict first."""

    reason = "INDEX_FULL"


class Column:
    """One value a row: `at` for single rows, `array` for many; both on the same memory, zero until touched."""

    __slots__ = ("array", "at")

    def __init__(self, dtype: type[np.generic], count: int) -> None:
        self.array: NDArray[Any] = np.zeros(count, dtype)
        self.at = memoryview(self.array.data)  # reads and writes single values several times faster than the array


class Table:
    """Rows, free rows, and rows by hash.

    hashes        32 bytes a row; unused for a snapshot, which is found from its block
    parent        row of the block before; of its own block for a snapshot
    first_child   a block's children in its segment, its snapshot first; for a snapshot the number of its form
    next_sibling, previous_sibling   the other children of the parent; the first one's previous is 0
    places        of RAM and SSD: the first slab, the location
    children      of RAM and SSD: children with a copy there, those in the next segment and the snapshot included
    bucket_next   next row of the bucket; of the free list for a free row
    last_use      the policy's time
    history       what the policy knows of the row's conversation
    """

    def __init__(self, max_rows: int) -> None:
        count = max_rows + 1
        self.max_rows = max_rows
        self.hashes = mmap.mmap(-1, count * HASH_BYTES)
        self.hash_words: NDArray[np.uint64] = np.frombuffer(self.hashes, np.uint64).reshape(count, HASH_BYTES // 8)
        self.checksum = Column(np.uint64, count)
        self.parent, self.first_child = Column(np.uint32, count), Column(np.uint32, count)
        self.next_sibling, self.previous_sibling = Column(np.uint32, count), Column(np.uint32, count)
        self.block_index = Column(np.uint32, count)
        self.places = (Column(np.uint32, count), Column(np.uint64, count))
        self.places[RAM].at[0], self.places[SSD].at[0] = NO_PLACE
        self.children = (Counts(count), Counts(count))
        self.last_use, self.bucket_next = Column(np.uint32, count), Column(np.uint32, count)
        self.group = Column(np.uint16, count)
        self.state, self.history = Column(np.uint8, count), Column(np.uint16, count)
        self.bucket_count = max(1, max_rows * 3 // 4)
        self.heads = Column(np.uint32, self.bucket_count)
        self._free = 0
        self.used_end = 1  # rows from here on were never used
        self.free_rows = max_rows

    def find(self, block_hash: bytes) -> int:
        """The row of a block, visible or not."""
        hashes, bucket_next = self.hashes, self.bucket_next.at
        row: int = self.heads.at[hash(block_hash) % self.bucket_count]
        while row and hashes[row * HASH_BYTES : (row + 1) * HASH_BYTES] != block_hash:
            row = bucket_next[row]
        return row

    def hash_of(self, row: int) -> bytes:
        """The hash of a block's row."""
        return self.hashes[row * HASH_BYTES : (row + 1) * HASH_BYTES]

    def take(self) -> int:
        """A free row, without copies and children. Raises IndexFull."""
        row = self._free
        if row:
            self._free = self.bucket_next.at[row]
        elif self.used_end <= self.max_rows:
            row = self.used_end
            self.used_end += 1
        else:
            raise IndexFull(f"all {self.max_rows} rows are used", max_rows=self.max_rows)
        self.free_rows -= 1
        self.places[RAM].at[row], self.places[SSD].at[row] = NO_PLACE
        self.first_child.at[row] = self.next_sibling.at[row] = self.previous_sibling.at[row] = 0
        self.state.at[row] &= LIST_BITS
        return row

    def take_run(self, count: int) -> NDArray[np.uint32]:
        """So many free rows, whose values are still those of before. Raises IndexFull, then takes none."""
        if count > self.free_rows:
            raise IndexFull(f"{count} rows wanted, {self.free_rows} free", wanted=count, free=self.free_rows)
        rows: list[int] = []
        while self._free and len(rows) < count:
            rows.append(self._free)
            self._free = self.bucket_next.at[self._free]
        rest = count - len(rows)
        rows += range(self.used_end, self.used_end + rest)
        self.used_end += rest
        self.free_rows -= count
        return np.array(rows, np.uint32)

    def give(self, row: int) -> None:
        """A row is free again. Its place in lists of candidates is kept."""
        self.state.at[row] &= LIST_BITS
        self.bucket_next.at[row] = self._free
        self._free = row
        self.free_rows += 1

    def enter(self, row: int, block_hash: bytes) -> None:
        """The row can be found by this hash, which no other row has."""
        self.hashes[row * HASH_BYTES : (row + 1) * HASH_BYTES] = block_hash
        bucket = hash(block_hash) % self.bucket_count
        self.bucket_next.at[row] = self.heads.at[bucket]
        self.heads.at[bucket] = row

    def enter_run(self, rows: NDArray[np.uint32], block_hashes: Sequence[bytes]) -> None:
        """The same for many rows."""
        self.hash_words[rows] = np.frombuffer(b"".join(block_hashes), np.uint64).reshape(len(rows), -1)
        heads, bucket_next, bucket_count = self.heads.at, self.bucket_next.at, self.bucket_count
        for row, block_hash in zip(rows.tolist(), block_hashes, strict=True):
            bucket = hash(block_hash) % bucket_count
            bucket_next[row] = heads[bucket]
            heads[bucket] = row

    def leave(self, row: int) -> None:
        """The row can be found no more."""
        heads, bucket_next = self.heads.at, self.bucket_next.at
        bucket = hash(self.hash_of(row)) % self.bucket_count
        other = heads[bucket]
        if other == row:
            heads[bucket] = bucket_next[row]
            return
        while bucket_next[other] != row:
            other = bucket_next[other]
        bucket_next[other] = bucket_next[row]

    def link(self, row: int) -> None:
        """The row becomes a child of its parent. A snapshot goes first, and a block after it."""
        parent = self.parent.at[row]
        first_child, next_sibling, previous_sibling = (
            self.first_child.at,
            self.next_sibling.at,
            self.previous_sibling.at,
        )
        first = first_child[parent]
        if first and self.state.at[first] & SNAPSHOT:
            before, after = first, next_sibling[first]
            next_sibling[before] = row
        else:
            before, after = 0, first
            first_child[parent] = row
        previous_sibling[row], next_sibling[row] = before, after
        if after:
            previous_sibling[after] = row

    def unlink(self, row: int) -> None:
        """The row is no child any more."""
        next_sibling, previous_sibling = self.next_sibling.at, self.previous_sibling.at
        before, after = previous_sibling[row], next_sibling[row]
        if before:
            next_sibling[before] = after
        else:
            self.first_child.at[self.parent.at[row]] = after
        if after:
            previous_sibling[after] = before

    def snapshot_of(self, row: int) -> int:
        """The row of the snapshot of a block, or 0."""
        first: int = self.first_child.at[row]
        return first if first and self.state.at[first] & SNAPSHOT else 0


class Counts:
    """A small number a row; the few great ones are kept aside."""

    def __init__(self, count: int) -> None:
        self.column = Column(np.uint8, count)
        self.at = self.column.at
        self._more: dict[int, int] = {}

    def add(self, row: int) -> None:
        """One more."""
        if self.at[row] < _MAX_CHILDREN:
            self.at[row] += 1
        else:
            self._more[row] = self._more.get(row, 0) + 1

    def subtract(self, row: int) -> int:
        """One less; returns what is left, or at least whether something is."""
        more = self._more.get(row)
        if more is None:
            self.at[row] -= 1
            left: int = self.at[row]
            return left
        if more > 1:
            self._more[row] = more - 1
        else:
            del self._more[row]
        return _MAX_CHILDREN
