"""A chain that lies in memory: told by lists, as its answer is, in half of the time that arrays take."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal_kv_cache.core.entries import SEGMENT_BLOCKS, Form, Group
from shoal_kv_cache.core.found import Usable


class InMemory(NamedTuple):
    """The leading visible blocks of a chain, one at least, which all have copies in memory.

    rows        as in Found
    slabs       first slab of each
    checksums   XXH3-64 of each
    form        of all the blocks
    usable      how far they serve, within the bound that was asked for; every snapshot found is in memory too
    """

    group: Group
    first_index: int
    rows: range | NDArray[np.uint32]
    slabs: list[int]
    checksums: list[int]
    form: Form
    usable: Usable

    def columns(self, count: int) -> tuple[list[int], list[int]]:
        """Checksums and slabs of the first `count` blocks."""
        if count == len(self.slabs):
            return self.checksums, self.slabs
        return self.checksums[:count], self.slabs[:count]

    def ends(self, count: int) -> list[int]:
        """The last row of each segment among the first `count` blocks: pinned, they keep those before them."""
        if not count:
            return []
        rows = self.rows[:count]
        ends = rows[SEGMENT_BLOCKS - 1 - self.first_index % SEGMENT_BLOCKS : -1 : SEGMENT_BLOCKS]
        return [*map(int, ends), int(rows[-1])]
