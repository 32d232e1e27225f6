"""Which parts of an arena are free. Pure."""

from __future__ import annotations

import bisect


class FreeList:
    """First-fit allocation of a range.

    Invariant: free ranges are sorted, disjoint, not adjacent, and with the held ones cover everything.
    """

    def __init__(self, begin: int, end: int, *, alignment: int = 64) -> None:
        """Everything in [begin, end) is free; `begin` is a multiple of `alignment` (a power of two)."""
        if begin % alignment or begin > end:
            raise ValueError(f"[{begin}, {end}) does not start at a multiple of {alignment}")
        self._alignment = alignment
        end -= (end - begin) % alignment
        self._free: list[tuple[int, int]] = [(begin, end)] if end > begin else []
        self._held: dict[int, int] = {}

    @property
    def free_bytes(self) -> int:
        """Bytes in free ranges; not necessarily in one piece."""
        return sum(end - begin for begin, end in self._free)

    @property
    def held_count(self) -> int:
        """Ranges held."""
        return len(self._held)

    def allocate(self, size: int) -> int | None:
        """Offset of a range of at least `size` > 0 bytes, or None when no free range is long enough."""
        if size < 1:
            raise ValueError(f"size must be positive, got {size}")
        size += -size % self._alignment
        for index, (begin, end) in enumerate(self._free):
            if end - begin >= size:
                if begin + size == end:
                    del self._free[index]
                else:
                    self._free[index] = (begin + size, end)
                self._held[begin] = size
                return begin
        return None

    def free(self, offset: int) -> None:
        """Gives a range back and joins it with free neighbours. Raises KeyError for an offset that is not held."""
        size = self._held.pop(offset)
        begin, end = offset, offset + size
        index = bisect.bisect_left(self._free, (begin, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == begin:
            index -= 1
            begin = self._free.pop(index)[0]
        self._free.insert(index, (begin, end))
