"""The segment files that are there, and descriptors to read them by."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from shoal_kv_cache.tiers.ssd.disk import Disk
from shoal_kv_cache.tiers.ssd.layout import PAGE, FileHeader
from shoal_kv_cache.tiers.ssd.page_map import PageMap

_SUFFIX = ".segment"


@dataclass(slots=True, eq=False)
class Segment:
    """One segment file.

    pages         what lies where; its end is the file's
    indexed_end   page below which the index knows what there is
    is_dirty      the index has another page map than this one
    is_closed     nothing is appended any more, whatever its size
    is_retiring   compaction has emptied it
    """

    header: FileHeader
    path: Path
    pages: PageMap = field(default_factory=PageMap)
    indexed_end: int = 0
    is_dirty: bool = True
    is_closed: bool = False
    is_retiring: bool = False

    @property
    def number(self) -> int:
        """Higher than that of every file before it."""
        return self.header.number

    @property
    def file_bytes(self) -> int:
        """What it takes on disk."""
        return self.pages.end * PAGE

    @property
    def waste_bytes(self) -> int:
        """What compaction would free."""
        return self.file_bytes - PAGE - self.pages.live_bytes


def segment_path(directory: Path, number: int) -> Path:
    """Where the file of that number is."""
    return directory / f"{number:010d}{_SUFFIX}"


def number_of(name: str) -> int | None:
    """The number in a file's name; None if it is not a segment file."""
    digits = name.removesuffix(_SUFFIX)
    return int(digits) if name.endswith(_SUFFIX) and digits.isascii() and digits.isdigit() else None


class OpenFiles:
    """Descriptors for reading, at most `max_open` that nobody uses right now. Safe to use from several threads.

    A file that is deleted while someone reads it stays readable for him.
    """

    def __init__(self, disk: Disk, *, max_open: int = 128) -> None:
        self._disk, self._max_open = disk, max_open
        self._lock = threading.Lock()
        self._descriptors: dict[Path, int] = {}
        self._users: dict[int, int] = {}

    @contextmanager
    def use(self, path: Path) -> Iterator[int]:
        """A descriptor of `path`. Raises OSError."""
        descriptor = self._enter(path)
        try:
            yield descriptor
        finally:
            self._leave(path, descriptor)

    def forget(self, path: Path) -> None:
        """The file is deleted."""
        with self._lock:
            self._close_unused(self._descriptors.pop(path, None))

    def close(self) -> None:
        """Closes what nobody uses."""
        with self._lock:
            for path in list(self._descriptors):
                self._close_unused(self._descriptors.pop(path))

    def _enter(self, path: Path) -> int:
        with self._lock:
            descriptor = self._descriptors.get(path)
            if descriptor is not None:
                self._users[descriptor] += 1
                return descriptor
        # Not under the lock: a disk that hangs would stop everybody.
        fresh = self._disk.open(path)
        with self._lock:
            descriptor = self._descriptors.setdefault(path, fresh)
            if descriptor != fresh:
                self._disk.close(fresh)
            self._users[descriptor] = self._users.get(descriptor, 0) + 1
            return descriptor

    def _leave(self, path: Path, descriptor: int) -> None:
        with self._lock:
            self._users[descriptor] -= 1
            if self._descriptors.get(path) != descriptor:
                self._close_unused(descriptor)
            elif len(self._descriptors) > self._max_open and not self._users[descriptor]:
                del self._descriptors[path]
                self._close_unused(descriptor)

    def _close_unused(self, descriptor: int | None) -> None:
        if descriptor is not None and not self._users.get(descriptor):
            self._users.pop(descriptor, None)
            with suppress(OSError):
                self._disk.close(descriptor)
