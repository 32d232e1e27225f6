"""Who goes first: priority, then what ran before, then fair shares of tenants and of their users, then arrival."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

from shoal_scheduler.core.fair_share import Entry, FairShares, Row, Share
from shoal_scheduler.core.leases import Lease


class Level(IntEnum):
    """Whose share of the queue."""

    TENANT = 1
    USER = 2


class WaitingQueue:
    """Requests that wait for a place.

    Within a priority, what was placed before goes first, by arrival. The others go by fair shares of tenants, within a
    tenant by fair shares of its users, and within a user who arrived first. So a request waits at most for those of
    higher priority, for what was placed before, and for its own tenant's and user's share.
    Invariant: a request is here at most once.
    """

    def __init__(self) -> None:
        self._lanes: dict[int, _Lane] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, lease: Lease) -> None:
        """Wait. The request is not here yet."""
        lane = self._lanes.get(lease.spec.priority)
        if lane is None:
            lane = self._lanes[lease.spec.priority] = _Lane()
        lane.put(lease)
        self._count += 1

    def take(self, lease: Lease, *, is_served: bool) -> None:
        """Wait no longer. `is_served`: it was placed, which counts against its shares."""
        lane = self._lanes[lease.spec.priority]
        lane.take(lease, is_served=is_served)
        self._count -= 1
        if lane.is_idle:
            del self._lanes[lease.spec.priority]

    def discard(self, lease: Lease) -> None:
        """Wait no longer, unserved. Nothing happens if it does not wait."""
        lane = self._lanes.get(lease.spec.priority)
        if lane is not None and lease in lane:
            self.take(lease, is_served=False)

    def in_order(self) -> Iterator[Lease]:
        """All of them, next first, as if each was placed in its turn. Not to be used on after a change but by `take`
        of what it gave out."""
        for priority in sorted(self._lanes, reverse=True):
            yield from self._lanes[priority].in_order()

    def count_before(self, priority: int) -> int:
        """Requests of this priority and above."""
        return sum(len(lane) for key, lane in self._lanes.items() if key >= priority)

    def last_of(self, priority: int) -> Lease | None:
        """Who would go last: the newest request of the user with the most waiting, of the tenant with the most, of the
        lowest priority.

        None if nobody waits below or at `priority`.
        """
        waiting = [key for key, lane in self._lanes.items() if len(lane) and key <= priority]
        return self._lanes[min(waiting)].last() if waiting else None

    def waiting_beside(self, lease: Lease, level: Level) -> int:
        """Requests of its priority and of its tenant, or of its user, that did not run before."""
        lane = self._lanes.get(lease.spec.priority)
        return lane.waiting_beside(lease, level) if lane is not None else 0


class _Lane:
    """One priority."""

    def __init__(self) -> None:
        self._moved, self._fresh = Row(), FairShares((_tenant_of, _user_of))
        self._sequence = 0
        self._entries: dict[str, tuple[Entry, bool]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, lease: Lease) -> bool:
        return lease.request_id in self._entries

    @property
    def is_idle(self) -> bool:
        """Nobody waits: the clocks may start anew, as everyone would start level."""
        return not self._entries

    def put(self, lease: Lease) -> None:
        self._sequence += 1
        entry = (lease.arrival_s, self._sequence, lease)
        self._entries[lease.request_id] = (entry, lease.was_placed)
        self._share(lease.was_placed).put(entry)

    def take(self, lease: Lease, *, is_served: bool) -> None:
        entry, is_moved = self._entries.pop(lease.request_id)
        self._share(is_moved).take(entry, is_served=is_served)

    def in_order(self) -> Iterator[Lease]:
        for share in (self._moved, self._fresh):
            yield from (lease for _, _, lease in share.in_order())

    def last(self) -> Lease | None:
        return self._fresh.last()[2] if len(self._fresh) else None

    def waiting_beside(self, lease: Lease, level: int) -> int:
        return self._fresh.count_of(lease, level)

    def _share(self, is_moved: bool) -> Share:
        return self._moved if is_moved else self._fresh


def _tenant_of(lease: Lease) -> str:
    return lease.spec.tenant


def _user_of(lease: Lease) -> str:
    return lease.spec.user
