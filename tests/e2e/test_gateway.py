"""The gateway as a real process, asked as its users ask: the openai package, raw HTTP, gRPC with reflection."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shoal.admin.v1 import admin_service_pb2 as admin
from shoal.admin.v1 import admin_service_pb2_grpc as admin_rpc
from shoal_client import Client, InvalidRequest, ModelNotFound, OutputForm, SamplingParams, Text, generation
from support.gateway_mesh import GatewayMesh, gateway_mesh

MODEL = "deepseek-flash"
PLAIN: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Hello"}],
    "thinking": {"type": "disabled"},
    "max_tokens": 12,
    "seed": 5,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayMesh]:
    with gateway_mesh(tmp_path_factory.mktemp("mesh"), gateway={"SHOAL_GATEWAY_KEEP_ALIVE_S": "0.2"}) as made:
        yield made


@pytest.fixture
def http(mesh: GatewayMesh) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{mesh.http}", timeout=20) as client:
        yield client


@pytest.fixture
def client(mesh: GatewayMesh) -> openai.OpenAI:
    return openai.OpenAI(base_url=mesh.url, api_key="none", max_retries=0, timeout=20)


def rank_numbers(mesh: GatewayMesh) -> dict[str, float]:
    with grpc.insecure_channel(mesh.ranks[0].address) as channel:
        stub: Any = admin_rpc.AdminServiceStub(channel)
        return dict(stub.GetStatus(admin.GetStatusRequest(), timeout=5).numbers)


def wait_for(condition: Any, what: str, timeout_s: float = 10.0) -> None:
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up, f"{what} did not come true"
        time.sleep(0.01)


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    known = {key: fields.pop(key) for key in ("stream", "stream_options", "n", "tools", "stop") if key in fields}
    body = {**PLAIN, **fields}
    own = {key: body.pop(key) for key in ("thinking", "ignore_eos", "shoal") if key in body}
    return client.chat.completions.create(**body, **known, extra_body=own)


def events(text: str) -> list[Any]:
    lines = [one.removeprefix("data: ") for one in text.split("\n\n") if one.startswith("data: ")]
    return [one if one == "[DONE]" else json.loads(one) for one in lines]


def test_an_answer_has_the_shape_that_the_openai_package_reads(client: openai.OpenAI) -> None:
    answer = chat(client)
    choice = answer.choices[0]
    assert (answer.object, answer.model, choice.finish_reason, choice.message.role) == (
        "chat.completion",
        MODEL,
        "length",
        "assistant",
    )
    assert choice.message.content
    usage = answer.usage
    assert (usage.completion_tokens, usage.total_tokens) == (12, usage.prompt_tokens + 12)
    assert usage.prompt_cache_hit_tokens + usage.prompt_cache_miss_tokens == usage.prompt_tokens
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_cache_hit_tokens
    assert answer.shoal["seed"] == 5
    assert answer.shoal["applied"]["max_tokens"] == 12


def test_streamed_and_whole_answers_are_the_same(client: openai.OpenAI) -> None:
    whole = chat(client, n=3)
    said = {0: "", 1: "", 2: ""}
    ends = {}
    for chunk in chat(client, n=3, stream=True):
        for choice in chunk.choices:
            said[choice.index] += choice.delta.content or ""
            ends[choice.index] = choice.finish_reason
    assert said == {choice.index: choice.message.content for choice in whole.choices}
    assert ends == {0: "length", 1: "length", 2: "length"}
    assert len(set(said.values())) == 3


def test_a_stream_has_the_chunks_of_the_protocol(http: httpx.Client) -> None:
    body = {**PLAIN, "stream": True, "stream_options": {"include_usage": True}}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, tail, done = events(answer.text)
    assert done == "[DONE]"
    assert {(one["id"], one["created"], one["object"], one["model"]) for one in [*chunks, tail]} == {
        (chunks[0]["id"], chunks[0]["created"], "chat.completion.chunk", MODEL)
    }
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in one["choices"][0]["delta"] for one in chunks[1:])
    assert [one["choices"][0]["finish_reason"] for one in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert all(one["usage"] is None for one in chunks)
    assert (tail["choices"], tail["usage"]["completion_tokens"], tail["shoal"]["seed"]) == ([], 12, 5)


def test_without_include_usage_no_chunk_is_without_choices(http: httpx.Client) -> None:
    *chunks, done = events(http.post("/chat/completions", json={**PLAIN, "stream": True}).text)
    assert done == "[DONE]"
    assert all(one["choices"] for one in chunks)


def test_a_drawn_seed_replays_the_answer(client: openai.OpenAI) -> None:
    first = chat(client, seed=None)
    again = chat(client, seed=first.shoal["seed"])
    assert again.choices[0].message.content == first.choices[0].message.content
    assert chat(client, seed=None).shoal["seed"] != first.shoal["seed"]


def test_thinking_goes_into_reasoning_content(client: openai.OpenAI) -> None:
    message = chat(client, thinking={"type": "enabled"}).choices[0].message
    assert message.reasoning_content
    assert not message.content


def test_a_stop_string_ends_the_answer_before_it(mesh: GatewayMesh, client: openai.OpenAI) -> None:
    text = chat(client, max_tokens=60).choices[0].message.content
    stop = text[20:23]
    answer = chat(client, max_tokens=60, stop=[stop])
    assert answer.choices[0].message.content == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens < 60
    streamed = chat(client, max_tokens=60, stop=[stop], stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == text[: text.index(stop)]
    wait_for(lambda: rank_numbers(mesh)["open_requests"] == 0, "the rank's end of the request")


def test_models_and_tokens_are_listed(client: openai.OpenAI, http: httpx.Client) -> None:
    assert MODEL in [one.id for one in client.models.list()]
    assert client.models.retrieve("deepseek-chat").object == "model"
    text = "naïve 🙂"
    ids = http.post("/tokenize", json={"prompt": text}).json()
    assert ids["tokens"][0] == 0
    assert http.post("/detokenize", json={"tokens": ids["tokens"][1:]}).json() == {"prompt": text}
    rendered = http.post("/v1/tokenize", json={"messages": PLAIN["messages"]}).json()
    assert rendered["count"] == len(rendered["tokens"]) > 5


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"model": "nobody"}, 404, "model_not_found"),
        ({"messages": []}, 400, "invalid_argument"),
        ({"max_tokens": 0}, 400, "invalid_argument"),
        ({"max_tokens": 10**9}, 400, "invalid_argument"),
        ({"max_tokens": 4096}, 400, "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, 400, "context_length_exceeded"),
        ({"temperature": "hot"}, 400, "invalid_argument"),
        ({"shoal": {"stop_token_ids": [-1]}}, 400, "token_out_of_range"),
        ({"shoal": {"unknown": 1}}, 400, "unknown_field"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_input_is_a_client_error_with_a_stable_code(
    http: httpx.Client, change: dict[str, Any], status: int, code: str, stream: bool
) -> None:
    answer = http.post("/v1/chat/completions", json={**PLAIN, **change, "stream": stream})
    assert answer.status_code == status
    error = answer.json()["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert (error["code"], error["type"]) == (code, "invalid_request_error")


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"3", b'{"model": "\xff"}', b"\x00", b'{"a":' * 2000, b'{"messages": NaN}']
)
def test_what_is_no_json_object_is_a_client_error(http: httpx.Client, raw: bytes) -> None:
    answer = http.post("/v1/chat/completions", content=raw)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


junk = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(st.sampled_from([*PLAIN, "n", "stop", "tools", "shoal", "stream", "logprobs"]), junk), junk)
def test_junk_is_never_the_servers_fault(http: httpx.Client, fields: dict[str, Any], message: Any) -> None:
    body = {**PLAIN, "max_tokens": 1, "messages": [message], **fields}
    raw = json.dumps(body, ensure_ascii=True).encode()
    answer = http.post("/v1/chat/completions", content=raw)
    assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text
    assert answer.status_code == 200 or answer.json()["error"]["code"]


def test_paths_and_methods_that_do_not_exist_say_so(http: httpx.Client) -> None:
    assert http.get("/nothing").json()["error"]["code"] == "not_found"
    answer = http.get("/v1/chat/completions")
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")
    assert http.get("/v1/models/nobody").status_code == 404


def test_head_is_answered_as_get_without_the_body(http: httpx.Client) -> None:
    for path in ("/healthz", "/v1/readyz", "/models", "/v1/models/deepseek-flash", "/models/nobody", "/openapi.json"):
        whole, head = http.get(path), http.head(path)
        assert (head.status_code, head.content) == (whole.status_code, b"")
        assert head.headers["content-length"] == str(len(whole.content))
        assert head.headers["content-type"] == whole.headers["content-type"]


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("HEAD", "/v1/messages", "POST"),
        ("GET", "/tokenize", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("DELETE", "/openapi.json", "GET, HEAD"),
        ("OPTIONS", "/chat/completions", "POST"),
    ],
)
def test_a_405_says_which_methods_are_served(http: httpx.Client, method: str, path: str, allow: str) -> None:
    answer = http.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allow)
    assert method == "HEAD" or answer.json()["error"]["code"] == "method_not_allowed"


def test_a_body_over_the_limit_is_refused_before_it_is_read(mesh: GatewayMesh) -> None:
    host, _, port = mesh.http.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as raw:
        raw.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n{")
        assert raw.recv(4096).startswith(b"HTTP/1.1 413")


def test_a_head_over_the_limit_is_refused(mesh: GatewayMesh) -> None:
    host, _, port = mesh.http.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as raw:
        raw.sendall(b"GET /healthz HTTP/1.1\r\nx: " + b"y" * 100_000 + b"\r\n\r\n")
        assert raw.recv(4096).startswith(b"HTTP/1.1 431")
    with socket.create_connection((host, int(port)), timeout=10) as raw:
        raw.sendall(b"this is no HTTP\r\n\r\n")
        answer = raw.recv(4096)
        assert answer.startswith(b"HTTP/1.1 400")
        assert b'"code":"invalid_http"' in answer


def test_grpc_answers_in_tokens_and_in_text(mesh: GatewayMesh) -> None:
    params = SamplingParams(max_tokens=9, seed=4, ignore_eos=True, temperature=0.7)
    with Client(mesh.grpc) as client:
        by_tokens = client.generate(generation([5, 6, 7], sampling=params))
        assert len(by_tokens.choices[0].output.tokens.ids) == 9
        assert (by_tokens.head.seed, by_tokens.tail.usage.completion_tokens, by_tokens.tail.exact) == (4, 9, True)
        both = OutputForm.OUTPUT_FORM_TEXT_AND_TOKENS
        answer = client.generate(generation([5, 6, 7], sampling=params, output_form=both)).choices[0].output
        assert answer.tokens == by_tokens.choices[0].output.tokens
        streamed: dict[str, Any] = {"text": "", "ids": []}
        kinds = []
        for event in client.stream(generation([5, 6, 7], sampling=params, output_form=both)):
            kinds.append(event.WhichOneof("event"))
            piece = event.finish.output if event.HasField("finish") else event.delta
            streamed["text"] += piece.text
            streamed["ids"] += piece.tokens.ids
        assert (kinds[0], kinds[-2], kinds[-1]) == ("head", "finish", "tail")
        assert (streamed["text"], streamed["ids"]) == (answer.text, list(answer.tokens.ids))
        assert client.generate(generation(Text("once"), sampling=params)).choices[0].output.text
        assert client.generate(generation("Hello", sampling=params)).choices[0].output.reasoning_text
        (model,) = client.models()
        assert (model.id, model.vocab_size, model.max_context_tokens) == (MODEL, 512, 4096)


def test_the_client_of_the_readme_works(mesh: GatewayMesh) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (example,) = (block for block in re.findall(r"```python\n(.*?)```", readme, re.S) if "shoal_client" in block)
    assert len(example.strip().splitlines()) <= 12
    code = example.replace("127.0.0.1:8001", mesh.grpc)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"\[(\d+, ){15}\d+\] \d+\n$", ended.stdout)


def test_grpc_errors_have_a_reason(mesh: GatewayMesh) -> None:
    with Client(mesh.grpc) as client:
        with pytest.raises(InvalidRequest) as bad:
            client.generate(generation([5, 512]))
        assert bad.value.reason == "TOKEN_OUT_OF_RANGE"
        with pytest.raises(InvalidRequest) as long:
            list(client.stream(generation([5] * 4096)))
        assert long.value.reason == "CONTEXT_LENGTH_EXCEEDED"
        with pytest.raises(ModelNotFound):
            client.generate(generation([5], model="nobody"))


def test_reflection_tells_all_that_a_caller_needs(mesh: GatewayMesh) -> None:
    """As grpcurl does it: list the services, fetch the file of one, then every file that one imports."""
    with grpc.insecure_channel(mesh.grpc) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)

        def ask(**question: str) -> Any:
            requests = iter([reflection_pb2.ServerReflectionRequest(**question)])
            return next(stub.ServerReflectionInfo(requests, timeout=10))

        names = [one.name for one in ask(list_services="").list_services_response.service]
        assert {"shoal.inference.v1.InferenceService", "grpc.health.v1.Health", "shoal.admin.v1.AdminService"} <= {
            *names
        }
        seen: dict[str, descriptor_pb2.FileDescriptorProto] = {}
        answer = ask(file_containing_symbol="shoal.inference.v1.InferenceService")
        todo = list(answer.file_descriptor_response.file_descriptor_proto)
        while todo:
            file = descriptor_pb2.FileDescriptorProto.FromString(todo.pop())
            if file.name not in seen:
                seen[file.name] = file
                for name in file.dependency:
                    todo += ask(file_by_filename=name).file_descriptor_response.file_descriptor_proto
        methods = seen["shoal/inference/v1/inference_service.proto"].service[0].method
        assert [one.name for one in methods] == ["Generate", "GenerateStream", "ListModels"]


def test_a_client_that_knows_the_interface_by_reflection_only_gets_answers_and_errors(mesh: GatewayMesh) -> None:
    """By `buf curl`, which walks the reflection as grpcurl does, then speaks JSON."""

    def curl(what: str, **body: Any) -> subprocess.CompletedProcess[str]:
        buf = str(Path(sys.executable).with_name("buf"))
        how = ["--protocol", "grpc", "--http2-prior-knowledge", "--data", json.dumps(body)]
        return subprocess.run(
            [buf, "curl", *how, f"http://{mesh.grpc}/{what}"], capture_output=True, text=True, timeout=30, check=False
        )

    wanted = {"text": "Hi", "sampling": {"max_tokens": 6, "seed": 3, "ignore_eos": True}, "output_form": 3}
    whole = json.loads(curl("shoal.inference.v1.InferenceService/Generate", generation=wanted).stdout)
    streamed = curl("shoal.inference.v1.InferenceService/GenerateStream", generation=wanted).stdout
    ids = [int(one) for part in re.findall(r'"ids": \[([^]]*)]', streamed) for one in part.split(",")]
    assert whole["choices"][0]["output"]["tokens"]["ids"] == ids
    assert len(ids) == whole["tail"]["usage"]["completionTokens"] == 6
    refused = curl("shoal.inference.v1.InferenceService/Generate", generation={**wanted, "n": 99})
    assert refused.returncode != 0
    assert json.loads(refused.stderr)["message"] == "generation.n: must be in [1, 8], got 99"
    health = curl("grpc.health.v1.Health/Check", service="shoal.inference.v1.InferenceService")
    assert json.loads(health.stdout) == {"status": "SERVING"}


def test_resident_memory_is_small(mesh: GatewayMesh, client: openai.OpenAI) -> None:
    for _ in range(20):
        chat(client)
    status = Path(f"/proc/{mesh.gateway.popen.pid}/status").read_text()
    match = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert match is not None
    assert int(match[1]) / 1024 <= 120


def test_an_occupied_port_is_one_line_and_status_2(mesh: GatewayMesh, tmp_path: Path) -> None:
    for name in ("--http-address", "--listen-address"):
        taken = mesh.http if name == "--http-address" else mesh.grpc
        arguments = ["--http-address", "127.0.0.1:0", "--listen-address", "127.0.0.1:0", name, taken]
        command = [
            sys.executable,
            "-m",
            "shoal_gateway",
            "--model",
            str(Path(__file__).parents[1] / "golden/data/tiny"),
        ]
        environment = {"SHOAL_NATS_URL": "off", "SHOAL_LOG_LEVEL": "ERROR", "PATH": ""}
        ended = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=30)
        assert ended.returncode == 2
        assert ended.stdout == ""
        # The core of gRPC may add a line of its own, with its usual head.
        lines = [line for line in ended.stderr.strip().splitlines() if not re.match(r"E\d{4} ", line)]
        assert len(lines) == 1
        assert taken in lines[0]
