"""Who goes first: priority, then what ran before, then the tenants' fair shares, then arrival."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator

from shoal_scheduler.core.leases import Lease


class WaitingQueue:
    """Requests that wait for a place.

    Within a priority, what was placed before goes first, by arrival. The others go by start-time fair queueing over
    tenants: a tenant's next request starts where its last one ended, on a clock of tokens that moves on with those who
    are served; the tenant that starts earliest is next, and within a tenant who arrived first. So a request waits at
    most for those of higher priority, for what was placed before, and for its own tenant's share.
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
        """Wait no longer. `is_served`: it was placed, which counts against its tenant's share."""
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
        """Who would go last: the newest request of the tenant with the most waiting, of the lowest priority.

        None if nobody waits below or at `priority`.
        """
        waiting = [key for key, lane in self._lanes.items() if len(lane) and key <= priority]
        return self._lanes[min(waiting)].last() if waiting else None

    def waiting_of(self, priority: int, tenant: str) -> int:
        """Requests of a tenant in one priority that did not run before."""
        lane = self._lanes.get(priority)
        return lane.waiting_of(tenant) if lane is not None else 0


_Entry = tuple[float, int, Lease]


class _Lane:
    """One priority. Tags are tokens on the lane's virtual clock."""

    def __init__(self) -> None:
        self._moved: list[_Entry] = []
        self._fresh: dict[str, list[_Entry]] = {}
        self._tags: dict[str, float] = {}
        self._clock = 0.0
        self._sequence = 0
        self._keys: dict[str, tuple[float, int, bool]] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, lease: Lease) -> bool:
        return lease.request_id in self._keys

    @property
    def is_idle(self) -> bool:
        """Nobody waits: the clock may start anew, as everyone would start level."""
        return not self._keys

    def put(self, lease: Lease) -> None:
        self._sequence += 1
        entry = (lease.arrival_s, self._sequence, lease)
        self._keys[lease.request_id] = (lease.arrival_s, self._sequence, lease.was_placed)
        if lease.was_placed:
            insort(self._moved, entry)
            return
        tenant = lease.spec.tenant
        if tenant not in self._fresh:
            self._fresh[tenant] = []
            self._tags[tenant] = max(self._clock, self._tags.get(tenant, 0.0))
        insort(self._fresh[tenant], entry)

    def take(self, lease: Lease, *, is_served: bool) -> None:
        arrival_s, sequence, is_moved = self._keys.pop(lease.request_id)
        entries = self._moved if is_moved else self._fresh[lease.spec.tenant]
        del entries[bisect_left(entries, (arrival_s, sequence))]
        if is_moved:
            return
        tenant = lease.spec.tenant
        if is_served:
            # The clock of an ideal server of all waiting tenants at once. One that stood still while new tenants are
            # served would let an endless row of them go before a tenant that was served once.
            self._clock = max(self._clock, self._tags[tenant]) + lease.spec.total_tokens / len(self._fresh)
            self._tags[tenant] += lease.spec.total_tokens
        if not entries:
            del self._fresh[tenant]
        # A tag behind the clock says nothing; dropping it keeps the table as small as the number of busy tenants.
        idle = [key for key, tag in self._tags.items() if key not in self._fresh and tag <= self._clock]
        for key in idle:
            del self._tags[key]

    def in_order(self) -> Iterator[Lease]:
        yield from [lease for _, _, lease in self._moved]
        lists = {tenant: list(entries) for tenant, entries in self._fresh.items()}
        heads = [(self._tags[tenant], entries[0][0], tenant, 0) for tenant, entries in lists.items()]
        heapq.heapify(heads)
        while heads:
            tag, _, tenant, index = heapq.heappop(heads)
            lease = lists[tenant][index][2]
            yield lease
            if index + 1 < len(lists[tenant]):
                following = lists[tenant][index + 1]
                heapq.heappush(heads, (tag + lease.spec.total_tokens, following[0], tenant, index + 1))

    def last(self) -> Lease | None:
        if not self._fresh:
            return None
        tenant = max(self._fresh, key=lambda key: (len(self._fresh[key]), self._fresh[key][-1][:2]))
        return self._fresh[tenant][-1][2]

    def waiting_of(self, tenant: str) -> int:
        return len(self._fresh.get(tenant, ()))
