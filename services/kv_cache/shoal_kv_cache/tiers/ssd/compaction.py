"""Chooses files that are mostly waste and copies what lives in them to the end of the log."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from shoal_common.errors import ChecksumMismatch, MeshError, NotFound

from shoal_kv_cache.core.entries import Key
from shoal_kv_cache.tiers.descriptions import Record
from shoal_kv_cache.tiers.ssd.aligned import AlignedPool
from shoal_kv_cache.tiers.ssd.catalog import Catalog
from shoal_kv_cache.tiers.ssd.disk import Disk
from shoal_kv_cache.tiers.ssd.errors import from_os
from shoal_kv_cache.tiers.ssd.layout import MAX_TOMBSTONES, PAGE, Batch, location_of, number_and_page
from shoal_kv_cache.tiers.ssd.reader import Reader
from shoal_kv_cache.tiers.ssd.scan import Scanner
from shoal_kv_cache.tiers.ssd.segments import OpenFiles, Segment
from shoal_kv_cache.tiers.ssd.staging import Copy, Staging, wait_for
from shoal_kv_cache.tiers.ssd.values import Moved, Read
from shoal_kv_cache.tiers.ssd.writer import Remove, Writer

_MIN_WASTE = 16
"""A file is worth compacting when one part in so many is waste."""


def victims(catalog: Catalog, max_bytes: int) -> list[Segment]:
    """Files to empty: the most wasteful first, until their live bytes reach max_bytes. Never the newest."""
    with catalog.lock:
        candidates = [
            segment
            for segment in catalog.segments.values()
            if segment.number < catalog.highest_number and segment.waste_bytes * _MIN_WASTE >= segment.file_bytes - PAGE
        ]
    candidates.sort(key=lambda segment: (-segment.waste_bytes / segment.file_bytes, segment.number))
    chosen: list[Segment] = []
    copied_bytes = 0
    for segment in candidates:
        if chosen and copied_bytes + segment.pages.live_bytes > max_bytes:
            break
        chosen.append(segment)
        copied_bytes += segment.pages.live_bytes
    return chosen


class Mover:
    """Ends records and empties files.

    Invariant: `moves` names both places of every record that is copied and not retired yet.
    """

    def __init__(
        self,
        catalog: Catalog,
        files: OpenFiles,
        disk: Disk,
        pool: AlignedPool,
        *,
        reader: Reader,
        writer: Writer,
        staging: Staging,
    ) -> None:
        self._catalog, self._files, self._disk, self._pool = catalog, files, disk, pool
        self._reader, self._writer, self._staging = reader, writer, staging
        self._one_at_a_time = threading.Lock()
        self._moves: dict[int, int] = {}
        self.emptied: list[Segment] = []

    @property
    def waste_bytes(self) -> int:
        """What could be freed now."""
        with self._catalog.lock:
            newest = self._catalog.highest_number
            return sum(segment.waste_bytes for number, segment in self._catalog.segments.items() if number < newest)

    def kill(self, locations: Sequence[int]) -> list[int]:
        """Ends records, with their copies; returns the locations for which a tombstone is wanted."""
        with self._catalog.lock:
            both = [*locations, *(self._moves[at] for at in locations if at in self._moves)]
            dead = [at for at in both if self._catalog.kill(at) or at in self._catalog.unwritten]
            self._catalog.unwritten.update(dead)
            return dead

    def compact(self, max_bytes: int, give_up_at_s: float) -> list[Moved]:
        """As SsdTier.compact."""
        with self._one_at_a_time:
            if self.emptied:
                return []
            chosen = victims(self._catalog, max_bytes)
            moved: list[Moved] = []
            try:
                for segment in chosen:
                    self._empty(segment, chosen, moved, give_up_at_s)
            except OSError as error:
                self._put_back(moved)
                raise from_os(error, "reading for compaction") from error
            except MeshError:
                self._put_back(moved)
                raise
            self.emptied = chosen
            return moved

    def retired(self) -> None:
        """The emptied files are gone."""
        with self._catalog.lock:
            self._moves.clear()
            self._catalog.copied.clear()
            self.emptied = []

    def _empty(self, segment: Segment, chosen: Sequence[Segment], moved: list[Moved], give_up_at_s: float) -> None:
        leaving = {victim.number for victim in chosen}
        tombstones: list[int] = []
        for batch in self._batches(segment):
            alive = [at for at in batch.records if self._catalog.find(location_of(segment.number, at.page)) is not None]
            moved.extend(self._copy(segment, batch, alive, give_up_at_s))
            staying = (self._catalog.segments.keys() | self._catalog.unreadable) - leaving
            tombstones.extend(location for location in batch.tombstones if number_and_page(location)[0] in staying)
        for begin in range(0, len(tombstones), MAX_TOMBSTONES):
            job = Remove(tombstones[begin : begin + MAX_TOMBSTONES])
            self._writer.submit(job)
            wait_for(job.done, give_up_at_s)

    def _batches(self, segment: Segment) -> Iterator[Batch]:
        with self._files.use(segment.path) as descriptor:
            yield from Scanner(self._disk, self._pool, descriptor, segment.file_bytes).batches(segment.header, 1)

    def _copy(self, segment: Segment, batch: Batch, records: Sequence[Record], give_up_at_s: float) -> Iterator[Moved]:
        reads = [
            Read(location_of(segment.number, at.page), batch.forms[at.form_index].form.size_bytes, at.checksum)
            for at in records
        ]
        copies: list[Copy] = []
        for record, read, found in zip(
            records, reads, self._reader.read_many(reads, give_up_at_s - time.monotonic()), strict=True
        ):
            if isinstance(found, ChecksumMismatch):
                self._catalog.kill(read.location)
                yield Moved(Key(record.kind, record.block_hash), read.location, None)
            elif isinstance(found, bytes):
                copies.append((batch.forms[record.form_index], record._replace(replaces=read.location), found))
            elif not isinstance(found, NotFound):
                assert found is not None
                raise found
        if copies:
            yield from self._settle(copies, self._staging.append_copies(copies, give_up_at_s))

    def _settle(self, copies: Sequence[Copy], locations: Sequence[int]) -> list[Moved]:
        """Notes where copies are, except of what was removed meanwhile: that must not live on in its copy."""
        moved: list[Moved] = []
        dead: list[int] = []
        with self._catalog.lock:
            for (_, record, _), location in zip(copies, locations, strict=True):
                if location and self._catalog.find(record.replaces) is not None:
                    self._moves[record.replaces] = location
                    moved.append(Moved(Key(record.kind, record.block_hash), record.replaces, location))
                elif location:
                    dead.append(location)
        self._discard(dead)
        return moved

    def _put_back(self, moved: Sequence[Moved]) -> None:
        with self._catalog.lock:
            self._moves.clear()
            self._catalog.copied.clear()
        self._discard([at.new_location for at in moved if at.new_location is not None])

    def _discard(self, locations: Sequence[int]) -> None:
        dead = [location for location in locations if self._catalog.kill(location)]
        for begin in range(0, len(dead), MAX_TOMBSTONES):
            # Without its tombstone a copy is found by the next start in place of what it was copied from.
            with suppress(MeshError):
                self._writer.submit(Remove(dead[begin : begin + MAX_TOMBSTONES]))
