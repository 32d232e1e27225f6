"""What lies where in one segment file. Pure."""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from shoal_kv_cache.tiers.ssd.layout import PAGE

_COUNTS = struct.Struct("<III")


class PageMap:
    """Two bits for each page of a file: something begins here (a payload or a batch), and it is a payload that lives.

    Invariant: live_pages is the sum of the pages of the payloads that live, live_count their number; a payload reaches
    to where the next thing begins.
    """

    __slots__ = ("_begins", "_lives", "end", "live_count", "live_pages")

    def __init__(self) -> None:
        self._begins, self._lives = bytearray(), bytearray()
        self.end = 0
        self.live_count = 0
        self.live_pages = 0

    def add_payloads(self, payloads: Sequence[tuple[int, int]], end: int) -> None:
        """The file goes on to page `end`, with payloads (page, page count) in ascending order; the rest is no payload.

        Raises ValueError, then nothing is added, if they do not lie between the old end and the new one.
        """
        at = self.end
        for page, count in payloads:
            if page < at or page + count > end:
                raise ValueError(f"pages {page} to {page + count} do not lie in {at} to {end}")
            at = page + count
        missing = (end + 7) // 8 - len(self._begins)
        begins, lives = self._begins, self._lives
        begins.extend(bytes(missing))
        lives.extend(bytes(missing))
        at = self.end
        for page, count in payloads:
            if at < page:
                begins[at >> 3] |= 1 << (at & 7)
            bit = 1 << (page & 7)
            begins[page >> 3] |= bit
            lives[page >> 3] |= bit
            self.live_pages += count
            at = page + count
        if at < end:
            begins[at >> 3] |= 1 << (at & 7)
        self.live_count += len(payloads)
        self.end = end

    def is_live(self, page: int) -> bool:
        """Whether a payload begins there and is not removed."""
        return page < self.end and bool(self._lives[page >> 3] >> (page & 7) & 1)

    def are_live(self, pages: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """is_live of many pages."""
        bits = np.unpackbits(np.frombuffer(bytes(self._lives), np.uint8), count=self.end, bitorder="little")
        found = pages < self.end
        found[found] = bits[pages[found]] != 0
        return found

    def kill(self, page: int) -> bool:
        """Removes the payload that begins there; False if none lives there."""
        if not self.is_live(page):
            return False
        self._lives[page >> 3] &= ~(1 << (page & 7))
        self.live_count -= 1
        self.live_pages -= self.pages_at(page)
        return True

    def pages_at(self, page: int) -> int:
        """How far what begins at `page` reaches."""
        following = page + 1
        while following < self.end:
            bits = self._begins[following >> 3] >> (following & 7)
            if bits:
                return min(self.end, following + (bits & -bits).bit_length() - 1) - page
            following = (following | 7) + 1
        return self.end - page

    def cut(self, end: int) -> None:
        """Forgets everything that reaches above `end`."""
        for page in range(end, self.end):
            self.kill(page)
        last = next(
            (page for page in range(min(end, self.end) - 1, -1, -1) if self._begins[page >> 3] >> (page & 7) & 1), 0
        )
        if last + self.pages_at(last) > end:
            self.kill(last)
        self.end = min(self.end, end)
        size = (self.end + 7) // 8
        for bits in (self._begins, self._lives):
            del bits[size:]
            if self.end & 7:
                bits[-1] &= (1 << (self.end & 7)) - 1

    @property
    def live_bytes(self) -> int:
        """Bytes of the payloads that live, in whole pages."""
        return self.live_pages * PAGE

    def to_bytes(self, revived: Collection[int] = ()) -> bytes:
        """For the index, with the payloads at `revived` as if they lived."""
        lives, pages = bytearray(self._lives), self.live_pages
        for page in revived:
            lives[page >> 3] |= 1 << (page & 7)
            pages += self.pages_at(page)
        counts = _COUNTS.pack(self.end, self.live_count + len(revived), pages)
        return b"".join((counts, self._begins, lives))

    @classmethod
    def from_bytes(cls, data: bytes) -> PageMap:
        """Raises ValueError."""
        if len(data) < _COUNTS.size:
            raise ValueError(f"{len(data)} bytes")
        made = cls()
        made.end, made.live_count, made.live_pages = _COUNTS.unpack_from(data)
        size = (made.end + 7) // 8
        if len(data) != _COUNTS.size + 2 * size:
            raise ValueError(f"{len(data)} bytes for {made.end} pages")
        bits = data[_COUNTS.size :]
        made._begins, made._lives = bytearray(bits[:size]), bytearray(bits[size:])
        return made
