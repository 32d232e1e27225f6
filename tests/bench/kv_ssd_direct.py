"""What the disk does when asked plainly: O_DIRECT reads and writes of whole pieces, by one or several threads."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import NamedTuple

PAGE = 4096
PIECES = (1 << 20, 2 << 20, 4 << 20)
DEPTHS = (1, 2, 4)


class Way(NamedTuple):
    """Bytes of a piece, and how many pieces are under way at a time."""

    piece: int
    depth: int

    def __str__(self) -> str:
        return f"{self.piece >> 20} MiB x {self.depth}"


WAYS = tuple(Way(*pair) for pair in product(PIECES, DEPTHS))


class PlainFile:
    """A new file that grows.

    Each thread writes from, and reads into, one piece of memory, as fio does: it stays in the processor's cache, which
    is more than a tier can hope for whose payloads come from all over the memory.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
        self._memory = [mmap.mmap(-1, max(PIECES)) for _ in range(max(DEPTHS))]
        for memory in self._memory:
            memory[:] = os.urandom(len(memory))
        self._threads = ThreadPoolExecutor(max(DEPTHS))
        self.end = 0

    def append(self, size_bytes: int, way: Way, sync_every: int = 0) -> None:
        """Appends so many bytes, whole pages; durable after each `sync_every` bytes, if that is not 0."""
        end = self.end + size_bytes
        for begin in range(self.end, end, sync_every or size_bytes):
            some = min(begin + (sync_every or size_bytes), end)
            self._all([(at, min(way.piece, some - at)) for at in range(begin, some, way.piece)], way, os.pwritev)
            if sync_every:
                os.fdatasync(self._descriptor)
        self.end = end

    def read(self, begin: int, size_bytes: int, way: Way) -> None:
        """Reads so many bytes, whole pages."""
        end = begin + size_bytes
        self._all([(at, min(way.piece, end - at)) for at in range(begin, end, way.piece)], way, os.preadv)

    def close(self) -> None:
        """Closes it."""
        self._threads.shutdown()
        os.close(self._descriptor)

    def _all(self, extents: Sequence[tuple[int, int]], way: Way, call: object) -> None:
        def some(first: int) -> None:
            memory = memoryview(self._memory[first])
            for offset, size in extents[first :: way.depth]:
                done = call(self._descriptor, [memory[:size]], offset)  # type: ignore[operator]
                assert done == size

        if way.depth == 1:
            some(0)
        else:
            list(self._threads.map(some, range(way.depth)))


def pages(size_bytes: int) -> int:
    """Bytes in whole pages."""
    return -(-size_bytes // PAGE) * PAGE


def drop_cache(folder: Path) -> None:
    """Nothing of the folder stays in the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
