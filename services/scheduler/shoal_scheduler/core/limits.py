"""Bounds of the scheduler's decisions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds and periods, in the units of their names.

    max_queued             requests that wait at most
    max_refusals           a request that more workers than this refuse is denied
    max_losses             a request that is lost more often than this is denied: it may be what breaks the workers
    max_chain_length       block hashes kept for all requests together; past it new requests count as not cached
    view_settle_s          from the first instance seen until all that live have been; no verdict on the fleet before
    homeless_wait_s        a request waits so long for a worker of its kind to appear
    stream_grace_s         books of a broken stream are kept so long
    stale_s                a worker that did not report for so long is taken for silent
    suspect_s              first suspicion after a loss; doubles with each in a row up to longest_suspect_s
    refusal_hold_s         a worker that refused for want of room takes nothing for so long, or until it reports
    unreachable_hold_s     a gateway is not sent again to a worker it could not reach for so long, or until it reports
    refusal_backoff_s      a worker is not asked again for the same request before that, doubling
    """

    max_queued: int = 4096
    max_refusals: int = 5
    max_losses: int = 8
    max_chain_length: int = 1_000_000
    view_settle_s: float = 1.5
    homeless_wait_s: float = 10.0
    stream_grace_s: float = 5.0
    stale_s: float = 5.0
    suspect_s: float = 5.0
    longest_suspect_s: float = 60.0
    refusal_hold_s: float = 1.0
    unreachable_hold_s: float = 3.5
    refusal_backoff_s: float = 0.1
