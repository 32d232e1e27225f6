"""Memory that processes of one host map together."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from pathlib import Path
from types import TracebackType

from shoal_common.errors import FailedPrecondition, ResourceExhausted
from shoal_common.kv_transport.buffers import Buffer
from shoal_common.kv_transport.free_list import FreeList
from shoal_common.kv_transport.host import ARENA_DIRECTORY

NONCE_BYTES = 16
_PREFIX = "shoal-kv-"
_FIRST_OFFSET = 64


class ArenaFull(ResourceExhausted):
    """No free range is long enough."""

    reason = "ARENA_FULL"


class SharedArena:
    """A file in shared memory, written by its owner and read by others; it starts with a random nonce.

    The owner allocates, writes and frees; readers copy out and check what they copied, so a range that is freed under a
    reader shows as a checksum mismatch, never as wrong data. Not thread-safe: one event loop owns it.
    """

    def __init__(self, size_bytes: int, *, directory: Path = ARENA_DIRECTORY) -> None:
        """Creates the file, readable by this user alone. Raises FailedPrecondition (NO_SHARED_MEMORY) if it cannot."""
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.size_bytes = size_bytes
        remove_stale(directory)
        try:
            self._path, self._lock = _create_locked(directory)
            try:
                # Reserves the pages, so that a full file system shows here and not as a bus error later.
                os.posix_fallocate(self._lock, 0, size_bytes)
                self._map = mmap.mmap(self._lock, size_bytes)
            except BaseException:
                os.unlink(self._path)
                os.close(self._lock)
                raise
        except (OSError, ValueError) as error:
            raise FailedPrecondition(
                f"{size_bytes} bytes of shared memory in {directory}: {error}",
                reason="NO_SHARED_MEMORY",
                size_bytes=size_bytes,
            ) from error
        self.name = self._path.name
        self._map[:NONCE_BYTES] = self.nonce
        self._ranges = FreeList(_FIRST_OFFSET, size_bytes)

    @property
    def free_bytes(self) -> int:
        """Bytes not held; not necessarily in one piece."""
        return self._ranges.free_bytes

    @property
    def held_count(self) -> int:
        """Ranges held."""
        return self._ranges.held_count

    def store(self, data: Buffer) -> int:
        """Copies `data` in and returns its offset, a multiple of 64. Raises ArenaFull."""
        view = memoryview(data).cast("B")
        offset = self._ranges.allocate(max(view.nbytes, 1))
        if offset is None:
            raise ArenaFull(
                f"{view.nbytes} bytes wanted, {self.free_bytes} free in pieces",
                wanted_bytes=view.nbytes,
                free_bytes=self.free_bytes,
            )
        self._map[offset : offset + view.nbytes] = view
        return offset

    def load(self, offset: int, size_bytes: int) -> bytes:
        """A copy of [offset, offset + size_bytes)."""
        return self._map[offset : offset + size_bytes]

    def free(self, offset: int) -> None:
        """Gives the range at `offset` back. Raises KeyError when it is not held."""
        self._ranges.free(offset)

    def close(self) -> None:
        """Removes the file; readers that mapped it keep their mapping. Safe to repeat."""
        self._path.unlink(missing_ok=True)
        if not self._map.closed:
            self._map.close()
            os.close(self._lock)

    def __enter__(self) -> SharedArena:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def remove_stale(directory: Path = ARENA_DIRECTORY) -> int:
    """Remove arenas whose owner is gone without having removed them (killed); returns how many.

    An owner holds a lock on its file as long as it lives, in whatever container: who gets the lock found a dead one.
    """
    removed_count = 0
    for path in directory.glob(f"{_PREFIX}*"):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            # Gone already, or another user's.
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            removed_count += 1
        except OSError:
            continue
        finally:
            os.close(descriptor)
    return removed_count


def _create_locked(directory: Path) -> tuple[Path, int]:
    """A new file with its owner's lock. In between another process may have taken it for a stale one: try again."""
    while True:
        path = directory / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return path, descriptor
        os.close(descriptor)


class ArenaView:
    """Another process's arena, mapped for reading."""

    def __init__(self, name: str, nonce: bytes, *, directory: Path = ARENA_DIRECTORY) -> None:
        """Raises FailedPrecondition (ARENA_NOT_SHARED) unless a file of that name holds that nonce here."""
        if not name.startswith(_PREFIX) or "/" in name:
            raise FailedPrecondition(f"{name!r} is no arena", reason="ARENA_NOT_SHARED", arena_name=name)
        try:
            with open(directory / name, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise FailedPrecondition(
                f"arena {name} cannot be mapped: {error}", reason="ARENA_NOT_SHARED", arena_name=name
            ) from error
        if self._map[:NONCE_BYTES] != nonce:
            self._map.close()
            raise FailedPrecondition(f"arena {name} is another one", reason="ARENA_NOT_SHARED", arena_name=name)

    def load(self, offset: int, size_bytes: int) -> bytes:
        """A copy of [offset, offset + size_bytes), shorter where the arena ends."""
        return self._map[offset : offset + size_bytes]

    def close(self) -> None:
        """Unmaps. Safe to repeat."""
        self._map.close()
