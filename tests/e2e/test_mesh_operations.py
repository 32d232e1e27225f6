"""What operators look at: reflection, health, metrics and traces of every process."""

from __future__ import annotations

import secrets
import urllib.request

import grpc
import httpx
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from shoal.inference.v1.inference_service_pb2 import GenerateRequest
from shoal.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from shoal_client import Client, SamplingParams, generation
from support.collector import Collector
from support.mesh import Mesh, wait_for
from support.worker_pair import prompt_of

pytestmark = pytest.mark.timeout(120)

SERVICES = {
    "gateway": {"shoal.inference.v1.InferenceService"},
    "scheduler": {"shoal.scheduler.v1.SchedulerService"},
    "prefill_worker": {"shoal.prefill.v1.PrefillService", "shoal.common.v1.KvTransportService"},
    "decode_worker": {"shoal.decode.v1.DecodeService"},
    "kv_cache": {"shoal.kv_cache.v1.KvCacheService", "shoal.common.v1.KvTransportService"},
}
EVERYWHERE = {"shoal.admin.v1.AdminService", "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
DIRECT = {"shoal.common.v1.DirectService"}
"""Where only other services call."""


class Reflection:
    """Walks a server's descriptors as grpcurl does."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub = reflection_pb2_grpc.ServerReflectionStub(channel)

    def services(self) -> set[str]:
        answer = self._ask(reflection_pb2.ServerReflectionRequest(list_services=""))
        return {one.name for one in answer.list_services_response.service}

    def files(self, symbol: str) -> dict[str, FileDescriptorProto]:
        """The file of a symbol and all that it imports."""
        found: dict[str, FileDescriptorProto] = {}
        requests = [reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol)]
        while requests:
            answer = self._ask(requests.pop())
            for raw in answer.file_descriptor_response.file_descriptor_proto:
                file = FileDescriptorProto.FromString(raw)
                found[file.name] = file
                missing = [name for name in file.dependency if name not in found]
                requests += [reflection_pb2.ServerReflectionRequest(file_by_filename=name) for name in missing]
        return found

    def _ask(self, request: reflection_pb2.ServerReflectionRequest) -> reflection_pb2.ServerReflectionResponse:
        [answer] = self._stub.ServerReflectionInfo(iter([request]), timeout=10)
        assert not answer.HasField("error_response"), answer.error_response
        return answer


@pytest.mark.parametrize("name", SERVICES)
def test_reflection_tells_every_method_and_every_message_of_a_process(whole: Mesh, name: str) -> None:
    with grpc.insecure_channel(whole[name].address) as channel:
        reflection = Reflection(channel)
        assert reflection.services() == SERVICES[name] | EVERYWHERE | (set() if name == "gateway" else DIRECT)
        for service in SERVICES[name] | {"shoal.admin.v1.AdminService"}:
            files = reflection.files(service)
            messages = {f".{file.package}.{one.name}" for file in files.values() for one in file.message_type}
            methods = [m for file in files.values() for one in file.service for m in one.method]
            assert methods
            assert {kind for m in methods for kind in (m.input_type, m.output_type)} <= messages


@pytest.mark.parametrize("name", SERVICES)
def test_health_tells_of_the_process_and_of_each_service_and_knows_no_others(whole: Mesh, name: str) -> None:
    with grpc.insecure_channel(whole[name].address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", *SERVICES[name]):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as raised:
            health.Check(health_pb2.HealthCheckRequest(service="shoal.unknown.v1.UnknownService"), timeout=5)
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("name", SERVICES)
def test_the_admin_port_shows_metrics_and_health(whole: Mesh, name: str) -> None:
    for path in ("healthz", "readyz", "metrics"):
        with urllib.request.urlopen(f"http://{whole[name].admin}/{path}", timeout=5) as answer:
            body = answer.read().decode()
    assert f'service="{name}"' in body
    assert "shoal_rpc_server_duration_seconds" in body


@pytest.mark.parametrize("edge", ["grpc", "http"])
def test_one_request_is_one_trace_through_all_five_services(
    whole: Mesh, client: Client, collector: Collector, edge: str
) -> None:
    trace_id = secrets.token_hex(16)
    traceparent = f"00-{trace_id}-{secrets.token_hex(8)}-01"
    # Long enough for a remote prefill, with blocks to look up and to store.
    ids, user_id = prompt_of(400, seed=90), secrets.token_hex(8)
    if edge == "grpc":
        asked = generation(ids, sampling=SamplingParams(max_tokens=4, ignore_eos=True), user_id=user_id)
        with grpc.insecure_channel(whole.grpc) as channel:
            stub = InferenceServiceStub(channel)
            stub.Generate(GenerateRequest(generation=asked), timeout=30, metadata=(("traceparent", traceparent),))
    else:
        messages = [{"role": "user", "content": "the cat and the dog; " * 20}]
        body = {"model": "deepseek-flash", "messages": messages, "max_tokens": 4, "user_id": user_id}
        headers = {"traceparent": traceparent}
        httpx.post(f"{whole.http}/v1/chat/completions", json=body, headers=headers, timeout=30).raise_for_status()
    wanted = {f"shoal-{name}" for name in SERVICES}
    wait_for(
        lambda: collector.services_of(trace_id) == wanted,
        what=lambda: f"a span of each service, got {collector.services_of(trace_id)}",
    )
