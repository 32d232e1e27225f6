"""Metrics for what one event loop counts at each request: no locks and no look-ups; they are summed up at a scrape.

The library's own metrics may be written by any thread; five of them cost a request on a gateway that slept 70 us.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Count:
    """A number that only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def inc(self, amount: int = 1) -> None:
        """So many more."""
        self.value += amount


class Counts(Collector):
    """A counter for each set of label values."""

    def __init__(self, name: str, text: str, labels: Sequence[str]) -> None:
        self._name, self._text, self._labels = name, text, tuple(labels)
        self._counts: dict[tuple[str, ...], Count] = {}

    def of(self, *values: str) -> Count:
        """The one of these label values; shown from now on."""
        count = self._counts.get(values)
        if count is None:
            if len(values) != len(self._labels):
                raise ValueError(f"{self._name} has the labels {self._labels}, got {values}")
            count = self._counts[values] = Count()
        return count

    def describe(self) -> Iterator[Metric]:
        """Names the metric without reading it."""
        yield CounterMetricFamily(self._name, self._text, labels=self._labels)

    def collect(self) -> Iterator[Metric]:
        """What was counted; on any thread."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, count in list(self._counts.items()):
            family.add_metric(values, count.value)
        yield family


class Distribution(Collector):
    """A histogram. `buckets` are upper bounds, ascending, without infinity."""

    def __init__(self, name: str, text: str, buckets: Sequence[float]) -> None:
        self._name, self._text = name, text
        self._bounds = tuple(float(bound) for bound in buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """One more value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def describe(self) -> Iterator[Metric]:
        """Names the metric without reading it."""
        yield HistogramMetricFamily(self._name, self._text)

    def collect(self) -> Iterator[Metric]:
        """What was observed; on any thread."""
        below, buckets = 0, []
        for bound, count in zip((*self._bounds, float("inf")), list(self._counts), strict=True):
            below += count
            buckets.append((floatToGoString(bound), below))  # type: ignore[no-untyped-call]
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)
