"""What a refusal or a loss tells about the worker, and about asking it again."""

from __future__ import annotations

from shoal_scheduler.core.admission import EXCEEDS
from shoal_scheduler.core.instance import Instance
from shoal_scheduler.core.leases import Lease
from shoal_scheduler.core.limits import Limits
from shoal_scheduler.core.messages import LossCause

_NEVER_REASONS = frozenset({EXCEEDS, "NUMERICS_MISMATCH", "CONSTRAINT_MISMATCH"})
"""A worker that refuses so will refuse this request for ever."""
_FULL_REASONS = frozenset({"OUT_OF_BLOCKS", "OUT_OF_SLOTS", "QUEUE_FULL", "OUT_OF_CAPACITY"})
_LEAVING_REASONS = frozenset({"DRAINING", "STOPPING"})


def note_refusal(lease: Lease, worker: Instance | None, reason: str, limits: Limits, now_s: float) -> None:
    """The worker of a placement refused it. None: the worker is gone meanwhile."""
    lease.refusal_count += 1
    if reason in _NEVER_REASONS:
        lease.never[lease.worker_id] = reason
    backoff_s = limits.refusal_backoff_s * 2 ** (lease.refusal_count - 1)
    lease.not_before_s[lease.worker_id] = now_s + backoff_s
    if worker is None or reason in _NEVER_REASONS:
        return
    if reason in _FULL_REASONS:
        worker.full_until_s = now_s + limits.refusal_hold_s
    elif reason in _LEAVING_REASONS:
        worker.leaving_until_s = now_s + limits.refusal_hold_s
    else:
        # Most likely unreachable, from there at least. If it lives its next report says so; if not, presence will.
        worker.cut_from_until_s[lease.stream_id] = now_s + limits.unreachable_hold_s


def note_loss(lease: Lease, worker: Instance | None, cause: LossCause, limits: Limits, now_s: float) -> None:
    """A running attempt is gone. Only what broke or stood still counts against the worker."""
    lease.loss_count += cause.counts
    if worker is None:
        return
    if cause.counts:
        worker.strike(now_s, suspect_s=limits.suspect_s, longest_s=limits.longest_suspect_s)
    elif cause is LossCause.DRAINED:
        worker.leaving_until_s = now_s + limits.refusal_hold_s
    else:
        # It ran out of blocks.
        worker.full_until_s = now_s + limits.refusal_hold_s
