"""Finds at the start what the files have: the index for what it knows, the files for the rest."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from shoal_kv_cache.tiers.descriptions import Malformed, Record
from shoal_kv_cache.tiers.ssd.aligned import AlignedPool
from shoal_kv_cache.tiers.ssd.catalog import Catalog
from shoal_kv_cache.tiers.ssd.checkpoints import Checkpoints
from shoal_kv_cache.tiers.ssd.columns import Columns
from shoal_kv_cache.tiers.ssd.disk import Disk
from shoal_kv_cache.tiers.ssd.index_db import IndexDamaged, IndexDb, IndexedFile
from shoal_kv_cache.tiers.ssd.layout import PAGE, Batch, location_of, number_and_page, pages_of
from shoal_kv_cache.tiers.ssd.log import MAX_UNSYNCED_FILES
from shoal_kv_cache.tiers.ssd.scan import Scanner
from shoal_kv_cache.tiers.ssd.segments import Segment, number_of, segment_path
from shoal_kv_cache.tiers.ssd.values import Recovered

logger = logging.getLogger(__name__)


class Recovery:
    """Fills a catalog from a folder. Used once.

    The files are the truth. A record of the index counts where its file has it; a tombstone counts wherever it lies; a
    copy made by compaction replaces what it was copied from.
    """

    def __init__(
        self, disk: Disk, directory: Path, catalog: Catalog, pool: AlignedPool, checkpoints: Checkpoints
    ) -> None:
        self._disk, self._directory, self._catalog, self._pool = disk, directory, catalog, pool
        self._checkpoints = checkpoints
        self._trusted: set[int] = set()
        self._dead: list[int] = []
        self.unreadable: list[OSError] = []

    def run(self) -> Iterator[Recovered]:
        """Reads everything that must be read, then yields what lives, parents before children.

        Raises IndexDamaged before anything is yielded: then another one is run, with a fresh catalog and no index.
        """
        index = self._checkpoints.index
        known = index.files() if index is not None else {}
        numbers = sorted(
            number for name in self._disk.names(self._directory) if (number := number_of(name)) is not None
        )
        recent = numbers[-1 - MAX_UNSYNCED_FILES :]
        for number in numbers:
            self._catalog.highest_number = number
            try:
                self._open(number, known.get(number), is_last=number == numbers[-1], is_checked=number in recent)
            except OSError as error:
                # It stays where it is: the next start may read it.
                logger.warning("a segment file cannot be read", extra={"number": number, "error": str(error)})
                self.unreadable.append(error)
                self._catalog.unreadable.add(number)
        for number in known.keys() - set(numbers):
            self._checkpoints.forget_file(number)
        for location in self._dead:
            self._catalog.kill(location)
        columns = self._columns(index)
        rows, locations = columns.living(self._catalog)
        if index is not None:
            index.trusted()
        self._checkpoints.run()
        return columns.entries(rows, locations, self._catalog)

    def _open(self, number: int, known: IndexedFile | None, *, is_last: bool, is_checked: bool) -> None:
        path = segment_path(self._directory, number)
        descriptor = self._disk.open(path)
        try:
            scanner = Scanner(self._disk, self._pool, descriptor, self._disk.size(path))
            header = scanner.file_header(number)
            if header is None:
                self._pass_over(path, number, is_last=is_last)
                return
            segment = Segment(header, path)
            if known is not None and known.file_id == header.file_id:
                segment.pages, segment.indexed_end, segment.is_dirty = known.pages, known.indexed_end, False
                self._trusted.add(number)
            else:
                segment.pages.add_payloads((), 1)
                self._checkpoints.forget_file(number)
            self._catalog.add(segment)
            if segment.pages.end > scanner.end:
                # Cut by somebody: what is behind is gone, and nothing more is put there.
                self._catalog.cut(segment, scanner.end)
                segment.is_closed = True
            self._scan(segment, scanner, is_last=is_last, is_checked=is_checked)
        finally:
            self._disk.close(descriptor)

    def _scan(self, segment: Segment, scanner: Scanner, *, is_last: bool, is_checked: bool) -> None:
        for batch in scanner.batches(segment.header, segment.pages.end):
            end = batch.page + batch.page_count
            if end > scanner.end and is_last:
                # The end of the log, being written when the process died: it was never promised.
                break
            records = [record for record in batch.records if _is_there(scanner, batch, record, is_checked=is_checked)]
            self._pad(segment, batch.page)
            counts = [pages_of(shared.form.size_bytes) for shared in batch.forms]
            payloads = [(record.page, counts[record.form_index]) for record in records]
            self._catalog.add_batch(segment, min(end, scanner.end) - batch.page, payloads)
            if records:
                self._checkpoints.add(location_of(segment.number, batch.page), batch.header)
            self._dead.extend(batch.tombstones)
        if segment.pages.end < scanner.end and is_last:
            self._cut(segment)
        else:
            self._pad(segment, scanner.end)

    def _pad(self, segment: Segment, end: int) -> None:
        gap = end - segment.pages.end
        if gap > 0:
            self._catalog.add_batch(segment, gap, ())

    def _cut(self, segment: Segment) -> None:
        try:
            descriptor = self._disk.open(segment.path, is_writable=True)
        except OSError:
            segment.is_closed = True
            return
        try:
            self._disk.truncate(descriptor, segment.pages.end * PAGE)
            self._disk.reached("recovery.cut")
        except OSError:
            segment.is_closed = True
        finally:
            self._disk.close(descriptor)

    def _pass_over(self, path: Path, number: int, *, is_last: bool) -> None:
        """A file of which nothing can be read: made in the moment of a crash, or ruined. The last keeps its number."""
        logger.warning("a segment file has nothing that can be read", extra={"number": number})
        if not is_last:
            with suppress(OSError):
                self._disk.delete(path)

    def _columns(self, index: IndexDb | None) -> Columns:
        """What the index has of files that it knows, and what was read from the files."""
        columns = Columns()
        for location, header in index.batches() if index is not None else ():
            number, page = number_and_page(location)
            if number in self._trusted:
                try:
                    columns.add(self._catalog.segments[number].header, page, header)
                except Malformed as error:
                    raise IndexDamaged(str(error)) from error
        for location, header in sorted(self._checkpoints.pending.items()):
            number, page = number_and_page(location)
            columns.add(self._catalog.segments[number].header, page, header)
        return columns


def _is_there(scanner: Scanner, batch: Batch, record: Record, *, is_checked: bool) -> bool:
    size_bytes = batch.forms[record.form_index].form.size_bytes
    if record.page + pages_of(size_bytes) > scanner.end:
        return False
    return not is_checked or scanner.is_intact(record.page, size_bytes, record.checksum)
