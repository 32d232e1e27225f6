"""One process in a folder."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from shoal_kv_cache.tiers.ssd.errors import SsdUnavailable, from_os

_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


class FolderLock:
    """Held until it is closed or the process ends, however it ends."""

    def __init__(self, directory: Path) -> None:
        """Makes the folder if it is missing. Raises SsdUnavailable (SSD_IN_USE if someone else is there)."""
        self._descriptor: int | None = None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._descriptor = self._open(directory / "lock")
            if self._descriptor is not None:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise SsdUnavailable(f"another process uses {directory}", reason="SSD_IN_USE") from error
        except OSError as error:
            self.close()
            raise from_os(error, f"opening {directory}") from error

    def close(self) -> None:
        """Lets others in."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @staticmethod
    def _open(path: Path) -> int | None:
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in _READ_ONLY:
                raise
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            # Nobody can write here, so nobody need be kept out.
            return None
