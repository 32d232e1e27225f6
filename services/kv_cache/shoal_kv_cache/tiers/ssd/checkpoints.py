"""Keeps the index behind the files: never ahead of what is durable, never in the way of what is done."""

from __future__ import annotations

from shoal_kv_cache.tiers.ssd.catalog import Catalog
from shoal_kv_cache.tiers.ssd.index_db import IndexDamaged, IndexDb
from shoal_kv_cache.tiers.ssd.layout import FileHeader, number_and_page

_MAX_PENDING_BYTES = 16 << 20


class Checkpoints:
    """What the index does not know yet. One thread uses it.

    When the index cannot be written its view stays where it is and the next start reads the files from there on; what
    waits for it is bounded, and past the bound the index is given up until then.
    """

    def __init__(self, catalog: Catalog, index: IndexDb | None) -> None:
        self._catalog = catalog
        self.index = index
        self._batches: dict[int, bytes] = {}
        self._pending_bytes = 0
        self._gone: list[int] = []
        self.is_failing = index is None

    @property
    def pending(self) -> dict[int, bytes]:
        """Headers of batches of records that are not in the index, by location."""
        return self._batches

    def add(self, location: int, header: bytes) -> None:
        """A batch of records that is written now."""
        self._batches[location] = header
        self._pending_bytes += len(header)
        if self._pending_bytes > _MAX_PENDING_BYTES and self.is_failing:
            self.give_up()

    def forget_file(self, number: int) -> None:
        """The file is gone."""
        self._gone.append(number)

    def run(self) -> None:
        """Writes what is new to the index; call it when that is durable in the files. Never raises."""
        if self.index is None:
            return
        with self._catalog.lock:
            changed = [segment for segment in self._catalog.segments.values() if segment.is_dirty]
            if not changed and not self._gone and not self._batches:
                return
            revived: dict[int, list[int]] = {}
            for location in self._catalog.unwritten:
                number, page = number_and_page(location)
                revived.setdefault(number, []).append(page)
            files: dict[FileHeader, tuple[int, bytes]] = {}
            for segment in changed:
                pages = revived.get(segment.number, [])
                files[segment.header] = (segment.pages.end, segment.pages.to_bytes(pages))
                segment.is_dirty = bool(pages)
            there = self._catalog.segments.keys()
            batches = {at: header for at, header in self._batches.items() if number_and_page(at)[0] in there}
        try:
            self.index.checkpoint(batches, files, self._gone)
        except IndexDamaged:
            self.is_failing = True
            for segment in changed:
                segment.is_dirty = True
            return
        self.is_failing = False
        self._clear()
        for segment in changed:
            segment.indexed_end = files[segment.header][0]

    def give_up(self) -> None:
        """No index until the next start."""
        if self.index is not None:
            self.index.close()
        self.index, self.is_failing = None, True
        self._clear()

    def close(self) -> None:
        """Closes the index."""
        if self.index is not None:
            self.index.close()

    def _clear(self) -> None:
        self._batches.clear()
        self._gone.clear()
        self._pending_bytes = 0
