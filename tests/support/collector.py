"""An OpenTelemetry collector that keeps the spans it gets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as rpc


@dataclass(frozen=True, slots=True)
class Span:
    """Of one operation: whose it is, its name and its trace."""

    service: str
    name: str
    trace_id: str


class Collector(rpc.TraceServiceServicer):
    """`spans` holds all that came, in order of arrival."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.endpoint = ""

    def Export(self, request: Any, context: Any) -> Any:
        """Keep the spans."""
        for group in request.resource_spans:
            names = {one.key: one.value.string_value for one in group.resource.attributes}
            for scope in group.scope_spans:
                self.spans += [Span(names["service.name"], one.name, one.trace_id.hex()) for one in scope.spans]
        return pb.ExportTraceServiceResponse()

    def services_of(self, trace_id: str) -> set[str]:
        """Which services have spans in a trace."""
        return {span.service for span in self.spans if span.trace_id == trace_id}


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens at `endpoint` inside the block."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(4))
    rpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield collector
    server.stop(0)
