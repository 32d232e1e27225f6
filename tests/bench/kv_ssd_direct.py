"""What the disk does when asked plainly: O_DIRECT reads and writes of whole pieces, by one or several threads."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

Call = Callable[[int, list[memoryview], int], int]

PAGE = 4096
PIECES = (1 << 20, 2 << 20, 4 << 20)
DEPTHS = (1, 2, 4)


class Way(NamedTuple):
    """Bytes of a piece, how many pieces are under way at a time, and whether each thread has one piece of memory.

    Otherwise every byte has a place of its own, as payloads have. One piece stays in a processor's cache, as in fio;
    where the disk is a host's memory that is faster, and no transfer of data that somebody made or uses.
    """

    piece: int
    depth: int
    is_one_piece: bool = False

    def __str__(self) -> str:
        return f"{self.piece / (1 << 20):g} MiB x {self.depth}{' one piece' if self.is_one_piece else ''}"


WAYS = tuple(Way(*pair) for pair in product(PIECES, DEPTHS))
ONE_PIECE_WAYS = tuple(Way(piece, depth, True) for piece, depth in ((1 << 20, 1), (1 << 20, 4), (4 << 20, 1)))


class PlainFile:
    """A new file that grows, written from and read into `memory`, which has whole pages."""

    def __init__(self, path: Path, memory: mmap.mmap) -> None:
        self._all_memory = memoryview(memory)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
        self._memory = [mmap.mmap(-1, max(PIECES)) for _ in range(max(DEPTHS))]
        for memory in self._memory:
            np.frombuffer(memory, np.uint8)[:] = np.frombuffer(self._all_memory[: len(memory)], np.uint8)
        self._threads = ThreadPoolExecutor(max(DEPTHS))
        self.end = 0

    def append(self, size_bytes: int, way: Way, sync_every: int = 0) -> None:
        """Appends so many bytes, whole pages; durable after each `sync_every` bytes, if that is not 0."""
        first, end = self.end, self.end + size_bytes
        for begin in range(first, end, sync_every or size_bytes):
            some = min(begin + (sync_every or size_bytes), end)
            self._all(range(begin, some, way.piece), first, some, way, os.pwritev)
            if sync_every:
                os.fdatasync(self._descriptor)
        self.end = end

    def read(self, begin: int, size_bytes: int, way: Way) -> None:
        """Reads so many bytes, whole pages."""
        end = begin + size_bytes
        self._all(range(begin, end, way.piece), begin, end, way, os.preadv)

    def close(self) -> None:
        """Closes it."""
        self._threads.shutdown()
        os.close(self._descriptor)

    def _all(self, offsets: range, first: int, end: int, way: Way, call: Call) -> None:
        def some(index: int) -> None:
            memory = memoryview(self._memory[index])
            for offset in offsets[index :: way.depth]:
                size = min(way.piece, end - offset)
                where = memory[:size] if way.is_one_piece else self._all_memory[offset - first :][:size]
                assert call(self._descriptor, [where], offset) == size

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
