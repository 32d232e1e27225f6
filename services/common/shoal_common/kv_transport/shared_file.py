"""A file in shared memory that its owner creates and others on the host map."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
from pathlib import Path

from shoal_common.errors import FailedPrecondition
from shoal_common.host import ARENA_DIRECTORY

NONCE_BYTES = 16
PREFIX = "shoal-kv-"


class SharedFile:
    """The owner's side: created under a lock that lives as long as the owner, starting with a random nonce."""

    def __init__(self, size_bytes: int, *, directory: Path = ARENA_DIRECTORY) -> None:
        """Creates the file, readable by this user alone, after sweeping those of owners that died.

        Raises FailedPrecondition (NO_SHARED_MEMORY) if it cannot.
        """
        self.name = f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self._path = directory / self.name
        try:
            sweep_abandoned(directory)
            self._descriptor: int | None = _create_locked(self._path, size_bytes)
            self.map = mmap.mmap(self._descriptor, size_bytes)
        except (OSError, ValueError) as error:
            self._path.unlink(missing_ok=True)
            raise FailedPrecondition(
                f"{size_bytes} bytes of shared memory in {directory}: {error}",
                reason="NO_SHARED_MEMORY",
                size_bytes=size_bytes,
            ) from error
        self.map[:NONCE_BYTES] = self.nonce

    @property
    def descriptor(self) -> int | None:
        """The file, open for reading and writing; None after `close`."""
        return self._descriptor

    def close(self) -> None:
        """Removes the file; readers that mapped it, and views of it here, keep the memory. Safe to repeat."""
        self._path.unlink(missing_ok=True)
        # A view that is still being sent keeps the mapping; the last one to go unmaps it.
        with contextlib.suppress(BufferError):
            self.map.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def sweep_abandoned(directory: Path) -> int:
    """Removes the files whose owners died without closing them, by kill -9 say; returns how many.

    An owner holds a lock on its file as long as it lives. Files of other users are left alone.
    """
    swept = 0
    for path in directory.glob(f"{PREFIX}*"):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            swept += 1
        except OSError:
            continue
        finally:
            os.close(descriptor)
    return swept


def _create_locked(path: Path, size_bytes: int) -> int:
    """A new file under its lock. A sweep that came between the two has removed it again: then once more."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if path.exists():
                # Reserves the pages, so that a full file system shows here and not as a bus error later.
                os.posix_fallocate(descriptor, 0, size_bytes)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def map_shared(
    name: str, nonce: bytes, *, is_writable: bool = False, directory: Path = ARENA_DIRECTORY
) -> tuple[mmap.mmap, int]:
    """Another process's file, mapped and open. Raises FailedPrecondition (ARENA_NOT_SHARED) unless it holds `nonce`."""
    if not name.startswith(PREFIX) or "/" in name:
        raise FailedPrecondition(f"{name!r} is no arena", reason="ARENA_NOT_SHARED", arena_name=name)
    descriptor: int | None = None
    try:
        descriptor = os.open(directory / name, (os.O_RDWR if is_writable else os.O_RDONLY) | os.O_CLOEXEC)
        mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_WRITE if is_writable else mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        if descriptor is not None:
            os.close(descriptor)
        raise FailedPrecondition(
            f"arena {name} cannot be mapped: {error}", reason="ARENA_NOT_SHARED", arena_name=name
        ) from error
    if mapped[:NONCE_BYTES] != nonce:
        mapped.close()
        os.close(descriptor)
        raise FailedPrecondition(f"arena {name} is another one", reason="ARENA_NOT_SHARED", arena_name=name)
    return mapped, descriptor
