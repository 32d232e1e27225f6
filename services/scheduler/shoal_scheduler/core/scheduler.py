"""The scheduler as a state machine: messages of gateways and news of the fleet in, answers out. Time is an argument."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from shoal_common.presence import Presence

from shoal_scheduler.core.admission import Admission
from shoal_scheduler.core.evidence import note_loss, note_refusal
from shoal_scheduler.core.fleet import DECODE, Fleet
from shoal_scheduler.core.kv_view import KvView
from shoal_scheduler.core.leases import Lease, Leases, State
from shoal_scheduler.core.limits import Limits
from shoal_scheduler.core.messages import Answer, DenialReason, Denied, LossCause, Outgoing, Queued
from shoal_scheduler.core.placement import Chosen, Placer
from shoal_scheduler.core.queue import WaitingQueue
from shoal_scheduler.core.requests import Pool, RequestSpec
from shoal_scheduler.core.service_rate import ServiceRate
from shoal_scheduler.core.totals import Totals

_REASONS_AGAINST = {DenialReason.EXCEEDS_CAPACITY, DenialReason.UNKNOWN_MODEL}
"""Trying again makes no sense."""
_MAX_VERDICTS = 256
"""A verdict looks at the whole fleet; after a change the queue is judged in so many at a time."""


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
        self._admission = Admission(fleet, self.queue, limits)
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
        for lease in self.leases.of_stream(stream_id):
            if lease.state is State.QUEUED:
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
        if self._judge(lease, now_s) and self._make_room(lease, now_s):
            self._enqueue(lease)

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
            worker.bookings.adopt(request_id, lease.need, now_s, is_reported=worker.load is not None)

    def admitted(self, request_id: str, attempt: int, now_s: float) -> None:
        """The worker holds the request."""
        lease = self._current(request_id, attempt)
        if lease is not None and lease.state is State.PLACED:
            lease.state = State.RUNNING
            for instance_id in (lease.worker_id, lease.prefill_id):
                instance = self.fleet.get(instance_id)
                if instance is not None:
                    instance.bookings.admitted(request_id, now_s)

    def refused(self, request_id: str, attempt: int, reason: str, now_s: float) -> None:
        """The worker did not take the request; it is placed again, elsewhere or later."""
        lease = self._current(request_id, attempt)
        if lease is None or lease.state is State.QUEUED:
            return
        self.totals.refusals += 1
        lease.closed_attempt = attempt
        note_refusal(lease, self.fleet.get(lease.worker_id), reason, self._limits, now_s)
        self._place_again(lease, lease.refusal_count > self._limits.max_refusals, DenialReason.NO_CAPACITY, now_s)

    def lost(self, request_id: str, attempt: int, cause: LossCause, output_counts: Sequence[int], now_s: float) -> None:
        """A running attempt is gone; the request is placed again and keeps its arrival time."""
        lease = self._current(request_id, attempt)
        if lease is None or lease.state is State.QUEUED:
            return
        self.totals.losses += 1
        lease.closed_attempt, lease.output_counts = attempt, tuple(output_counts)
        if lease.placement is not None and any(output_counts):
            lease.began_with = lease.placement.numerics_id
            if lease.spec.constraint_id is not None:
                # What is half said goes on under the same engines or not at all.
                lease.spec = dataclasses.replace(lease.spec, constraint_id=lease.placement.constraint_id)
        note_loss(lease, self.fleet.get(lease.worker_id), cause, self._limits, now_s)
        self._place_again(lease, lease.loss_count > self._limits.max_losses, DenialReason.TOO_MANY_ATTEMPTS, now_s)

    def finished(self, request_id: str, now_s: float) -> None:
        """It ran to its end: the worker has room again, whatever it last reported. Safe to repeat."""
        lease = self.leases.get(request_id)
        worker = self.fleet.get(lease.worker_id) if lease is not None and lease.state is State.RUNNING else None
        if worker is not None:
            worker.bookings.finished(request_id, now_s)
        self.ended(request_id)

    def ended(self, request_id: str) -> None:
        """Cancelled, or finished somewhere. Safe to repeat."""
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
                    instance.bookings.book(lease.request_id, lease.need)
                    if lease.state is State.RUNNING:
                        instance.bookings.admitted(lease.request_id, now_s)

    def instance_down(self, instance_id: str) -> None:
        """An instance is gone. Those who wait may have waited for it."""
        self.fleet.down(instance_id)
        for lease in self.queue.in_order():
            lease.is_judged = False

    def tick(self, now_s: float) -> None:
        """Time passed: what waited too long is denied, broken streams are forgotten, positions are told anew."""
        for lease in self.leases.orphans(now_s):
            self._release(lease)
        position, verdicts = 0, 0
        homeless: dict[Pool, bool] = {}
        for lease in list(self.queue.in_order()):
            verdicts += not lease.is_judged
            if now_s >= lease.deadline_s:
                self._deny(lease, DenialReason.DEADLINE, now_s)
            elif self._admission.is_homeless_too_long(lease, homeless, now_s):
                self._deny(lease, DenialReason.NO_WORKERS, now_s)
            elif verdicts >= _MAX_VERDICTS or self._judge(lease, now_s):
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
        taken: set[str] = set()
        left: set[str] | None = None
        full: set[Pool] = set()
        for lease in self.queue.in_order():
            if left is not None and not left:
                return
            if lease.spec.pool in full:
                continue
            outcome = self._placer.choose(lease, now_s, taken)
            if isinstance(outcome, Chosen):
                self._place(lease, outcome, now_s)
                continue
            # Whoever comes later must not eat what the one before waits for, however small it is.
            taken.update(outcome.waits_for)
            if left is None:
                left = {one.instance_id for one in self.fleet.of_role(DECODE) if one.is_open(now_s)}
            left.difference_update(outcome.waits_for)
            if outcome.is_whole_pool:
                full.add(lease.spec.pool)

    def _place(self, lease: Lease, chosen: Chosen, now_s: float) -> None:
        self.queue.take(lease, is_served=True)
        self._placement_count += 1
        decode = chosen.decode
        lease.state, lease.worker_id, lease.prefill_id, lease.position = State.PLACED, decode.instance_id, "", None
        decode.bookings.book(lease.request_id, lease.need)
        if chosen.prefill:
            lease.prefill_id = chosen.prefill[0].instance_id
            chosen.prefill[0].bookings.book_prefill(lease.request_id, chosen.uncached_tokens)
        lease.placement = chosen.answer(f"{self._replica_id}.{self._placement_count}")
        self._rate.placed(now_s)
        self.totals.placed(
            prompt_tokens=lease.spec.prompt_tokens, hit_tokens=chosen.hit_tokens, is_remote=bool(chosen.prefill)
        )
        self._say(lease, lease.placement)

    def _place_again(self, lease: Lease, is_too_often: bool, reason: DenialReason, now_s: float) -> None:
        self._release(lease)
        lease.state = State.QUEUED
        lease.is_judged = False
        # Not bound by the queue's limit: it was let in once, and what runs is bounded already.
        self._enqueue(lease)
        if is_too_often:
            self._deny(lease, reason, now_s)
        else:
            self._judge(lease, now_s)

    def _judge(self, lease: Lease, now_s: float) -> bool:
        """Deny a request that no waiting helps. True if it may wait. An answer that began waits for what may come."""
        if lease.is_judged or any(lease.output_counts) or not self._admission.is_view_settled(now_s):
            return True
        lease.is_judged = True
        reason = self._admission.hopeless(lease)
        if reason is not None:
            self._deny(lease, reason, now_s)
        return reason is None

    def _make_room(self, lease: Lease, now_s: float) -> bool:
        """Whether a new request may wait; if the queue is full, one that matters less must go for it, or it itself."""
        if self._admission.has_room():
            return True
        victim = self._admission.victim_for(lease)
        self._deny(victim or lease, DenialReason.QUEUE_FULL, now_s)
        return victim is not None

    def _enqueue(self, lease: Lease) -> None:
        self.queue.put(lease)
        self._silent.append(lease)

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
                instance.bookings.release(lease.request_id)

    def _say_position(self, lease: Lease, position: int) -> None:
        lease.position = position
        self._say(lease, Queued(position))

    def _say(self, lease: Lease, answer: Answer) -> None:
        self._out.append(Outgoing(lease.stream_id, lease.request_id, answer))
