"""Fair shares of a queue: of tenants, and within a tenant of its users. Pure."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from shoal_scheduler.core.leases import Lease

Entry = tuple[float, int, Lease]
"""Arrival, place among all that were put, and the request: in the order of arrival."""


class Share(Protocol):
    """Entries that wait together."""

    def __len__(self) -> int: ...

    def put(self, entry: Entry) -> None:
        """One more. It is not here yet."""

    def take(self, entry: Entry, *, is_served: bool) -> None:
        """One less, which is here. `is_served`: it counts against its share."""

    def in_order(self) -> Iterator[Entry]:
        """All, next first, as if each was served in its turn, as they were when the first was asked for."""

    def first(self) -> Entry:
        """Who is next. There is one."""

    def last(self) -> Entry:
        """Who would go last. There is one."""

    def count_of(self, lease: Lease, level: int) -> int:
        """How many wait in its share, `level` levels down; 0 is here."""


class Row:
    """By arrival."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, entry: Entry) -> None:
        """See Share."""
        insort(self._entries, entry)

    def take(self, entry: Entry, *, is_served: bool) -> None:
        """See Share."""
        del self._entries[bisect_left(self._entries, entry[:2])]

    def in_order(self) -> Iterator[Entry]:
        """See Share."""
        yield from list(self._entries)

    def first(self) -> Entry:
        """See Share."""
        return self._entries[0]

    def last(self) -> Entry:
        """See Share."""
        return self._entries[-1]

    def count_of(self, lease: Lease, level: int) -> int:
        """See Share."""
        return len(self)


class FairShares:
    """Start-time fair queueing over shares: a share's next request starts where its last one ended, on a clock of
    tokens that moves on with those who are served; the share that starts earliest is next. Tags are tokens on that
    clock.

    keys   of which share a request is, and within that, of which; none: by arrival

    Invariant: no share here is empty.
    """

    def __init__(self, keys: Sequence[Callable[[Lease], str]]) -> None:
        self._key, *self._inner = keys
        self._shares: dict[str, Share] = {}
        self._tags: dict[str, float] = {}
        self._clock = 0.0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, entry: Entry) -> None:
        """See Share."""
        key = self._key(entry[2])
        share = self._shares.get(key)
        if share is None:
            share = self._shares[key] = FairShares(self._inner) if self._inner else Row()
            self._tags[key] = max(self._clock, self._tags.get(key, 0.0))
        share.put(entry)
        self._count += 1

    def take(self, entry: Entry, *, is_served: bool) -> None:
        """See Share."""
        key, tokens = self._key(entry[2]), entry[2].spec.total_tokens
        share = self._shares[key]
        share.take(entry, is_served=is_served)
        self._count -= 1
        if is_served:
            # The clock of an ideal server of all waiting shares at once. One that stood still while new shares are
            # served would let an endless row of them go before a share that was served once.
            self._clock = max(self._clock, self._tags[key]) + tokens / len(self._shares)
            self._tags[key] += tokens
        if not len(share):
            del self._shares[key]
        # A tag behind the clock says nothing; dropping it keeps the table as small as the number of busy shares.
        for idle in [one for one, tag in self._tags.items() if one not in self._shares and tag <= self._clock]:
            del self._tags[idle]

    def first(self) -> Entry:
        """See Share."""
        if len(self._shares) == 1:
            [share] = self._shares.values()
            return share.first()
        return self._shares[min(self._heads())[2]].first()

    def in_order(self) -> Iterator[Entry]:
        """See Share."""
        if len(self._shares) == 1:
            [share] = self._shares.values()
            yield from share.in_order()
            return
        shares, rests = dict(self._shares), dict[str, Iterator[Entry]]()
        nexts: dict[str, Entry] = {}
        heads = self._heads()
        heapq.heapify(heads)
        while heads:
            tag, _, key = heapq.heappop(heads)
            # Nothing was taken from a share of which nothing was given out: it may be begun late.
            rest = rests.get(key)
            if rest is None:
                rest = rests[key] = shares[key].in_order()
                nexts[key] = next(rest)
            entry = nexts[key]
            # Before it is given out: then it may be taken, and with it what the rest is read from.
            following = next(rest, None)
            yield entry
            if following is not None:
                nexts[key] = following
                heapq.heappush(heads, (tag + entry[2].spec.total_tokens, following[0], key))

    def _heads(self) -> list[tuple[float, float, str]]:
        """Of each share its tag and the arrival of its first: the least goes next."""
        return [(self._tags[key], share.first()[0], key) for key, share in self._shares.items()]

    def last(self) -> Entry:
        """See Share: the newest of those in the share with the most waiting."""
        most = max(len(share) for share in self._shares.values())
        return max((share.last() for share in self._shares.values() if len(share) == most), key=lambda entry: entry[:2])

    def count_of(self, lease: Lease, level: int) -> int:
        """See Share."""
        if not level:
            return len(self)
        share = self._shares.get(self._key(lease))
        return share.count_of(lease, level - 1) if share is not None else 0
