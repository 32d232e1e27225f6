"""Memory that pulls land in: aligned, faulted in once, and used again as soon as nobody looks at it."""

from __future__ import annotations

import mmap
import sys
import threading

_STEP_BYTES = 2 << 20
# References to a memory that nobody looks at: the pool's list, the loop that asks, and the argument of getrefcount.
_IDLE_REFERENCES = 3


class DestinationPool:
    """Anonymous memory in steps of 2 MiB. Safe from any thread.

    A destination is in use as long as any view of it lives, whoever holds it: every view keeps a reference to its
    memory, and the pool looks at the reference count before it hands one out again. So nothing has to be given back,
    and nothing that is still looked at is ever overwritten. Invariant: at most `max_idle_bytes` are kept when idle.
    """

    def __init__(self, max_idle_bytes: int = 256 << 20) -> None:
        self._max_idle_bytes = max_idle_bytes
        self._lock = threading.Lock()
        self._memories: list[mmap.mmap] = []

    @property
    def kept_bytes(self) -> int:
        """Bytes of all memories that may be used again."""
        with self._lock:
            return sum(map(len, self._memories))

    def take(self, size_bytes: int) -> memoryview:
        """Writable memory of `size_bytes` whose start is a multiple of 4096."""
        if size_bytes == 0:
            return memoryview(bytearray())
        with self._lock:
            chosen = None
            for memory in self._memories:
                fits = len(memory) >= size_bytes and (chosen is None or len(memory) < len(chosen))
                if fits and (memory is chosen or sys.getrefcount(memory) <= _IDLE_REFERENCES):
                    chosen = memory
            if chosen is None or len(chosen) > 4 * size_bytes + _STEP_BYTES:
                chosen = _make(size_bytes)
                self._keep(chosen)
            return memoryview(chosen)[:size_bytes]

    def _keep(self, new: mmap.mmap) -> None:
        """Add it; idle ones go, the oldest first, while there are too many bytes. Those in use go with their views."""
        excess = sum(map(len, self._memories)) + len(new) - self._max_idle_bytes
        kept = []
        for memory in self._memories:
            if excess > 0:
                excess -= len(memory)
            else:
                kept.append(memory)
        self._memories = kept
        if len(new) <= self._max_idle_bytes:
            self._memories.append(new)


def _make(size_bytes: int) -> mmap.mmap:
    size_bytes += -size_bytes % _STEP_BYTES
    made = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    made.madvise(mmap.MADV_HUGEPAGE)
    # A byte a page: the copy that follows must not pay for faults.
    made[:: mmap.PAGESIZE] = bytes(len(made[:: mmap.PAGESIZE]))
    return made
