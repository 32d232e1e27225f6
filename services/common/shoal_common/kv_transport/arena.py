"""Memory that processes of one host map together, in ranges of any size: what prefill offers to decode."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import TracebackType

from shoal_common.errors import ResourceExhausted
from shoal_common.host import ARENA_DIRECTORY
from shoal_common.kv_transport.buffers import Buffer
from shoal_common.kv_transport.free_list import FreeList
from shoal_common.kv_transport.shared_file import SharedFile, map_shared

_FIRST_OFFSET = 64


class ArenaFull(ResourceExhausted):
    """No free range is long enough."""

    reason = "ARENA_FULL"


class SharedArena:
    """Written by its owner and read by others.

    The owner allocates, writes and frees; readers copy out and check what they copied, so a range that is freed under a
    reader shows as a checksum mismatch, never as wrong data. Not thread-safe: one event loop owns it.
    """

    def __init__(self, size_bytes: int, *, directory: Path = ARENA_DIRECTORY) -> None:
        """Raises FailedPrecondition (NO_SHARED_MEMORY)."""
        self._file = SharedFile(size_bytes, directory=directory)
        self.name, self.nonce, self.size_bytes = self._file.name, self._file.nonce, size_bytes
        self.slab_bytes, self.first_slab_offset = 0, 0
        self.memory = memoryview(self._file.map)
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
        self.memory[offset : offset + view.nbytes] = view
        return offset

    def load(self, offset: int, size_bytes: int) -> bytes:
        """A copy of [offset, offset + size_bytes)."""
        return bytes(self.memory[offset : offset + size_bytes])

    def free(self, offset: int) -> None:
        """Gives the range at `offset` back. Raises KeyError when it is not held."""
        self._ranges.free(offset)

    def close(self) -> None:
        """Removes the file; readers that mapped it keep their mapping. Safe to repeat."""
        self.memory.release()
        self._file.close()

    def __enter__(self) -> SharedArena:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ArenaView:
    """Another process's arena, mapped for reading or, when a put was granted, for writing."""

    def __init__(
        self, name: str, nonce: bytes, *, is_writable: bool = False, directory: Path = ARENA_DIRECTORY
    ) -> None:
        """Raises FailedPrecondition (ARENA_NOT_SHARED) unless a file of that name holds that nonce here."""
        self._map, descriptor = map_shared(name, nonce, is_writable=is_writable, directory=directory)
        self.descriptor: int | None = descriptor
        """For `filling`; None after `close`, and of one that is only read."""
        if not is_writable:
            self._close_file()
        self.memory = memoryview(self._map)

    def close(self) -> None:
        """Unmaps, once the last view is gone. Safe to repeat."""
        self._close_file()
        self.memory.release()
        with contextlib.suppress(BufferError):
            self._map.close()

    def _close_file(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
