"""Counters of drafts by their position in the draft."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import Counter
from shoal_common.draft_counts import DraftCounts
from shoal_common.telemetry import Metrics

from shoal_decode_worker.entries import TokenEntry


class DraftMetrics:
    """Drafts made, verified and accepted since the start, each with a label `position` that counts from 1."""

    def __init__(self, metrics: Metrics) -> None:
        labels = ("position",)
        self._drafted = metrics.counter("decode_drafted_tokens", "Drafts made, by draft position", labels)
        self._verified = metrics.counter("decode_verified_draft_tokens", "Drafts verified, by draft position", labels)
        self._accepted = metrics.counter("decode_accepted_draft_tokens", "Drafts accepted, by draft position", labels)

    def count(self, entries: Iterable[TokenEntry]) -> None:
        """What one step made: summed up first, as a labelled counter costs more than the rest of an entry's way."""
        step = DraftCounts()
        for entry in entries:
            step.add(entry.drafted_count, entry.verified_count, entry.accepted_count)
        for counter, numbers in (
            (self._drafted, step.drafted),
            (self._verified, step.verified),
            (self._accepted, step.accepted),
        ):
            _add(counter, numbers)


def _add(counter: Counter, numbers: list[int]) -> None:
    for position, number in enumerate(numbers, 1):
        if number:
            counter.labels(str(position)).inc(number)
