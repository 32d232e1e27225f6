"""What one loop tallies is shown as the library's own metrics show it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal_common.telemetry import SECONDS_BUCKETS, Metrics

VALUES = st.one_of(st.sampled_from((*SECONDS_BUCKETS, 0.0)), st.floats(0, 100))
ADDED = st.tuples(st.sampled_from(("a", 'q"\\')), st.integers(0, 5))


def shown(metrics: Metrics) -> list[str]:
    """Without when each of the library's was made."""
    lines = metrics.render().decode().splitlines()
    return [line for line in lines if "shoal_x" in line and "_created" not in line]


@given(st.lists(VALUES), st.lists(ADDED))
def test_tallies_are_shown_as_the_librarys_metrics_are(values: list[float], added: list[tuple[str, int]]) -> None:
    tallied, theirs = Metrics(), Metrics()
    distribution, histogram = tallied.distribution("x_seconds", "Times"), theirs.histogram("x_seconds", "Times")
    counts, counter = tallied.counts("x", "Things", ("kind",)), theirs.counter("x", "Things", ("kind",))
    assert shown(tallied) == shown(theirs)
    for value in values:
        distribution.observe(value)
        histogram.observe(value)
    for kind, amount in added:
        counts.of(kind).inc(amount)
        counter.labels(kind).inc(amount)
    assert shown(tallied) == shown(theirs)


def test_a_count_without_its_labels_or_of_a_name_that_is_taken_is_refused() -> None:
    metrics = Metrics()
    with pytest.raises(ValueError, match="kind"):
        metrics.counts("x", "Things", ("kind",)).of()
    with pytest.raises(ValueError, match="uplicate"):
        metrics.counter("x", "Things")
