"""Memory that writers on this host fill themselves, and what of it cannot be given to others yet."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from shoal.common.v1 import kv_transport_pb2 as transport_pb
from shoal_common.kv_transport import ExportTable

from shoal_kv_cache.tiers.ram import RamTier

logger = logging.getLogger(__name__)

_MAX_KEPT_SHARE = 4


class Fill:
    """One put's leave to write."""

    def __init__(self, fills: Fills, grant: transport_pb.TransportGrant, number: int) -> None:
        self._fills, self.grant, self.number = fills, grant, number
        self._is_over = False

    def end(self) -> bool:
        """Takes the leave back: True if nobody writes now or later, False while the writer is in the midst of it."""
        self._is_over = self._is_over or self._fills.close(self.number)
        return self._is_over


class Fills:
    """Hands memory out to be filled, and takes it back.

    Invariant: slabs are free for others only when no writer that they were granted to can write any more. A writer that
    is stopped in the midst of a put (SIGSTOP, a debugger, a frozen container) keeps them, however long ago the put
    ended, until it goes on or dies. While such slabs are a quarter of the memory or more, nothing is granted: writers
    send their bytes.
    """

    def __init__(self, ram: RamTier, exports: ExportTable) -> None:
        self._ram, self._exports = ram, exports
        self._kept: list[tuple[Fill, Sequence[int]]] = []
        self.kept_bytes = 0
        """Bytes of slabs whose put is over and whose writer is not."""

    def begin(self, offer: transport_pb.TransportOffer) -> Fill | None:
        """Leave to write; None where the bytes must be sent."""
        if self.kept_bytes * _MAX_KEPT_SHARE >= self._ram.capacity_bytes:
            return None
        grant = self._exports.grant_fill(offer)
        locks = self._ram.arena.fills
        number = locks.open() if grant is not None and locks is not None else None
        return Fill(self, grant, number) if grant is not None and number is not None else None

    def close(self, number: int) -> bool:
        """See FillLocks."""
        locks = self._ram.arena.fills
        return locks is None or locks.close(number)

    def free(self, slabs: Sequence[int], fill: Fill | None) -> None:
        """Gives slabs of a put that was not committed back, now or when its writer has ended."""
        if fill is None or not slabs or fill.end():
            self._ram.free(slabs)
            return
        self._kept.append((fill, slabs))
        self.kept_bytes += self._size(slabs)
        logger.warning("a writer outlives its put", extra={"kept_bytes": self.kept_bytes, "puts": len(self._kept)})

    def retry(self) -> None:
        """Frees what has no writer any more. Cheap when nothing is kept."""
        if not self._kept:
            return
        kept, self._kept = self._kept, []
        for fill, slabs in kept:
            if fill.end():
                self.kept_bytes -= self._size(slabs)
                self._ram.free(slabs)
            else:
                self._kept.append((fill, slabs))

    def _size(self, slabs: Sequence[int]) -> int:
        return len(self._ram.arena.slabs_of(slabs)) * self._ram.arena.slab_bytes
