"""What the gateway counts."""

from __future__ import annotations

from shoal_common.telemetry import TOKEN_BUCKETS, Metrics


class GatewayMetrics:
    """Metrics of requests, whatever API shape they came by."""

    def __init__(self, metrics: Metrics) -> None:
        self.requests = metrics.counts("requests", "Requests ended, by how", ("outcome",))
        self.in_flight = metrics.gauge("in_flight_requests", "Requests accepted and not ended")
        self.ttft = metrics.distribution("ttft_seconds", "From the acceptance of a request to its first output")
        self.duration = metrics.distribution("request_duration_seconds", "From the acceptance of a request to its end")
        self.prompt_tokens = metrics.distribution("prompt_tokens", "Prompt tokens per request", buckets=TOKEN_BUCKETS)
        self.output_tokens = metrics.counts("output_tokens", "Output tokens of ended requests").of()
        self.cached_tokens = metrics.counts("cached_prompt_tokens", "Prompt tokens loaded from the KV cache").of()
        self.refused_attempts = metrics.counter(
            "refused_attempts", "Placements that a worker did not take", ("reason",)
        )
        self.moves = metrics.counter("moved_requests", "Running answers that went on at another worker", ("cause",))
        self.slow_readers = metrics.counter("slow_readers_cut", "Clients cut because they did not read")
