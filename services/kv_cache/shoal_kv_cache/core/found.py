"""What a chain has here, and how much of it is usable. Pure values: arrays in block order, no object per block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal_kv_cache.core.entries import BLOCK_TOKENS, Form, Group

NO_SLAB = 0xFFFF_FFFF
NO_LOCATION = 0xFFFF_FFFF_FFFF_FFFF


class Copy(Enum):
    """Which copies of this node count."""

    RAM = "ram"
    ANY = "any"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSnapshot:
    """A snapshot on the path. `slab` and `location` are None where there is no such copy."""

    row: int
    block_index: int
    form: Form
    checksum: int
    slab: int | None
    location: int | None

    @property
    def position_end(self) -> int:
        """Where it ends."""
        return (self.block_index + 1) * BLOCK_TOKENS


class Usable(NamedTuple):
    """How far a prefix serves with some copies.

    hit_tokens      greatest H with blocks [.., H) and a snapshot at H; 0 for none
    replay_tokens   blocks [.., this) are there: usable by warm replay; 0 unless greater than hit_tokens
    present_tokens  leading blocks, whatever is usable, also above the bound
    snapshot        the one at hit_tokens
    """

    hit_tokens: int
    replay_tokens: int
    present_tokens: int
    snapshot: FoundSnapshot | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The leading visible blocks of a chain, from block `first_index` on, in order.

    Rows are the index's own numbers, good until its next operation that changes something; `Index.pin` keeps them.

    slabs            first slab of each block; NO_SLAB where there is no copy in memory
    locations        place of each on disk; NO_LOCATION where there is none
    checksums        XXH3-64 of each
    form             of all the blocks; None where there are none
    snapshot_places  which of these blocks have a snapshot, ascending, counted from `first_index`
    snapshot_in_ram  whether each of these snapshots has a copy in memory
    """

    group: Group
    first_index: int
    rows: NDArray[np.uint32]
    slabs: NDArray[np.uint32]
    locations: NDArray[np.uint64]
    checksums: NDArray[np.uint64]
    form: Form | None
    snapshot_places: NDArray[np.int64]
    snapshot_in_ram: NDArray[np.bool_]
    describe_snapshot: Callable[[int], FoundSnapshot] = field(repr=False)

    @property
    def block_count(self) -> int:
        """Leading blocks found."""
        return len(self.rows)

    @property
    def ram_count(self) -> int:
        """Leading blocks that all have a copy in memory."""
        missing = np.flatnonzero(self.slabs == NO_SLAB)
        return int(missing[0]) if len(missing) else len(self.slabs)

    def columns(self, count: int) -> tuple[list[int], list[int]]:
        """Checksums and slabs of the first `count` blocks."""
        return self.checksums[:count].tolist(), self.slabs[:count].tolist()

    @property
    def snapshots(self) -> tuple[FoundSnapshot, ...]:
        """All snapshots on the path, ascending."""
        return tuple(self.describe_snapshot(int(self.rows[place])) for place in self.snapshot_places)

    def usable(self, copies: Copy, *, max_hit_tokens: int) -> Usable:
        """The longest usable prefix, counting only copies in memory or all of this node's."""
        count = self.ram_count if copies is Copy.RAM else self.block_count
        present = (self.first_index + count) * BLOCK_TOKENS if count else 0
        bound = min(present, max_hit_tokens // BLOCK_TOKENS * BLOCK_TOKENS)
        if not len(self.snapshot_places):
            return Usable(0, max(bound, 0), present, None)
        fits = (self.snapshot_places + (self.first_index + 1)) * BLOCK_TOKENS <= bound
        if copies is Copy.RAM:
            fits &= self.snapshot_in_ram
        usable = np.flatnonzero(fits)
        snapshot = self.describe_snapshot(int(self.rows[self.snapshot_places[usable[-1]]])) if len(usable) else None
        hit = snapshot.position_end if snapshot is not None else 0
        return Usable(hit, bound if bound > hit else 0, present, snapshot)

    def load_bytes(self, usable: Usable, *, with_replay: bool) -> int:
        """Bytes to read from disk so that `usable` lies in memory."""
        end = max(usable.hit_tokens, usable.replay_tokens if with_replay else 0) // BLOCK_TOKENS - self.first_index
        block_bytes = self.form.size_bytes if self.form is not None else 0
        total = int(np.count_nonzero(self.slabs[: max(0, end)] == NO_SLAB)) * block_bytes
        if usable.snapshot is not None and usable.snapshot.slab is None:
            total += usable.snapshot.form.size_bytes
        return total
