"""One request from Submit to its end: which attempt runs, what its failure means, what to ask next. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from shoal.scheduler.v1 import scheduler_service_pb2
from shoal_common.errors import DeadlineExceeded, Internal, MeshError

from shoal_gateway.journal import Journal
from shoal_gateway.refusals import NoCapacity

MAX_REFUSALS = 5
MAX_LOSSES = 8
"""A request that takes workers down with it must not go through the whole fleet."""
MAX_INTERNAL_ERRORS = 2
_RETRY_AFTER_S = 2.0
_CALLERS_FAULT = frozenset({"INVALID_ARGUMENT", "OUT_OF_RANGE", "UNIMPLEMENTED"})
_LASTING = frozenset({"NOT_DETERMINISTIC"})
"""What another worker may do, but which waiting does not change."""
_BROKEN = scheduler_service_pb2.LOST_CAUSE_BROKEN
_CAUSES = {
    "MOVED": scheduler_service_pb2.LOST_CAUSE_MOVED,
    "DRAINING": scheduler_service_pb2.LOST_CAUSE_DRAINED,
    "DRAINED": scheduler_service_pb2.LOST_CAUSE_DRAINED,
    "NO_PROGRESS": scheduler_service_pb2.LOST_CAUSE_NO_PROGRESS,
}


class Phase(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    """At a scheduler, for a placement."""
    OPENING = "opening"
    """Placed, not yet admitted."""
    RUNNING = "running"
    """Admitted, or tokens came."""
    ENDED = "ended"
    """Complete, failed or given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The worker did not take the attempt: say so to the scheduler and wait for the next placement."""

    attempt: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A running attempt is gone: say so to the scheduler and go on elsewhere from the tokens so far."""

    attempt: int
    cause: scheduler_service_pb2.LostCause.ValueType
    output_counts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The request is over; the client gets the error."""

    error: MeshError


Verdict = Refused | Lost | Failed | None


class Session:
    """One request. Invariant: at most one attempt is current, and attempts only grow; ENDED is for ever."""

    def __init__(self, choice_count: int) -> None:
        self.journal = Journal(choice_count)
        self.phase = Phase.WAITING
        self.attempt = 0
        self.numerics_id = self.constraint_id = ""
        self.is_exact = True
        self.was_admitted = False
        self._refusals = 0
        self._losses = 0
        self._internal_errors = 0

    def keeps_exact(self, numerics_id: str) -> bool:
        """Whether an answer placed there goes on with the bits that it began with."""
        return not self.journal.has_output or self.numerics_id in ("", numerics_id)

    @property
    def is_running(self) -> bool:
        """A worker holds the request, as far as we know."""
        return self.phase in (Phase.OPENING, Phase.RUNNING)

    def place(self, numerics_id: str, constraint_id: str = "") -> int | None:
        """A placement came. Returns the number of the attempt to open, None if nothing waits for one."""
        if self.phase is not Phase.WAITING:
            return None
        self.is_exact = self.is_exact and self.keeps_exact(numerics_id)
        self.numerics_id, self.constraint_id = numerics_id, constraint_id
        self.phase = Phase.OPENING
        self.attempt += 1
        return self.attempt

    def admitted(self, attempt: int) -> bool:
        """The worker holds the request. False if that attempt is no longer the current one."""
        if attempt != self.attempt or self.phase is Phase.WAITING or self.phase is Phase.ENDED:
            return False
        self.phase, self.was_admitted = Phase.RUNNING, True
        return True

    def is_current(self, attempt: int) -> bool:
        """Entries of this attempt count."""
        return attempt == self.attempt and self.is_running

    def failed(self, attempt: int, error: MeshError) -> Verdict:
        """The call of an attempt ended with an error. None if that changes nothing."""
        if not self.is_current(attempt):
            return None
        if self.journal.is_finished:
            self.phase = Phase.ENDED
            return None
        verdict = self._judge(attempt, error)
        self.phase = Phase.ENDED if isinstance(verdict, Failed) else Phase.WAITING
        return verdict

    def end(self) -> bool:
        """Complete, denied or given up. False if it had ended before."""
        was_live = self.phase is not Phase.ENDED
        self.phase = Phase.ENDED
        return was_live

    def _judge(self, attempt: int, error: MeshError) -> Verdict:
        if error.code in _CALLERS_FAULT or isinstance(error, DeadlineExceeded):
            return Failed(error=error)
        if self.phase is Phase.OPENING:
            self._refusals += 1
            if self._refusals > MAX_REFUSALS and error.reason in _LASTING:
                return Failed(error=error)
            if self._refusals > MAX_REFUSALS:
                return Failed(
                    error=NoCapacity(
                        f"{self._refusals} workers refused the request, the last with {error.reason}",
                        reason="TOO_MANY_ATTEMPTS",
                        retry_after_s=_RETRY_AFTER_S,
                        refusals=self._refusals,
                    )
                )
            return Refused(attempt=attempt, reason=error.reason)
        self._losses += 1
        self._internal_errors += isinstance(error, Internal)
        if self._internal_errors > MAX_INTERNAL_ERRORS:
            return Failed(error=error)
        if self._losses > MAX_LOSSES:
            return Failed(
                error=NoCapacity(
                    f"the answer was interrupted {self._losses} times",
                    reason="TOO_MANY_ATTEMPTS",
                    retry_after_s=_RETRY_AFTER_S,
                    losses=self._losses,
                )
            )
        cause = _CAUSES.get(error.reason, _BROKEN)
        return Lost(attempt=attempt, cause=cause, output_counts=tuple(self.journal.counts()))
