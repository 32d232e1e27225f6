"""How both clients connect."""

from __future__ import annotations

from shoal.inference.v1.inference_service_pb2 import GenerateStreamResponse

DEFAULT_TIMEOUT_S = 600.0
OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", 16 * 1024 * 1024),
    ("grpc.max_send_message_length", 16 * 1024 * 1024),
    # A lost server is noticed in 15 s, not in TCP's quarter of an hour.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
]


def metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """What goes along with each call."""
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


def is_news(event: GenerateStreamResponse) -> bool:
    """It says something of the answer: neither a sign of life nor what a newer server may send."""
    return event.WhichOneof("event") not in (None, "progress")
