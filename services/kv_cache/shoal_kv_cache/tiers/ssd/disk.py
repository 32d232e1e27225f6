"""The operating system's calls that the tier makes, in one place. Faults are put in here by tests."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

_DIRECT = getattr(os, "O_DIRECT", 0)
_SECTOR = 512


class Disk:
    """Files by descriptor. Raises OSError."""

    def open(self, path: Path, *, is_new: bool = False, is_writable: bool = False) -> int:
        """A descriptor that goes past the page cache where the file system can do that."""
        flags = os.O_CLOEXEC | (os.O_RDWR if is_writable else os.O_RDONLY)
        if is_new:
            flags |= os.O_CREAT | os.O_EXCL
        try:
            return os.open(path, flags | _DIRECT, 0o600)
        except OSError as error:
            # Some file systems refuse the flag with EINVAL, after having made the file.
            if not _DIRECT or error.errno != errno.EINVAL:
                raise
        return os.open(path, flags & ~os.O_EXCL, 0o600)

    def close(self, descriptor: int) -> None:
        """Closes it."""
        os.close(descriptor)

    def read(self, descriptor: int, into: memoryview, offset: int) -> int:
        """Fills `into`, aligned memory of whole pages, as far as the file reaches; returns how many bytes."""
        done = 0
        while done < len(into):
            count = os.preadv(descriptor, [into[done:]], offset + done)
            done += count
            # A count that is not of whole pages is the file's end.
            if count == 0 or count % _SECTOR:
                break
        return done

    def write(self, descriptor: int, parts: Sequence[memoryview], offset: int) -> None:
        """Writes all of `parts`, aligned memory of whole pages each, one after the other."""
        left = [part for part in parts if len(part)]
        while left:
            count = os.pwritev(descriptor, left, offset)
            # Where there is no room for all, the kernel may end anywhere; what goes on must be aligned again.
            count -= count % _SECTOR
            if count == 0:
                raise OSError(errno.ENOSPC, "the rest was not written")
            offset += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]

    def sync(self, descriptor: int) -> None:
        """Makes the file's bytes durable."""
        os.fdatasync(descriptor)

    def sync_directory(self, path: Path) -> None:
        """Makes the names in a folder durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def truncate(self, descriptor: int, size: int) -> None:
        """Cuts the file."""
        os.ftruncate(descriptor, size)

    def size(self, path: Path) -> int:
        """Bytes of the file."""
        return path.stat().st_size

    def delete(self, path: Path) -> None:
        """Deletes the file, if it is there."""
        path.unlink(missing_ok=True)

    def names(self, path: Path) -> list[str]:
        """What is in a folder."""
        return os.listdir(path)

    def reached(self, point: str) -> None:
        """Called at named points between two effects: where a killed process leaves something half done."""
