"""Who may still write into memory that was granted for a fill, as the kernel knows it.

A writer holds a read lock on one byte of the arena's file while it writes, and the owner takes a write lock on that
byte when the fill is over. Whichever comes first wins: an owner that gets its lock knows that nobody writes, nor ever
will; one that does not knows that a writer is in the midst of it, running or stopped. The kernel ends the locks of a
process that dies. Only the numbers of the bytes matter: they may lie beyond the file's end.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from shoal_common.errors import FailedPrecondition

# Locks of the open file, not of the process: two writers of one process must not end each other's.
_SET_LOCK: int | None = getattr(fcntl, "F_OFD_SETLK", None)
_FLOCK = "hhqqi4x"


class FillLocks:
    """The owner's side. Invariant: a number is given out once, and no writer locks it after `close` said True."""

    def __init__(self, descriptor: int) -> None:
        """descriptor: of the arena's file, open for reading and writing as long as this is used."""
        self._descriptor = descriptor
        self._last_number = 0

    def open(self) -> int | None:
        """The number of a new fill, from 1 on; None where the kernel has no such locks: then grant nothing."""
        if _SET_LOCK is None:
            return None
        self._last_number += 1
        return self._last_number

    def close(self, number: int) -> bool:
        """Ends a fill: True if nobody writes under this number now or later; False while somebody does."""
        return _lock(self._descriptor, fcntl.F_WRLCK, number)


@contextmanager
def filling(descriptor: int, number: int) -> Iterator[None]:
    """The writer's side: write inside the block only. Raises FailedPrecondition (FILL_OVER) where the put is over.

    descriptor: of the arena's file, open for reading. For any thread.
    """
    if not _lock(descriptor, fcntl.F_RDLCK, number):
        raise FailedPrecondition("the put was over before its memory was filled", reason="FILL_OVER")
    try:
        yield
    finally:
        _lock(descriptor, fcntl.F_UNLCK, number)


def _lock(descriptor: int, kind: int, number: int) -> bool:
    if _SET_LOCK is None:
        return False
    try:
        fcntl.fcntl(descriptor, _SET_LOCK, struct.pack(_FLOCK, kind, os.SEEK_SET, number, 1, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True
