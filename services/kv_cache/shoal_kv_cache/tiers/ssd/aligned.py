"""Memory as O_DIRECT wants it, used again and again; and the bound on how much of it is in use."""

from __future__ import annotations

import mmap
import threading
import time

import numpy as np

from shoal_kv_cache.tiers.ssd.layout import PAGE

_MIN_UNLOCKED_BYTES = 1 << 15


class Gate:
    """Lets bytes in up to a limit. Invariant: what is inside is at most the limit, or one entrant alone."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._inside = 0
        self._changed = threading.Condition()

    def enter(self, size_bytes: int, give_up_at_s: float) -> bool:
        """Waits for room until `give_up_at_s` of time.monotonic(); False if there was none."""
        with self._changed:
            while self._inside and self._inside + size_bytes > self._limit:
                left_s = give_up_at_s - time.monotonic()
                if left_s <= 0:
                    return False
                self._changed.wait(left_s)
            self._inside += size_bytes
            return True

    def leave(self, size_bytes: int) -> None:
        """Gives the room back."""
        with self._changed:
            self._inside -= size_bytes
            self._changed.notify_all()


class AlignedPool:
    """Page-aligned buffers, kept for reuse up to a number: fresh ones cost a page fault every 4 KiB."""

    def __init__(self, *, buffer_bytes: int, max_kept: int) -> None:
        self.buffer_bytes = buffer_bytes
        self._max_kept = max_kept
        self._kept: list[mmap.mmap] = []
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> mmap.mmap:
        """A buffer of at least so many bytes, with whatever was in it."""
        if size_bytes <= self.buffer_bytes:
            with self._lock:
                if self._kept:
                    return self._kept.pop()
        return mmap.mmap(-1, max(self.buffer_bytes, -(-size_bytes // PAGE) * PAGE))

    def give(self, buffer: mmap.mmap) -> None:
        """Takes it back."""
        with self._lock:
            if len(buffer) == self.buffer_bytes and len(self._kept) < self._max_kept:
                self._kept.append(buffer)


def copy_bytes(into: memoryview, source: memoryview) -> None:
    """As `into[:] = source`, but other threads go on meanwhile where it is worth it: numpy lets the interpreter go."""
    if len(into) < _MIN_UNLOCKED_BYTES:
        into[:] = source
    else:
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))
