"""Who holds which entries, and until when."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass

from shoal_common.errors import ResourceExhausted

from shoal_kv_cache.core.entries import Key


class TooManyLeases(ResourceExhausted):
    """The bound on open leases is reached."""

    reason = "TOO_MANY_LEASES"


@dataclass(frozen=True, slots=True)
class Lease:
    """Pins of one acquire."""

    lease_id: str
    owner_id: str
    keys: tuple[Key, ...]
    ends_at_s: float


class Leases:
    """Open leases. Invariant: an entry's pin count is the number of open leases that name it."""

    def __init__(self, *, max_leases: int) -> None:
        self._max_leases = max_leases
        self._open: dict[str, Lease] = {}
        self._pins: Counter[Key] = Counter()
        self._by_end: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._open)

    def get(self, lease_id: str) -> Lease | None:
        """An open lease."""
        return self._open.get(lease_id)

    def is_pinned(self, key: Key) -> bool:
        """Whether any open lease names it."""
        return self._pins[key] > 0

    def check_room(self) -> None:
        """Raises TooManyLeases when no more can be opened."""
        if len(self._open) >= self._max_leases:
            raise TooManyLeases(f"{len(self._open)} leases are open", max_leases=self._max_leases)

    def open(self, lease: Lease) -> None:
        """Pins its keys. Raises TooManyLeases, then pins nothing."""
        self.check_room()
        self._open[lease.lease_id] = lease
        self._pins.update(lease.keys)
        heapq.heappush(self._by_end, (lease.ends_at_s, lease.lease_id))

    def release(self, lease_id: str) -> Lease | None:
        """Unpins; None if it is not open."""
        lease = self._open.pop(lease_id, None)
        if lease is not None:
            self._pins.subtract(lease.keys)
            for key in lease.keys:
                if self._pins[key] <= 0:
                    del self._pins[key]
        return lease

    def expire(self, now_s: float) -> list[Lease]:
        """Releases every lease whose time is over."""
        expired = []
        while self._by_end and self._by_end[0][0] <= now_s:
            _, lease_id = heapq.heappop(self._by_end)
            lease = self._open.get(lease_id)
            if lease is not None and lease.ends_at_s <= now_s:
                self.release(lease_id)
                expired.append(lease)
        return expired

    def release_owner(self, owner_id: str) -> list[Lease]:
        """Releases everything that a dead instance held."""
        ended = [lease for lease in self._open.values() if lease.owner_id == owner_id]
        for lease in ended:
            self.release(lease.lease_id)
        return ended
