"""What the scheduler shows to Prometheus."""

from __future__ import annotations

from shoal_common.telemetry import Metrics

from shoal_scheduler.core.messages import DenialReason
from shoal_scheduler.core.scheduler import Scheduler


class SchedulerMetrics:
    """Numbers of the core, read at each scrape, or followed by `renew`."""

    def __init__(self, metrics: Metrics, scheduler: Scheduler) -> None:
        queue, leases, kv, totals = scheduler.queue, scheduler.leases, scheduler.kv, scheduler.totals
        self._kv, self._totals = kv, totals
        self._told = dict.fromkeys(DenialReason, 0)
        self._wait = metrics.histogram("scheduler_queue_wait_seconds", "From arrival to a placement")
        self._denials = metrics.counter("scheduler_denials", "Requests denied", ("reason",))
        self._unlisted = metrics.gauge("scheduler_kv_nodes_unlisted", "KV cache nodes whose events have a gap")
        for reason in DenialReason:
            self._denials.labels(reason.value)
        for name, text, read in (
            ("queued_requests", "Requests that wait for a place", lambda: len(queue)),
            ("placed_requests", "Requests placed or running, by our books", lambda: len(leases) - len(queue)),
            ("kv_index_entries", "Blocks and snapshots in the KV index", lambda: len(kv.index)),
        ):
            metrics.observe(f"scheduler_{name}", text, read)
        for name, text, read in (
            ("placements", "Placements, repeated ones too", lambda: totals.placements),
            ("remote_prefills", "Placements that name a prefill worker", lambda: totals.remote_prefills),
            ("prompt_tokens", "Prompt tokens placed", lambda: totals.prompt_tokens),
            ("expected_hit_tokens", "Of these, expected to be in the KV cache", lambda: totals.expected_hit_tokens),
            ("refusals", "Placements that a worker refused", lambda: totals.refusals),
            ("losses", "Running attempts that were lost", lambda: totals.losses),
            ("kv_index_dropped", "Index entries that went for its bound", lambda: kv.index.dropped_count),
        ):
            metrics.observe(f"scheduler_{name}", text, read, kind="counter")

    def waited(self, waited_s: float) -> None:
        """A request was placed after this time."""
        self._wait.observe(waited_s)

    def renew(self) -> None:
        """Follow what cannot be read from another thread."""
        self._unlisted.set(len(self._kv.needing_list()))
        for reason, count in self._totals.denials.items():
            self._denials.labels(reason.value).inc(count - self._told[reason])
            self._told[reason] = count
