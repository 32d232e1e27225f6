"""Spans reach an OTLP collector when an endpoint is configured."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as rpc

TESTS = Path(__file__).resolve().parents[2]


class Collector(rpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.requests: queue.Queue[pb.ExportTraceServiceRequest] = queue.Queue()

    def Export(self, request: pb.ExportTraceServiceRequest, context: Any) -> pb.ExportTraceServiceResponse:
        self.requests.put(request)
        return pb.ExportTraceServiceResponse()


@pytest.fixture
def collector() -> Iterator[tuple[str, Collector]]:
    servicer = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    rpc.add_TraceServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"http://127.0.0.1:{port}", servicer
    server.stop(0)


def test_a_call_is_a_span_of_the_callers_trace(collector: tuple[str, Collector]) -> None:
    endpoint, servicer = collector
    environment = {
        **os.environ, "PYTHONPATH": str(TESTS), "SHOAL_NATS_URL": "off", "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "support.tiny_service"], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        ready = json.loads(process.stdout.readline())
        with grpc.insecure_channel(ready["address"]) as channel:
            traceparent = f"00-{0xABC:032x}-{0xDEF:016x}-01"
            stub = health_pb2_grpc.HealthStub(channel)
            stub.Check(health_pb2.HealthCheckRequest(), timeout=10, metadata=(("traceparent", traceparent),))
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    exported = servicer.requests.get(timeout=10).resource_spans[0]
    (span,) = exported.scope_spans[0].spans
    assert span.name == "grpc.health.v1.Health/Check"
    assert (int.from_bytes(span.trace_id), int.from_bytes(span.parent_span_id)) == (0xABC, 0xDEF)
    attributes = {one.key: one.value.string_value for one in exported.resource.attributes}
    assert attributes["service.name"] == "shoal-tiny"
