"""Appends batches to the newest segment file."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from shoal_kv_cache.tiers.ssd.catalog import Catalog
from shoal_kv_cache.tiers.ssd.disk import Disk
from shoal_kv_cache.tiers.ssd.layout import (
    FILE_ID_BYTES,
    MAX_HEADER_BYTES,
    PAGE,
    Body,
    FileHeader,
    encode_file_header,
    encode_records,
    encode_tombstones,
)
from shoal_kv_cache.tiers.ssd.segments import Segment, segment_path

MAX_UNSYNCED_FILES = 4
"""Files before the newest that may be there and not be durable."""


class Written(NamedTuple):
    """A batch in the log: its file, its page, the page of its first payload, and its header as it lies there."""

    number: int
    page: int
    first: int
    header: bytes


class Log:
    """The end of the log. One thread uses it. Every method raises OSError, and then nothing of the call counts.

    Invariant: what the catalog has of the file is written; what is above its end is not counted by anybody.
    """

    def __init__(
        self, disk: Disk, directory: Path, catalog: Catalog, *, segment_file_bytes: int, is_synced: bool
    ) -> None:
        self._disk, self._directory, self._catalog = disk, directory, catalog
        self._segment_file_bytes, self._is_synced = segment_file_bytes, is_synced
        self._header = memoryview(mmap.mmap(-1, MAX_HEADER_BYTES))
        self._segment: Segment | None = None
        self._descriptor = -1
        self._unsynced: list[int] = []
        self._has_new_names = False
        self.is_dirty = False
        self.written_bytes = 0

    def append(self, body: Body, payloads: Sequence[tuple[int, int]], batch: memoryview, header_bytes: int) -> Written:
        """A batch: room for its header, then its payloads (page, page count), counted from the first."""
        segment = self._room_for(len(batch))
        begin = segment.pages.end
        first = begin + header_bytes // PAGE
        header = encode_records(segment.header, begin, body, first, begin + len(batch) // PAGE)
        batch[: len(header)] = header
        batch[len(header) : header_bytes] = bytes(header_bytes - len(header))
        self._write(segment, batch)
        self._catalog.add_batch(segment, len(batch) // PAGE, [(first + page, count) for page, count in payloads])
        return Written(segment.number, begin, first, header)

    def append_tombstones(self, locations: Sequence[int]) -> None:
        """A batch of tombstones, at most MAX_TOMBSTONES."""
        segment = self._room_for(PAGE)
        header = encode_tombstones(segment.header, segment.pages.end, locations)
        self._header[: len(header)] = header
        self._write(segment, self._header[: len(header)])
        self._catalog.add_batch(segment, len(header) // PAGE, ())

    def sync(self) -> None:
        """Makes everything durable. After a failure the files are left alone: what they lost cannot be known."""
        if not self.is_dirty:
            return
        try:
            self._disk.reached("sync.begun")
            for descriptor in self._unsynced:
                self._disk.sync(descriptor)
            if self._segment is not None:
                self._disk.sync(self._descriptor)
            if self._has_new_names:
                self._disk.sync_directory(self._directory)
        except OSError:
            self._leave()
            self._forget_unsynced()
            raise
        self._has_new_names = False
        self._forget_unsynced()

    def undo(self, segment: Segment, end: int) -> None:
        """Takes back what was appended above page `end`, as far as the disk lets us."""
        self._catalog.cut(segment, end)
        if segment is self._segment:
            with suppress(OSError):
                self._disk.truncate(self._descriptor, end * PAGE)
                return
            self._leave()

    def close(self) -> None:
        """Lets go of the file."""
        self._leave()
        self._forget_unsynced()

    def _write(self, segment: Segment, batch: memoryview) -> None:
        end = segment.pages.end
        self.is_dirty = True
        try:
            self._disk.reached("append.begun")
            self._disk.write(self._descriptor, [batch], end * PAGE)
            self._disk.reached("append.written")
        except OSError:
            self.undo(segment, end)
            raise
        self.written_bytes += len(batch)

    def _room_for(self, size_bytes: int) -> Segment:
        segment = self._segment
        if segment is None:
            segment = self._resume()
        if segment is not None:
            is_fresh = segment.pages.end <= 1
            if is_fresh or segment.file_bytes + size_bytes <= self._segment_file_bytes:
                return segment
            if len(self._unsynced) >= MAX_UNSYNCED_FILES:
                self.sync()
            self._disk.reached("roll.begun")
        fresh = self._create()
        self._leave()
        self._segment, self._descriptor = fresh
        return self._segment

    def _resume(self) -> Segment | None:
        """The newest file, when more can be appended to it."""
        newest = self._catalog.segments.get(self._catalog.next_number - 1)
        if newest is None or newest.is_closed or newest.file_bytes >= self._segment_file_bytes:
            return None
        self._descriptor, self._segment = self._disk.open(newest.path, is_writable=True), newest
        return newest

    def _create(self) -> tuple[Segment, int]:
        number = self._catalog.next_number
        header = FileHeader(number, os.urandom(FILE_ID_BYTES))
        path = segment_path(self._directory, number)
        # Left over from an attempt that failed: nothing was ever promised in it.
        self._disk.delete(path)
        descriptor = self._disk.open(path, is_new=True, is_writable=True)
        try:
            self._disk.reached("roll.created")
            page = self._header[:PAGE]
            page[:] = encode_file_header(header)
            self._disk.write(descriptor, [page], 0)
            self._disk.reached("roll.headed")
        except OSError:
            self._disk.close(descriptor)
            with suppress(OSError):
                self._disk.delete(path)
            raise
        segment = Segment(header, path)
        segment.pages.add_payloads((), 1)
        self.written_bytes += PAGE
        self._has_new_names = self.is_dirty = True
        self._catalog.add(segment)
        return segment, descriptor

    def _leave(self) -> None:
        if self._segment is None:
            return
        self._segment.is_closed = True
        if self._is_synced and self.is_dirty:
            # The disk is asked once for all files, when something must be durable.
            self._unsynced.append(self._descriptor)
        else:
            self._disk.close(self._descriptor)
        self._segment, self._descriptor = None, -1

    def _forget_unsynced(self) -> None:
        for descriptor in self._unsynced:
            self._disk.close(descriptor)
        self._unsynced.clear()
        self.is_dirty = False
