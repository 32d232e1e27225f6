"""Counters of drafts by their position in the draft."""

from __future__ import annotations

from shoal_common.telemetry import Metrics

from shoal_decode_worker.entries import TokenEntry


class DraftMetrics:
    """Drafts made, verified and accepted since the start, each with a label `position` that counts from 1."""

    def __init__(self, metrics: Metrics) -> None:
        labels = ("position",)
        self._drafted = metrics.counter("decode_drafted_tokens", "Drafts made, by draft position", labels)
        self._verified = metrics.counter("decode_verified_draft_tokens", "Drafts verified, by draft position", labels)
        self._accepted = metrics.counter("decode_accepted_draft_tokens", "Drafts accepted, by draft position", labels)

    def count(self, entry: TokenEntry) -> None:
        """One step of one choice."""
        numbers = (entry.drafted_count, entry.verified_count, entry.accepted_count)
        for counter, number in zip((self._drafted, self._verified, self._accepted), numbers, strict=True):
            for position in range(1, number + 1):
                counter.labels(str(position)).inc()
