"""What a server takes of what its callers say of themselves: much inside of the mesh, little at its edge."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from opentelemetry import baggage, trace
from shoal.inference.v1 import inference_service_pb2 as pb
from shoal.inference.v1 import inference_service_pb2_grpc as rpc
from shoal_common.request_scope import REQUEST_ID_KEY, request_id
from shoal_common.rpc import Readiness, Service
from shoal_common.rpc.server import RpcServer
from shoal_common.telemetry import Metrics

TRACE = f"00-{0xABC:032x}-{0xDEF:016x}-01"
SAID = (("traceparent", TRACE), ("baggage", "tenant=boss,priority=9"), (REQUEST_ID_KEY, "of-their-choice"))


class Listener(rpc.InferenceServiceServicer):
    def __init__(self) -> None:
        self.heard: tuple[str, dict[str, object], int] | None = None

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        trace_id = trace.get_current_span().get_span_context().trace_id
        self.heard = (request_id.get(), dict(baggage.get_all()), trace_id)
        return pb.ListModelsResponse()


@pytest.mark.parametrize(
    ("is_edge", "heard"),
    [(True, ("", {}, 0xABC)), (False, ("of-their-choice", {}, 0xABC))],
)
async def test_at_the_edge_only_the_trace_goes_on(is_edge: bool, heard: tuple[str, dict[str, object], int]) -> None:
    listener = Listener()  # type: ignore[abstract]
    server = RpcServer(
        [Service("shoal.inference.v1.InferenceService", rpc.add_InferenceServiceServicer_to_server, listener)],
        listen_address="127.0.0.1:0",
        readiness=Readiness(),
        metrics=Metrics(),
        is_edge=is_edge,
    )
    address = await server.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            stub: Any = rpc.InferenceServiceStub(channel)
            await stub.ListModels(pb.ListModelsRequest(), metadata=SAID, timeout=10)
    finally:
        await server.stop(0)
    assert listener.heard == heard
