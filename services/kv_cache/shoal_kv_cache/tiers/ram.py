"""Payloads in memory: a shared arena where the host has one, else this process's own."""

from __future__ import annotations

from itertools import count

from shoal_common.kv_transport import ArenaFull, SharedArena


class RamTier:
    """Bytes by location. Invariant: used_bytes is the sum of what is stored and at most capacity_bytes."""

    def __init__(self, capacity_bytes: int, arena: SharedArena | None) -> None:
        """arena: where payloads lie for others to map; None keeps them in this process."""
        self.capacity_bytes = capacity_bytes
        self.arena = arena
        self.used_bytes = 0
        self._own: dict[int, bytes] = {}
        self._next_location = count(1)

    def store(self, data: bytes | bytearray) -> int:
        """Keeps a copy and returns its location. Raises ArenaFull when there is no room."""
        if self.used_bytes + len(data) > self.capacity_bytes:
            free_bytes = self.capacity_bytes - self.used_bytes
            raise ArenaFull(
                f"{len(data)} bytes wanted, {free_bytes} free", wanted_bytes=len(data), free_bytes=free_bytes
            )
        if self.arena is not None:
            location = self.arena.store(data)
        else:
            location = next(self._next_location)
            self._own[location] = bytes(data)
        self.used_bytes += len(data)
        return location

    def load(self, location: int, size_bytes: int) -> bytes:
        """A copy of what is stored at `location`."""
        if self.arena is not None:
            return self.arena.load(location, size_bytes)
        return self._own[location]

    def free(self, location: int, size_bytes: int) -> None:
        """Gives a location back."""
        if self.arena is not None:
            self.arena.free(location)
        else:
            del self._own[location]
        self.used_bytes -= size_bytes
