"""Who holds which rows, and until when."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from shoal_common.errors import ResourceExhausted


class TooManyLeases(ResourceExhausted):
    """The bound on open leases is reached."""

    reason = "TOO_MANY_LEASES"


@dataclass(frozen=True, slots=True)
class Lease:
    """Pins of one acquire. `number` grows with each lease that is opened; `rows` are the index's."""

    lease_id: str
    owner_id: str
    number: int
    rows: frozenset[int]
    ends_at_s: float


class Leases:
    """Open leases, and slabs whose entry went while leases were open.

    Invariants: a row's pin count is the number of open leases that name it; a buried slab is freed when every lease
    has ended that was open when it was buried.
    """

    def __init__(self, *, max_leases: int) -> None:
        self._max_leases = max_leases
        self._open: dict[str, Lease] = {}  # in order of their numbers
        self._pins: dict[int, int] = {}
        self._by_end: list[tuple[float, str]] = []
        self._last_number = 0
        self._buried: deque[tuple[int, int]] = deque()

    def __len__(self) -> int:
        return len(self._open)

    def get(self, lease_id: str) -> Lease | None:
        """An open lease."""
        return self._open.get(lease_id)

    def is_pinned(self, row: int) -> bool:
        """Whether an open lease names it."""
        return row in self._pins

    def check_room(self) -> None:
        """Raises TooManyLeases when no more can be opened."""
        if len(self._open) >= self._max_leases:
            raise TooManyLeases(f"{len(self._open)} leases are open", max_leases=self._max_leases)

    def open(self, lease_id: str, owner_id: str, rows: Iterable[int], ends_at_s: float) -> Lease:
        """Pins rows. Raises TooManyLeases, or ValueError for an id that is open, then pins nothing."""
        self.check_room()
        if lease_id in self._open:
            raise ValueError(f"lease {lease_id!r} is open")
        self._last_number += 1
        lease = Lease(lease_id, owner_id, self._last_number, frozenset(rows), ends_at_s)
        self._open[lease_id] = lease
        for row in lease.rows:
            self._pins[row] = self._pins.get(row, 0) + 1
        heapq.heappush(self._by_end, (ends_at_s, lease_id))
        if len(self._by_end) > 2 * self._max_leases + 64:
            self._by_end = [(one.ends_at_s, one.lease_id) for one in self._open.values()]
            heapq.heapify(self._by_end)
        return lease

    def release(self, lease_id: str) -> list[int] | None:
        """Ends a lease; returns the rows that nobody pins any more, or None if it is not open."""
        lease = self._open.pop(lease_id, None)
        return None if lease is None else self._unpin(lease.rows)

    def ended(self, now_s: float) -> list[str]:
        """Ids of open leases whose time is over."""
        over = []
        while self._by_end and self._by_end[0][0] <= now_s:
            _, lease_id = heapq.heappop(self._by_end)
            lease = self._open.get(lease_id)
            if lease is not None and lease.ends_at_s <= now_s:
                over.append(lease_id)
        return over

    def owned_by(self, owner_id: str) -> list[str]:
        """Ids of what an instance holds."""
        return [lease.lease_id for lease in self._open.values() if lease.owner_id == owner_id]

    def transfer(self, gone: Collection[int], heir: int) -> None:
        """Rows that go by force: leases that name one of them name `heir` instead (0: nothing)."""
        if not any(row in self._pins for row in gone):
            return
        gone = set(gone)
        for lease_id, lease in list(self._open.items()):
            if not gone.isdisjoint(lease.rows):
                rows = lease.rows - gone
                if heir and heir not in rows:
                    self._pins[heir] = self._pins.get(heir, 0) + 1
                    rows |= {heir}
                self._unpin(lease.rows & gone)
                self._open[lease_id] = replace(lease, rows=rows)

    def pin_for_all(self, row: int) -> bool:
        """Every open lease names the row too; False if none is open."""
        for lease_id, lease in list(self._open.items()):
            if row not in lease.rows:
                self._pins[row] = self._pins.get(row, 0) + 1
                self._open[lease_id] = replace(lease, rows=lease.rows | {row})
        return bool(self._open)

    def bury(self, slab: int) -> bool:
        """Keeps the slab until the leases open now have ended; False if there are none: it is free at once."""
        if not self._open:
            return False
        self._buried.append((self._last_number, slab))
        return True

    def exhume(self) -> list[int]:
        """Slabs that no lease can be reading any more."""
        oldest = next(iter(self._open.values())).number if self._open else self._last_number + 1
        freed = []
        while self._buried and self._buried[0][0] < oldest:
            freed.append(self._buried.popleft()[1])
        return freed

    def _unpin(self, rows: Iterable[int]) -> list[int]:
        free = []
        for row in rows:
            count = self._pins[row] - 1
            if count:
                self._pins[row] = count
            else:
                del self._pins[row]
                free.append(row)
        return free
