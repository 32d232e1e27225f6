"""Payloads in memory: slabs that others on the host map, where the host has shared memory."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence

from shoal_common.errors import FailedPrecondition, OutOfCapacity
from shoal_common.kv_transport import SlabArena

logger = logging.getLogger(__name__)

_ALIGNMENT = 64


class RamTier:
    """The arena, and payloads that are held while something copies them out in the background.

    Invariant: a slab that is freed while it is held goes back to the arena with its last hold. One event loop owns it;
    the views of what is held may be read from any thread.
    """

    def __init__(self, arena: SlabArena) -> None:
        self.arena = arena
        self.capacity_bytes = arena.size_bytes
        self._holds: Counter[int] = Counter()
        self._freed_while_held: set[int] = set()

    @property
    def used_bytes(self) -> int:
        """Bytes of slabs that are taken, also by puts in flight."""
        return self.capacity_bytes - self.arena.free_bytes

    def fit_to(self, payload_bytes: int) -> None:
        """Cuts the arena by the first payload, unless the settings did. Raises OutOfCapacity where it does not fit."""
        if self.arena.slab_bytes:
            return
        slab_bytes = -(-max(payload_bytes, 1) // _ALIGNMENT) * _ALIGNMENT
        if slab_bytes > self.arena.size_bytes:
            raise OutOfCapacity(
                f"a payload of {payload_bytes} bytes, {self.arena.size_bytes} of memory",
                reason="OUT_OF_SPACE",
                payload_bytes=payload_bytes,
                capacity_bytes=self.arena.size_bytes,
            )
        self.arena.cut(slab_bytes)
        logger.info("memory cut", extra={"slab_bytes": slab_bytes, "slabs": self.arena.slab_count})

    def lacking_bytes(self, sizes: Iterable[int]) -> int:
        """Bytes that must be evicted before payloads of these sizes fit; 0 if they do."""
        wanted = sum(self.arena.slabs_for(size) for size in sizes) * self.arena.slab_bytes
        return max(0, wanted - self.arena.free_bytes)

    def free(self, slabs: Sequence[int]) -> None:
        """Gives payloads back, by their first slabs."""
        for slab in slabs:
            if self._holds[slab]:
                self._freed_while_held.add(slab)
            else:
                del self._holds[slab]
                self.arena.free(slab)

    def hold(self, slabs: Iterable[int]) -> None:
        """Keeps the bytes of payloads as they are until `let_go`."""
        self._holds.update(slabs)

    def let_go(self, slabs: Iterable[int]) -> None:
        """Ends one hold of each."""
        for slab in slabs:
            self._holds[slab] -= 1
            if self._holds[slab] > 0:
                continue
            del self._holds[slab]
            if slab in self._freed_while_held:
                self._freed_while_held.discard(slab)
                self.arena.free(slab)


def open_arena(size_bytes: int, slab_bytes: int) -> SlabArena:
    """Shared where the host has shared memory, else this process's own: then payloads travel as bytes."""
    try:
        return SlabArena(size_bytes, slab_bytes=slab_bytes)
    except FailedPrecondition as error:
        logger.warning("no shared memory, blocks travel as bytes", extra={"error": error.message})
        return SlabArena(size_bytes, slab_bytes=slab_bytes, is_shared=False)
