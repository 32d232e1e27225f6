"""How the disk does."""

from __future__ import annotations

import threading

from shoal_common.errors import ChecksumMismatch, MeshError, NotFound

from shoal_kv_cache.tiers.ssd.errors import SsdBusy


class Health:
    """Counts of one tier. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.read_bytes = 0
        self.failure_count = 0
        self.busy_count = 0
        self._reasons = {"read": "", "write": ""}

    @property
    def failing_reason(self) -> str:
        """Of the last read or write, if it failed."""
        return self._reasons["write"] or self._reasons["read"]

    def read(self, size_bytes: int, error: MeshError | None) -> None:
        """A read of so many bytes ended. A payload that is gone or damaged says nothing about the disk."""
        with self._lock:
            self.read_bytes += size_bytes if error is None else 0
        if not isinstance(error, NotFound | ChecksumMismatch):
            self._ended("read", error)

    def written(self, error: MeshError | None) -> None:
        """A write, or whatever else changes files, ended."""
        self._ended("write", error)

    def _ended(self, what: str, error: MeshError | None) -> None:
        with self._lock:
            if isinstance(error, SsdBusy):
                self.busy_count += 1
            elif error is not None:
                self.failure_count += 1
            self._reasons[what] = error.reason if error is not None else ""
