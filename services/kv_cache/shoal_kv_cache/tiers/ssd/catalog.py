"""Which segment files there are and what lives in them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shoal_kv_cache.tiers.ssd.layout import PAGE, PAGE_BITS, number_and_page
from shoal_kv_cache.tiers.ssd.segments import Segment


class Catalog:
    """Segment files by number. Safe to use from several threads.

    Invariant: live_bytes and record_count are the sums over the page maps of `segments`, file_bytes over the files.

    unreadable  numbers of files that are there and could not be opened
    unwritten   places of removed records that have no tombstone yet; for the index they live until they have one, since
                what it alone knew would be back when it is lost
    copied      bytes of records that compaction has written once more, by the place of the first; until their files go
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.segments: dict[int, Segment] = {}
        self.unreadable: set[int] = set()
        self.unwritten: set[int] = set()
        self.copied: dict[int, int] = {}
        self.highest_number = 0
        self.live_bytes = 0
        self.record_count = 0
        self.file_bytes = 0

    def add(self, segment: Segment) -> None:
        """A file with whatever is in it."""
        with self.lock:
            self.segments[segment.number] = segment
            self.highest_number = max(self.highest_number, segment.number)
            self._count(segment, 1)

    def drop(self, number: int) -> Segment | None:
        """The file is gone."""
        with self.lock:
            segment = self.segments.pop(number, None)
            if segment is not None:
                self._count(segment, -1)
            return segment

    def add_batch(self, segment: Segment, page_count: int, payloads: Sequence[tuple[int, int]]) -> None:
        """A batch of page_count pages lies at the end of the file now, with payloads (page, page count)."""
        with self.lock:
            self._count(segment, -1)
            end = segment.pages.end + page_count
            segment.pages.add_payloads(payloads, end)
            segment.is_dirty = True
            self._count(segment, 1)

    def cut(self, segment: Segment, end: int) -> None:
        """Nothing at or above page `end` counts any more."""
        with self.lock:
            self._count(segment, -1)
            segment.pages.cut(end)
            segment.indexed_end = min(segment.indexed_end, end)
            segment.is_dirty = True
            self._count(segment, 1)

    def kill(self, location: int) -> bool:
        """Removes a record; False if it does not live."""
        number, page = number_and_page(location)
        with self.lock:
            segment = self.segments.get(number)
            if segment is None or not segment.pages.is_live(page):
                return False
            self._count(segment, -1)
            segment.pages.kill(page)
            segment.is_dirty = True
            self._count(segment, 1)
            return True

    def find(self, location: int) -> Segment | None:
        """The file where a record lives; None if it does not."""
        number, page = number_and_page(location)
        with self.lock:
            segment = self.segments.get(number)
            return segment if segment is not None and segment.pages.is_live(page) else None

    def are_live(self, locations: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Whether a record lives there, for each; in any order."""
        found = np.zeros(len(locations), np.bool_)
        numbers, pages = locations >> np.uint64(PAGE_BITS), locations & np.uint64((1 << PAGE_BITS) - 1)
        order = np.argsort(numbers, kind="stable")
        borders = np.flatnonzero(np.diff(numbers[order])) + 1
        with self.lock:
            for chosen in np.split(order, borders) if len(order) else ():
                segment = self.segments.get(int(numbers[chosen[0]]))
                if segment is not None:
                    found[chosen] = segment.pages.are_live(pages[chosen])
        return found

    @property
    def payload_bytes(self) -> int:
        """live_bytes without the second copies that compaction has just made."""
        with self.lock:
            return self.live_bytes - sum(size for at, size in self.copied.items() if self.find(at) is not None)

    @property
    def next_number(self) -> int:
        """A number above every file's. The file with the highest one is never deleted, so none is used twice."""
        return self.highest_number + 1

    @property
    def waste_bytes(self) -> int:
        """What compaction of everything would free."""
        with self.lock:
            return self.file_bytes - self.live_bytes - len(self.segments) * PAGE

    def _count(self, segment: Segment, sign: int) -> None:
        self.live_bytes += sign * segment.pages.live_bytes
        self.record_count += sign * segment.pages.live_count
        self.file_bytes += sign * segment.file_bytes
