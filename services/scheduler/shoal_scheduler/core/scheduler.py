"""The scheduler as a state machine: messages of gateways and news of the fleet in, answers out. Time is an argument."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from enum import Enum

from shoal_common.presence import Presence

from shoal_scheduler.core.fleet import DECODE, Fleet
from shoal_scheduler.core.kv_view import KvView
from shoal_scheduler.core.leases import Lease, Leases, State
from shoal_scheduler.core.limits import Limits
from shoal_scheduler.core.messages import Answer, DenialReason, Denied, Outgoing, Placement, Queued, Target
from shoal_scheduler.core.placement import Blocked, Chosen, Placer
from shoal_scheduler.core.queue import WaitingQueue
from shoal_scheduler.core.requests import Pool, RequestSpec
from shoal_scheduler.core.service_rate import ServiceRate

_EXCEEDS = "EXCEEDS_CAPACITY"
_NEVER_REASONS = frozenset({_EXCEEDS, "NUMERICS_MISMATCH", "CONSTRAINT_MISMATCH"})
"""A worker that refuses so will refuse this request for ever."""
_FULL_REASONS = frozenset({"OUT_OF_BLOCKS", "OUT_OF_SLOTS", "QUEUE_FULL", "OUT_OF_CAPACITY"})
_LEAVING_REASONS = frozenset({"DRAINING", "STOPPING"})
_REASONS_AGAINST = {DenialReason.EXCEEDS_CAPACITY, DenialReason.UNKNOWN_MODEL}
"""Trying again makes no sense."""


class LossCause(Enum):
    """Why a running attempt is gone. `counts`: it tells against the worker."""

    BROKEN = "broken"
    NO_PROGRESS = "no_progress"
    MOVED = "moved"
    DRAINED = "drained"

    @property
    def counts(self) -> bool:
        """It tells against the worker."""
        return self in (LossCause.BROKEN, LossCause.NO_PROGRESS)


@dataclasses.dataclass(slots=True)
class Totals:
    """What happened since the start, for the metrics."""

    placements: int = 0
    remote_prefills: int = 0
    prompt_tokens: int = 0
    expected_hit_tokens: int = 0
    refusals: int = 0
    losses: int = 0
    denials: Counter[DenialReason] = dataclasses.field(default_factory=Counter)

    def count(self, spec: RequestSpec, chosen: Chosen) -> None:
        """A placement was made."""
        self.placements += 1
        self.remote_prefills += bool(chosen.prefill)
        self.prompt_tokens += spec.prompt_tokens
        self.expected_hit_tokens += chosen.hit_tokens


class Scheduler:
    """Places requests on decode workers.

    Invariants: a request that was submitted and not ended is queued, or booked on exactly one worker; what is booked on
    workers is what the leases say. Methods change the state; `settle` then places what can be placed, and returns all
    answers since the last time. Messages about unknown requests, or of attempts that are past, change nothing.
    """

    def __init__(self, *, fleet: Fleet, kv: KvView, placer: Placer, limits: Limits, replica_id: str) -> None:
        self.fleet, self.leases, self.queue = fleet, Leases(grace_s=limits.stream_grace_s), WaitingQueue()
        self.kv, self.totals = kv, Totals()
        self._placer, self._limits, self._replica_id = placer, limits, replica_id
        self._rate = ServiceRate()
        self._out: list[Outgoing] = []
        self._silent: list[Lease] = []
        self._placement_count = 0

    def open_stream(self, stream_id: str) -> None:
        """A gateway opened a stream."""
        self.leases.open_stream(stream_id)

    def break_stream(self, stream_id: str, now_s: float) -> None:
        """A stream ended. What it asked for stops waiting; its books are dropped after the grace."""
        self.leases.break_stream(stream_id, now_s)
        for lease in self.leases:
            if lease.stream_id == stream_id and lease.state is State.QUEUED:
                # There is nobody to tell of a placement, and whoever comes back submits it anew.
                self._forget(lease)

    def submit(
        self, stream_id: str, request_id: str, spec: RequestSpec, *, waited_s: float, remaining_s: float, now_s: float
    ) -> None:
        """Asks for a placement. Again on the same stream it repeats the last answer; on another one it starts over."""
        if not self.leases.is_open(stream_id):
            return
        known = self.leases.get(request_id)
        if known is not None and known.stream_id == stream_id:
            self._repeat(known)
            return
        arrival_s = now_s - waited_s
        if known is not None:
            arrival_s = min(arrival_s, known.arrival_s)
            self._forget(known)
        lease = Lease(
            request_id=request_id,
            stream_id=stream_id,
            spec=self._bounded(spec),
            arrival_s=arrival_s,
            deadline_s=now_s + remaining_s,
        )
        self.leases.add(lease)
        reason = self._hopeless(lease)
        if reason is not None:
            self._deny(lease, reason, now_s)
        elif self._make_room(lease, now_s):
            self._enqueue(lease)
        else:
            self._deny(lease, DenialReason.QUEUE_FULL, now_s)

    def adopt(
        self,
        stream_id: str,
        request_id: str,
        spec: RequestSpec,
        *,
        attempt: int,
        worker_id: str,
        output_counts: Sequence[int],
        waited_s: float,
        remaining_s: float,
        now_s: float,
    ) -> None:
        """A request runs that another replica placed, or this one before its stream broke."""
        if not self.leases.is_open(stream_id):
            return
        known = self.leases.get(request_id)
        if known is not None:
            self._forget(known)
        worker = self.fleet.get(worker_id)
        lease = Lease(
            request_id=request_id,
            stream_id=stream_id,
            spec=self._bounded(spec),
            arrival_s=now_s - waited_s,
            deadline_s=now_s + remaining_s,
            state=State.RUNNING,
            worker_id=worker_id,
            closed_attempt=attempt - 1,
            output_counts=tuple(output_counts),
            began_with=worker.presence.numerics_id if worker is not None else spec.numerics_id,
        )
        self.leases.add(lease)
        if worker is not None:
            worker.book(request_id, lease.need)
            worker.admitted(request_id, now_s)

    def admitted(self, request_id: str, attempt: int, now_s: float) -> None:
        """The worker holds the request."""
        lease = self._current(request_id, attempt)
        if lease is not None and lease.state is State.PLACED:
            lease.state = State.RUNNING
            for instance_id in (lease.worker_id, lease.prefill_id):
                instance = self.fleet.get(instance_id)
                if instance is not None:
                    instance.admitted(request_id, now_s)

    def refused(self, request_id: str, attempt: int, reason: str, now_s: float) -> None:
        """The worker did not take the request; it is placed again, elsewhere or later."""
        lease = self._current(request_id, attempt)
        if lease is None or lease.state is State.QUEUED:
            return
        self.totals.refusals += 1
        lease.closed_attempt, lease.refusal_count = attempt, lease.refusal_count + 1
        if reason in _NEVER_REASONS:
            lease.never[lease.worker_id] = reason
        backoff_s = self._limits.refusal_backoff_s * 2 ** (lease.refusal_count - 1)
        lease.not_before_s[lease.worker_id] = now_s + backoff_s
        worker = self.fleet.get(lease.worker_id)
        if worker is not None and reason in _FULL_REASONS:
            worker.full_until_s = now_s + self._limits.refusal_hold_s
        if worker is not None and reason in _LEAVING_REASONS:
            worker.leaving_until_s = now_s + self._limits.refusal_hold_s
        self._place_again(lease, lease.refusal_count > self._limits.max_refusals, DenialReason.NO_CAPACITY, now_s)

    def lost(self, request_id: str, attempt: int, cause: LossCause, output_counts: Sequence[int], now_s: float) -> None:
        """A running attempt is gone; the request is placed again and keeps its arrival time."""
        lease = self._current(request_id, attempt)
        if lease is None or lease.state is State.QUEUED:
            return
        self.totals.losses += 1
        lease.closed_attempt, lease.output_counts = attempt, tuple(output_counts)
        lease.loss_count += cause.counts
        if lease.placement is not None and any(output_counts):
            lease.began_with = lease.placement.numerics_id
        worker = self.fleet.get(lease.worker_id)
        if worker is not None and cause.counts:
            worker.strike(now_s, suspect_s=self._limits.suspect_s, longest_s=self._limits.longest_suspect_s)
        if worker is not None and cause is LossCause.DRAINED:
            worker.leaving_until_s = now_s + self._limits.refusal_hold_s
        if cause is LossCause.MOVED:
            lease.not_before_s[lease.worker_id] = now_s + self._limits.refusal_backoff_s
        self._place_again(lease, lease.loss_count > self._limits.max_losses, DenialReason.TOO_MANY_ATTEMPTS, now_s)

    def ended(self, request_id: str) -> None:
        """Finished, or cancelled. Safe to repeat."""
        lease = self.leases.get(request_id)
        if lease is not None:
            self._forget(lease)

    def instance_up(self, presence: Presence, now_s: float) -> None:
        """An instance is new or says something new. What is booked on one that comes back is booked again."""
        is_new = self.fleet.get(presence.instance_id) is None
        self.fleet.up(presence, now_s)
        instance = self.fleet.get(presence.instance_id)
        if is_new and instance is not None and presence.role == DECODE:
            for lease in self.leases:
                if lease.worker_id == presence.instance_id and lease.state is not State.QUEUED:
                    instance.book(lease.request_id, lease.need)
                    if lease.state is State.RUNNING:
                        instance.admitted(lease.request_id, now_s)

    def tick(self, now_s: float) -> None:
        """Time passed: what waited too long is denied, broken streams are forgotten, positions are told anew."""
        for lease in self.leases.orphans(now_s):
            self._release(lease)
        position = 0
        homeless: dict[Pool, bool] = {}
        for lease in list(self.queue.in_order()):
            if now_s >= lease.deadline_s:
                self._deny(lease, DenialReason.DEADLINE, now_s)
            elif self._is_homeless_too_long(lease, homeless, now_s):
                self._deny(lease, DenialReason.NO_WORKERS, now_s)
            else:
                if lease.position != position:
                    self._say_position(lease, position)
                position += 1

    def settle(self, now_s: float) -> list[Outgoing]:
        """Place what can be placed, in the queue's order, and return all answers in the order they were made."""
        if len(self.queue):
            self._place_waiting(now_s)
        for lease in self._silent:
            if lease.state is State.QUEUED and lease.position is None and self.leases.get(lease.request_id) is lease:
                self._say_position(lease, max(0, self.queue.count_before(lease.spec.priority) - 1))
        self._silent.clear()
        out, self._out = self._out, []
        return out

    def _place_waiting(self, now_s: float) -> None:
        is_open = {one.instance_id for one in self.fleet.of_role(DECODE) if one.is_open(now_s)}
        taken: set[str] = set()
        for lease in self.queue.in_order():
            if not is_open - taken:
                return
            outcome = self._placer.choose(lease, now_s, taken)
            if isinstance(outcome, Blocked):
                # Whoever comes later must not eat what the one before waits for, however small it is.
                taken.update(outcome.waits_for)
            else:
                self._place(lease, outcome, now_s)

    def _place(self, lease: Lease, chosen: Chosen, now_s: float) -> None:
        self.queue.take(lease, is_served=True)
        self._placement_count += 1
        decode = chosen.decode
        lease.state, lease.worker_id, lease.prefill_id, lease.position = State.PLACED, decode.instance_id, "", None
        decode.book(lease.request_id, lease.need)
        if chosen.prefill:
            lease.prefill_id = chosen.prefill[0].instance_id
            chosen.prefill[0].book_prefill(lease.request_id, chosen.uncached_tokens)
        lease.placement = Placement(
            placement_id=f"{self._replica_id}.{self._placement_count}",
            decode=Target(decode.instance_id, decode.presence.address),
            prefill=tuple(Target(one.instance_id, one.presence.address) for one in chosen.prefill),
            kv_id=decode.presence.kv_id,
            numerics_id=decode.presence.numerics_id,
            expected_hit_tokens=chosen.hit_tokens,
        )
        self._rate.placed(now_s)
        self.totals.count(lease.spec, chosen)
        self._say(lease, lease.placement)

    def _place_again(self, lease: Lease, is_too_often: bool, reason: DenialReason, now_s: float) -> None:
        self._release(lease)
        lease.state = State.QUEUED
        # Not bound by the queue's limit: it was let in once, and what runs is bounded already.
        self._enqueue(lease)
        if is_too_often:
            self._deny(lease, reason, now_s)
        elif not any(lease.output_counts) and (hopeless := self._hopeless(lease)) is not None:
            self._deny(lease, hopeless, now_s)

    def _enqueue(self, lease: Lease) -> None:
        self.queue.put(lease)
        self._silent.append(lease)

    def _make_room(self, lease: Lease, now_s: float) -> bool:
        """Whether a new request may wait; if the queue is full, one that matters less must go for it."""
        if len(self.queue) < self._limits.max_queued:
            return True
        spec = lease.spec
        last = self.queue.last_of(spec.priority)
        if last is None:
            return False
        if last.spec.priority == spec.priority:
            mine = self.queue.waiting_of(spec.priority, spec.tenant)
            theirs = self.queue.waiting_of(spec.priority, last.spec.tenant)
            if mine + 1 >= theirs:
                return False
        self._deny(last, DenialReason.QUEUE_FULL, now_s)
        return True

    def _hopeless(self, lease: Lease) -> DenialReason | None:
        """Why no waiting helps."""
        if not self.fleet.knows_model(lease.spec.model):
            return DenialReason.UNKNOWN_MODEL
        workers = self.fleet.eligible(lease.spec)
        if workers and all(
            not one.could_hold(lease.spec) or lease.never.get(one.instance_id) == _EXCEEDS for one in workers
        ):
            return DenialReason.EXCEEDS_CAPACITY
        return None

    def _is_homeless_too_long(self, lease: Lease, known: dict[Pool, bool], now_s: float) -> bool:
        """There has been no worker of its kind for longer than it may wait for one. `known`: answers of this tick."""
        pool = lease.spec.pool
        if pool not in known:
            workers = self.fleet.eligible(lease.spec)
            known[pool] = all(one.presence.is_draining for one in workers)
        if not known[pool]:
            lease.homeless_since_s = None
            return False
        if lease.homeless_since_s is None:
            lease.homeless_since_s = now_s
        return now_s - lease.homeless_since_s >= self._limits.homeless_wait_s

    def _bounded(self, spec: RequestSpec) -> RequestSpec:
        if self.leases.chain_length + spec.chain_length <= self._limits.max_chain_length:
            return spec
        return dataclasses.replace(spec, chains={})

    def _repeat(self, lease: Lease) -> None:
        if lease.state is State.QUEUED:
            lease.position = None
            self._silent.append(lease)
        elif lease.state is State.PLACED and lease.placement is not None:
            self._say(lease, lease.placement)

    def _current(self, request_id: str, attempt: int) -> Lease | None:
        """The lease, if the message is about an attempt that is not past."""
        lease = self.leases.get(request_id)
        return lease if lease is not None and attempt > lease.closed_attempt else None

    def _deny(self, lease: Lease, reason: DenialReason, now_s: float) -> None:
        self.totals.denials[reason] += 1
        retry_after_s = None
        if reason is DenialReason.NO_WORKERS:
            retry_after_s = self._limits.homeless_wait_s
        elif reason not in _REASONS_AGAINST:
            retry_after_s = self._rate.wait_s(len(self.queue), now_s)
        self._say(lease, Denied(reason, retry_after_s))
        self._forget(lease)

    def _forget(self, lease: Lease) -> None:
        if lease.state is State.QUEUED:
            self.queue.discard(lease)
        else:
            self._release(lease)
        self.leases.remove(lease)

    def _release(self, lease: Lease) -> None:
        for instance_id in (lease.worker_id, lease.prefill_id):
            instance = self.fleet.get(instance_id)
            if instance is not None:
                instance.release(lease.request_id)

    def _say_position(self, lease: Lease, position: int) -> None:
        lease.position = position
        self._say(lease, Queued(position))

    def _say(self, lease: Lease, answer: Answer) -> None:
        self._out.append(Outgoing(lease.stream_id, lease.request_id, answer))
