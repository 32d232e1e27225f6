"""Whether a request may wait: for a model nobody serves, for room that no worker has, in a queue that is full."""

from __future__ import annotations

from shoal_scheduler.core.fleet import DECODE, Fleet
from shoal_scheduler.core.leases import Lease
from shoal_scheduler.core.limits import Limits
from shoal_scheduler.core.messages import DenialReason
from shoal_scheduler.core.queue import Level, WaitingQueue
from shoal_scheduler.core.requests import Pool

EXCEEDS = "EXCEEDS_CAPACITY"
"""Reason of a worker that could not hold the request if it were empty."""


class Admission:
    """Judges requests; changes none but `homeless_since_s` of those it is asked about."""

    def __init__(self, fleet: Fleet, queue: WaitingQueue, limits: Limits) -> None:
        self._fleet, self._queue, self._limits = fleet, queue, limits

    def is_view_settled(self, now_s: float) -> bool:
        """Every live instance has been heard by now: what is missing does not exist."""
        first_at_s = self._fleet.first_up_at_s
        return first_at_s is not None and now_s - first_at_s >= self._limits.view_settle_s

    def hopeless(self, lease: Lease) -> DenialReason | None:
        """Why no waiting helps, by the fleet as it is."""
        if not self._fleet.of_role(DECODE):
            return None
        if not self._fleet.knows_model(lease.spec.model):
            return DenialReason.UNKNOWN_MODEL
        workers = self._fleet.eligible(lease.spec)
        size = lease.spec.size()
        able = [one for one in workers if one.could_hold(size) and lease.never.get(one.instance_id) != EXCEEDS]
        if workers and not able:
            return DenialReason.EXCEEDS_CAPACITY
        if able and all(one.instance_id in lease.never for one in able):
            return DenialReason.NO_CAPACITY
        return None

    def has_room(self) -> bool:
        """One more may wait."""
        return len(self._queue) < self._limits.max_queued

    def victim_for(self, lease: Lease) -> Lease | None:
        """Who must leave a full queue for a new request: one of lower priority, or of a tenant with more waiting, or
        of a user of its own tenant with more."""
        spec = lease.spec
        last = self._queue.last_of(spec.priority)
        if last is None or last.spec.priority < spec.priority:
            return last
        level = Level.USER if last.spec.tenant == spec.tenant else Level.TENANT
        mine, theirs = self._queue.waiting_beside(lease, level), self._queue.waiting_beside(last, level)
        return last if mine + 1 < theirs else None

    def is_homeless_too_long(self, lease: Lease, known: dict[Pool, bool], now_s: float) -> bool:
        """There has been no worker of its kind for longer than it may wait for one.

        known   what this tick found out already, by pool
        """
        pool = lease.spec.pool
        if pool not in known:
            known[pool] = all(one.is_draining for one in self._fleet.eligible(lease.spec))
        if not known[pool]:
            lease.homeless_since_s = None
            return False
        if lease.homeless_since_s is None:
            lease.homeless_since_s = now_s
        return now_s - lease.homeless_since_s >= self._limits.homeless_wait_s
