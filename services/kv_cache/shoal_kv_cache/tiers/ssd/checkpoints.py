"""Keeps the index behind the files: never ahead of what is durable, never in the way of what is done."""

from __future__ import annotations

from collections.abc import Sequence

from shoal_kv_cache.tiers.descriptions import GroupForm, Record
from shoal_kv_cache.tiers.ssd.catalog import Catalog
from shoal_kv_cache.tiers.ssd.index_db import IndexDamaged, IndexDb
from shoal_kv_cache.tiers.ssd.layout import FileHeader, location_of, number_and_page

_MAX_PENDING = 1 << 17


class Checkpoints:
    """What the index does not know yet. One thread uses it.

    When the index cannot be written its view stays where it is and the next start reads the files from there on; what
    waits for it is bounded, and past the bound the index is given up until then.
    """

    def __init__(self, catalog: Catalog, index: IndexDb | None) -> None:
        self._catalog = catalog
        self.index = index
        self._records: dict[int, tuple[GroupForm, Record]] = {}
        self._gone: list[int] = []
        self.is_failing = index is None

    @property
    def pending(self) -> dict[int, tuple[GroupForm, Record]]:
        """Records by location that are not in the index."""
        return self._records

    def add(self, number: int, forms: Sequence[GroupForm], records: Sequence[Record], first: int = 0) -> None:
        """Records that are written now; their pages count from `first`."""
        begin = location_of(number, first)
        for record in records:
            self._records[begin + record.page] = (forms[record.form_index], record)
        if len(self._records) > _MAX_PENDING and self.is_failing:
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
            if not changed and not self._gone and not self._records:
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
            records = {at: found for at, found in self._records.items() if self._lives(at)}
        try:
            self.index.checkpoint(records, files, self._gone)
        except IndexDamaged:
            self.is_failing = True
            for segment in changed:
                segment.is_dirty = True
            return
        self.is_failing = False
        self._records.clear()
        self._gone.clear()
        for segment in changed:
            segment.indexed_end = files[segment.header][0]

    def _lives(self, location: int) -> bool:
        return self._catalog.find(location) is not None or location in self._catalog.unwritten

    def give_up(self) -> None:
        """No index until the next start."""
        if self.index is not None:
            self.index.close()
        self.index, self.is_failing = None, True
        self._records.clear()
        self._gone.clear()

    def close(self) -> None:
        """Closes the index."""
        if self.index is not None:
            self.index.close()
