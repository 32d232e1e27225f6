"""Memory of one node cut into slabs of one size: no fragmentation, and every step takes the same time."""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

import xxhash

from shoal_common.host import ARENA_DIRECTORY
from shoal_common.kv_transport.arena import ArenaFull
from shoal_common.kv_transport.buffers import Buffer
from shoal_common.kv_transport.fill_locks import FillLocks
from shoal_common.kv_transport.shared_file import SharedFile

FIRST_SLAB_OFFSET = 4096
ALIGNMENT = 64
_END = 0xFFFF_FFFF


class SlabArena:
    """Slabs 0 .. slab_count - 1. A payload takes ceil(size / slab_bytes) of them, whichever are free, in a chain.

    A payload is named by the first slab of its chain. Invariant: a slab is free or in exactly one chain. Beside the
    slabs this costs 5 bytes a slab. Views may be read from any thread; everything else belongs to one event loop.
    Freed slabs are used again at once: a reader that is still copying sees a checksum mismatch, never wrong data.
    """

    def __init__(
        self, size_bytes: int, *, slab_bytes: int = 0, is_shared: bool = True, directory: Path = ARENA_DIRECTORY
    ) -> None:
        """size_bytes   of all slabs together, rounded down to whole ones
        slab_bytes   0: `cut` says it later
        is_shared    False: memory of this process alone, where the host has no shared memory
        Raises FailedPrecondition (NO_SHARED_MEMORY).
        """
        if size_bytes < 1:
            raise ValueError(f"size_bytes must be positive, got {size_bytes}")
        self.is_shared, self.size_bytes = is_shared, size_bytes
        self.slab_bytes, self.slab_count, self.free_count = 0, 0, 0
        self.first_slab_offset = FIRST_SLAB_OFFSET
        whole = FIRST_SLAB_OFFSET + size_bytes
        self._file = SharedFile(whole, directory=directory) if is_shared else None
        descriptor = self._file.descriptor if self._file is not None else None
        self.fills = FillLocks(descriptor) if descriptor is not None else None
        """Locks of writers on this host; None where they cannot map it."""
        self._map = self._file.map if self._file is not None else mmap.mmap(-1, whole)
        self.memory = memoryview(self._map)
        self._next: array[int] = array("I")
        self._is_first = bytearray()
        self._free = _END
        if slab_bytes:
            self.cut(slab_bytes)

    @property
    def name(self) -> str:
        """Name to map it by; empty when it is not shared."""
        return self._file.name if self._file is not None else ""

    @property
    def nonce(self) -> bytes:
        """What the file starts with."""
        return self._file.nonce if self._file is not None else b""

    @property
    def free_bytes(self) -> int:
        """Bytes of free slabs; all of the arena until it is cut."""
        return self.free_count * self.slab_bytes if self.slab_bytes else self.size_bytes

    def cut(self, slab_bytes: int) -> None:
        """Fix the size of the slabs, once. Raises ValueError unless it is a multiple of 64 of which one fits in."""
        if self.slab_bytes:
            raise ValueError(f"the slabs have {self.slab_bytes} bytes already")
        if slab_bytes < 1 or slab_bytes % ALIGNMENT or slab_bytes > self.size_bytes:
            raise ValueError(f"slab_bytes must be a multiple of {ALIGNMENT} up to {self.size_bytes}, got {slab_bytes}")
        self.slab_bytes = slab_bytes
        self.slab_count = self.free_count = min(self.size_bytes // slab_bytes, _END)
        self._next = array("I", range(1, self.slab_count + 1))
        self._next[-1] = _END
        self._is_first = bytearray(self.slab_count)
        self._free = 0

    def slabs_for(self, size_bytes: int) -> int:
        """Slabs that a payload takes; one at least."""
        return max(1, -(-size_bytes // self.slab_bytes))

    def allocate(self, size_bytes: int) -> int:
        """First slab of a new chain that holds `size_bytes`. Raises ArenaFull, then nothing new is held."""
        count = self.slabs_for(size_bytes)
        if count > self.free_count:
            raise ArenaFull(
                f"{count} slabs wanted, {self.free_count} free",
                wanted_bytes=count * self.slab_bytes,
                free_bytes=self.free_bytes,
            )
        first = last = self._free
        for _ in range(count - 1):
            last = self._next[last]
        self._free = self._next[last]
        self._next[last] = _END
        self._is_first[first] = 1
        self.free_count -= count
        return first

    def free(self, first: int) -> None:
        """Give a chain back. Raises KeyError when `first` is not the first slab of one."""
        if not 0 <= first < self.slab_count or not self._is_first[first]:
            raise KeyError(first)
        last, count = first, 1
        while self._next[last] != _END:
            last = self._next[last]
            count += 1
        self._next[last] = self._free
        self._free = first
        self._is_first[first] = 0
        self.free_count += count

    def slabs(self, first: int) -> list[int]:
        """The slabs of a payload, in order, as PayloadRun and PutWanted list them."""
        found = [first]
        while (following := self._next[found[-1]]) != _END:
            found.append(following)
        return found

    def slabs_of(self, firsts: Iterable[int]) -> list[int]:
        """The slabs of several payloads, one after the other."""
        found: list[int] = []
        for first in firsts:
            slab = first
            while slab != _END:
                found.append(slab)
                slab = self._next[slab]
        return found

    def views(self, first: int, size_bytes: int) -> list[memoryview]:
        """The bytes of a payload in place, writable; slabs that follow each other are one view."""
        return slab_views(self.memory, self.first_slab_offset, self.slab_bytes, self.slabs(first), size_bytes)

    def store(self, data: Buffer) -> int:
        """Copy `data` in; its first slab. Raises ArenaFull."""
        first = self.allocate(memoryview(data).nbytes)
        self.write(first, 0, data)
        return first

    def write(self, first: int, offset: int, data: Buffer) -> None:
        """Copy `data` to byte `offset` of a payload. Raises ValueError past the end of its slabs."""
        rest = memoryview(data).cast("B")
        slabs = self.slabs(first)
        if offset + rest.nbytes > len(slabs) * self.slab_bytes:
            raise ValueError(f"{rest.nbytes} bytes at {offset} do not fit into {len(slabs)} slabs")
        while rest.nbytes:
            index, within = divmod(offset, self.slab_bytes)
            part = rest[: self.slab_bytes - within]
            begin = self.first_slab_offset + slabs[index] * self.slab_bytes + within
            self.memory[begin : begin + part.nbytes] = part
            offset, rest = offset + part.nbytes, rest[part.nbytes :]

    def load(self, first: int, size_bytes: int) -> bytes:
        """A copy of the first `size_bytes` of a payload."""
        return b"".join(self.views(first, size_bytes))

    def checksum(self, first: int, size_bytes: int) -> int:
        """XXH3-64 of a payload where it lies: what a put is checked with before it becomes visible."""
        digest = xxhash.xxh3_64()
        for view in self.views(first, size_bytes):
            digest.update(view)
        return digest.intdigest()

    def close(self) -> None:
        """Remove it; who mapped it keeps the mapping. Safe to repeat."""
        self.memory.release()
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> SlabArena:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def stretches(slabs: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First slab and number of each stretch of slabs that follow each other; there is one slab at least."""
    begin = previous = slabs[0]
    for slab in slabs[1:]:
        if slab != previous + 1:
            yield begin, previous + 1 - begin
            begin = slab
        previous = slab
    yield begin, previous + 1 - begin


def slab_views(
    memory: memoryview, first_slab_offset: int, slab_bytes: int, slabs: Sequence[int], size_bytes: int
) -> list[memoryview]:
    """`size_bytes` that fill `slabs` from the front, as few views as their order allows."""
    found: list[memoryview] = []
    for slab, count in stretches(slabs) if size_bytes else ():
        part = min(count * slab_bytes, size_bytes)
        at = first_slab_offset + slab * slab_bytes
        found.append(memory[at : at + part])
        size_bytes -= part
    return found
