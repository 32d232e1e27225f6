"""Traces (OpenTelemetry) and metrics (Prometheus) of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from opentelemetry import context as otel_context
from opentelemetry import propagate, trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from shoal_common.tallies import Counts, Distribution

SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 40.96)
"""Doublings from 10 ms to 41 s, finer below: the defaults of the libraries put every decode step into one bucket."""
TOKEN_BUCKETS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576)
"""Powers of four, as the GenAI conventions recommend."""
NAMESPACE = "shoal"
TRACER = trace.get_tracer("shoal")
_TRACE_KEY, _STATE_KEY = "traceparent", "tracestate"
_is_exporting = False
TRACE_KEYS = (_TRACE_KEY, _STATE_KEY)
"""All that is taken of the context of a caller from outside."""


class Metrics:
    """The metrics of one process, in a registry of their own. Names get the prefix `shoal_` unless they hold a colon.

    A name carries its unit (`ttft_seconds`), labels are few and never ids. A second metric of a name raises ValueError.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        """A number that only grows; `_total` is appended when it is shown."""
        return Counter(_full(name), text, labels, registry=self._registry)

    def gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        """A number that goes up and down."""
        return Gauge(_full(name), text, labels, registry=self._registry)

    def histogram(
        self, name: str, text: str, labels: Sequence[str] = (), buckets: Sequence[float] = SECONDS_BUCKETS
    ) -> Histogram:
        """A distribution; the buckets suit seconds unless others are given."""
        return Histogram(_full(name), text, labels, buckets=buckets, registry=self._registry)

    def counts(self, name: str, text: str, labels: Sequence[str] = ()) -> Counts:
        """As `counter`, of what one event loop counts often."""
        made = Counts(_full(name), text, labels)
        self._registry.register(made)
        return made

    def distribution(self, name: str, text: str, buckets: Sequence[float] = SECONDS_BUCKETS) -> Distribution:
        """As `histogram`, of what one event loop observes often."""
        made = Distribution(_full(name), text, buckets)
        self._registry.register(made)
        return made

    def observe(
        self, name: str, text: str, read: Callable[[], float], *, kind: Literal["counter", "gauge"] = "gauge"
    ) -> None:
        """A number that lives elsewhere: `read` is called at each scrape, on the admin thread."""
        self._registry.register(_Observed(_full(name), text, read, kind))

    def info(self, name: str, text: str, values: Mapping[str, str]) -> None:
        """A constant 1 whose labels say what runs here."""
        Info(_full(name), text, registry=self._registry).info(dict(values))

    def render(self) -> bytes:
        """All metrics in Prometheus' text format. May be called from any thread."""
        return generate_latest(self._registry)


class _Observed(Collector):
    def __init__(self, name: str, text: str, read: Callable[[], float], kind: Literal["counter", "gauge"]) -> None:
        self._name, self._text, self._read = name, text, read
        self._family = CounterMetricFamily if kind == "counter" else GaugeMetricFamily

    def describe(self) -> Iterator[Metric]:
        """Names the metric without reading it."""
        yield self._family(self._name, self._text)

    def collect(self) -> Iterator[Metric]:
        """Reads it."""
        yield self._family(self._name, self._text, value=self._read())


def _full(name: str) -> str:
    return name if ":" in name else f"{NAMESPACE}_{name}"


def configure_tracing(*, service: str, instance: str, otlp_endpoint: str | None) -> TracerProvider:
    """Install the process's tracer. Without an endpoint spans may get ids, for logs and propagation; none is recorded.

    The sampling decision of a caller is followed. Call once; `shutdown()` of the result flushes.
    """
    global _is_exporting
    _is_exporting = bool(otlp_endpoint)
    resource = Resource.create({"service.name": f"shoal-{service}", "service.instance.id": instance})
    sampler = ParentBased(ALWAYS_ON if otlp_endpoint else ALWAYS_OFF)
    provider = TracerProvider(resource=resource, sampler=sampler, shutdown_on_exit=False)
    if otlp_endpoint:
        # Costs 0.2 s and 10 MiB, so only those who export pay.
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=otlp_endpoint)))
    trace.set_tracer_provider(provider)
    return provider


def inject() -> dict[str, str]:
    """Headers (`traceparent`, ...) that carry the current trace context to another process."""
    span = trace.get_current_span().get_span_context()
    if not span.is_valid:
        return {}
    headers = {_TRACE_KEY: f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"}
    if span.trace_state:
        headers[_STATE_KEY] = span.trace_state.to_header()
    return headers


def may_record(headers: Mapping[str, str]) -> bool:
    """Whether anybody may ever see a span of a call with these headers. For calls too short to make one for nobody."""
    return _is_exporting and not headers.get(_TRACE_KEY, "").endswith("-00")


def extract(headers: Mapping[str, str]) -> otel_context.Context:
    """The trace context that `inject` put into headers; an empty one if there is none."""
    return propagate.extract(headers)


def follow(headers: Mapping[str, str]) -> None:
    """What the running task logs and calls belongs to the caller's trace from now on, if there is one.

    For work whose span nobody may see, at a fraction of a span's cost. The task's context ends with it.
    """
    if headers.get(_TRACE_KEY):
        # Their span and nothing else: baggage is not passed on.
        otel_context.attach(trace.set_span_in_context(trace.get_current_span(extract(headers))))
