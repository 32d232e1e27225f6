"""What the gateway counts."""

from __future__ import annotations

import functools

from shoal_common.telemetry import TOKEN_BUCKETS, Metrics


class GatewayMetrics:
    """Metrics of requests, whatever API shape they came by."""

    def __init__(self, metrics: Metrics) -> None:
        # A counter per outcome is looked up once.
        self.ended = functools.cache(metrics.counter("requests", "Requests ended, by how", ("outcome",)).labels)
        self.in_flight = metrics.gauge("in_flight_requests", "Requests accepted and not ended")
        self.ttft = metrics.histogram("ttft_seconds", "From the acceptance of a request to its first output")
        self.duration = metrics.histogram("request_duration_seconds", "From the acceptance of a request to its end")
        self.prompt_tokens = metrics.histogram("prompt_tokens", "Prompt tokens per request", buckets=TOKEN_BUCKETS)
        self.output_tokens = metrics.counter("output_tokens", "Output tokens of ended requests")
        self.cached_tokens = metrics.counter("cached_prompt_tokens", "Prompt tokens loaded from the KV cache")
        self.refused_attempts = metrics.counter(
            "refused_attempts", "Placements that a worker did not take", ("reason",)
        )
        self.moves = metrics.counter("moved_requests", "Running answers that went on at another worker", ("cause",))
        self.slow_readers = metrics.counter("slow_readers_cut", "Clients cut because they did not read")
