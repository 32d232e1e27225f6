"""What the scheduler shows to Prometheus."""

from __future__ import annotations

from prometheus_client import Counter
from shoal_common.telemetry import Metrics

from shoal_scheduler.core.messages import DenialReason
from shoal_scheduler.core.scheduler import Scheduler


class SchedulerMetrics:
    """Gauges and counters that follow the core's totals."""

    def __init__(self, metrics: Metrics) -> None:
        self._queued = metrics.gauge("scheduler_queued_requests", "Requests that wait for a place")
        self._running = metrics.gauge("scheduler_placed_requests", "Requests placed or running, by our books")
        self._index = metrics.gauge("scheduler_kv_index_entries", "Blocks and snapshots in the KV index")
        self._unlisted = metrics.gauge("scheduler_kv_nodes_unlisted", "KV cache nodes whose events have a gap")
        self._wait = metrics.histogram("scheduler_queue_wait_seconds", "From arrival to a placement")
        self._denials = metrics.counter("scheduler_denials", "Requests denied", ("reason",))
        self._counters: dict[str, Counter] = {
            "placements": metrics.counter("scheduler_placements", "Placements, repeated ones too"),
            "remote_prefills": metrics.counter("scheduler_remote_prefills", "Placements that name a prefill worker"),
            "prompt_tokens": metrics.counter("scheduler_prompt_tokens", "Prompt tokens placed"),
            "expected_hit_tokens": metrics.counter(
                "scheduler_expected_hit_tokens", "Of these, expected to be in the KV cache"
            ),
            "refusals": metrics.counter("scheduler_refusals", "Placements that a worker refused"),
            "losses": metrics.counter("scheduler_losses", "Running attempts that were lost"),
        }
        self._seen: dict[str, int] = {}
        for reason in DenialReason:
            self._denials.labels(reason.value)

    def waited(self, waited_s: float) -> None:
        """A request was placed after this time."""
        self._wait.observe(waited_s)

    def renew(self, scheduler: Scheduler) -> None:
        """Follow the core."""
        waiting = len(scheduler.queue)
        self._queued.set(waiting)
        self._running.set(len(scheduler.leases) - waiting)
        self._index.set(len(scheduler.kv.index))
        self._unlisted.set(len(scheduler.kv.needing_list()))
        for name, counter in self._counters.items():
            self._advance(name, counter, getattr(scheduler.totals, name))
        for reason, count in scheduler.totals.denials.items():
            self._advance(reason.value, self._denials.labels(reason.value), count)

    def _advance(self, key: str, counter: Counter, total: int) -> None:
        counter.inc(total - self._seen.get(key, 0))
        self._seen[key] = total
