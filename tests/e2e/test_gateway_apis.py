"""Anthropic Messages and Responses over HTTP: shapes, what is refused and how, what a failing stream says."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.gateway_mesh import GatewayMesh, gateway_mesh

MODEL = "deepseek-flash"
MESSAGE: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Hello"}],
    "thinking": {"type": "disabled"},
    "max_tokens": 12,
    "shoal": {"seed": 5, "ignore_eos": True},
}
RESPONSE: dict[str, Any] = {
    "model": MODEL,
    "input": "Hello",
    "reasoning": {"effort": "none"},
    "max_output_tokens": 12,
    "shoal": {"seed": 5, "ignore_eos": True},
}
CHAT = {**MESSAGE, "shoal": MESSAGE["shoal"]}
SCHEMA = {"type": "object", "properties": {"K": {"type": "string"}}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
LOOP = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {"K": "v"}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "r"}]},
]
BASES = ("/v1/messages", "/messages", "/anthropic/v1/messages")


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayMesh]:
    settings = {"SHOAL_GATEWAY_KEEP_ALIVE_S": "0.2", "SHOAL_GATEWAY_ADMISSION_S": "0.2"}
    with gateway_mesh(tmp_path_factory.mktemp("mesh"), gateway=settings) as made:
        yield made


@pytest.fixture
def http(mesh: GatewayMesh) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{mesh.http}", timeout=20) as client:
        yield client


def events(text: str) -> list[tuple[str, Any]]:
    read = []
    for one in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in one.split("\n") if line)
        if "data" in fields:
            read.append((fields["event"], json.loads(fields["data"])))
    return read


@pytest.mark.parametrize("path", BASES)
def test_messages_are_answered_at_every_base(http: httpx.Client, path: str) -> None:
    answer = http.post(path, json=MESSAGE)
    assert answer.status_code == 200, answer.text
    message = answer.json()
    (block,) = message["content"]
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", MODEL)
    assert (block["type"], message["stop_reason"], message["stop_sequence"]) == ("text", "max_tokens", None)
    usage = message["usage"]
    assert usage["output_tokens"] == 12
    assert message["shoal"]["seed"] == 5
    counted = http.post(f"{path}/count_tokens", json={key: MESSAGE[key] for key in ("model", "messages", "thinking")})
    assert counted.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    read = events(http.post(path, json={**MESSAGE, "stream": True}).text)
    assert "".join(one["delta"].get("text", "") for name, one in read if name == "content_block_delta") == block["text"]
    assert read[-2][1]["usage"]["output_tokens"] == 12
    assert read[-1] == ("message_stop", {"type": "message_stop"})


def test_all_apis_give_the_same_text_for_the_same_seed(http: httpx.Client) -> None:
    chat = http.post("/v1/chat/completions", json=CHAT).json()["choices"][0]["message"]["content"]
    assert http.post("/v1/messages", json=MESSAGE).json()["content"][0]["text"] == chat
    assert http.post("/v1/responses", json=RESPONSE).json()["output"][0]["content"][0]["text"] == chat


def test_thinking_comes_as_a_block_of_its_own(http: httpx.Client) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    message = http.post("/v1/messages", json={**MESSAGE, "thinking": thinking}).json()
    (block,) = message["content"]
    assert (block["type"], block["signature"]) == ("thinking", message["id"])
    assert block["thinking"]


def test_an_effort_may_be_a_number(http: httpx.Client) -> None:
    def count(**fields: Any) -> int:
        body = {"model": MODEL, "messages": MESSAGE["messages"], **fields}
        counted: int = http.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]
        return counted

    assert count(output_config={"effort": 75}) == count(output_config={"effort": "high"}) == count()
    assert count(thinking={"type": "disabled"}) < count()
    body = {**RESPONSE, "reasoning": {"effort": 30}}
    assert http.post("/v1/responses", json=body).json()["reasoning"]["effort"] == 30


def test_a_stop_sequence_is_named(http: httpx.Client) -> None:
    text = http.post("/v1/messages", json={**MESSAGE, "max_tokens": 60}).json()["content"][0]["text"]
    stop = text[20:23]
    body = {**MESSAGE, "max_tokens": 60, "stop_sequences": ["never in there", stop]}
    message = http.post("/v1/messages", json=body).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)
    assert message["content"][0]["text"] == text[: text.index(stop)]


def test_names_of_claude_mean_the_one_model(http: httpx.Client) -> None:
    assert http.post("/anthropic/v1/messages", json={**MESSAGE, "model": "claude-x-5"}).json()["model"] == MODEL
    answer = http.post("/anthropic/v1/messages", json={**MESSAGE, "model": "gpt-5"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "model_not_found")


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"model": None}, "invalid_argument", "model"),
        ({"max_tokens": 0}, "invalid_argument", "max_tokens"),
        ({"max_tokens": -1}, "invalid_argument", "max_tokens"),
        ({"max_tokens": 4096}, "context_length_exceeded", "max_tokens"),
        ({"messages": []}, "invalid_argument", "messages"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "images_unsupported", "messages[0].content[0]"),
        ({"metadata": {"user_id": "x" * 513}}, "invalid_argument", "metadata.user_id"),
        ({"output_config": {"effort": 0}}, "invalid_argument", "output_config.effort"),
        ({"top_k": "many"}, "invalid_argument", "top_k"),
        ({"shoal": {"unknown": 1}}, "unknown_field", "shoal.unknown"),
        (
            {"tools": [{"name": "f", "input_schema": SCHEMA}], "messages": LOOP, "thinking": None},
            "invalid_argument",
            "messages[",
        ),
        (
            {"tools": [{"name": "f", "input_schema": {**SCHEMA, "$defs": {"n": {"odd": 1}}}, "strict": True}]},
            "constraint_invalid",
            "tools[0].input_schema",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_messages_get_anthropics_error(
    http: httpx.Client, change: dict[str, Any], code: str, param: str | None, stream: bool
) -> None:
    body = {key: value for key, value in {**MESSAGE, **change, "stream": stream}.items() if value is not None}
    answer = http.post("/v1/messages", json=body)
    assert answer.status_code == 400, answer.text
    said = answer.json()
    assert sorted(said) == ["error", "request_id", "type"]
    assert (said["type"], said["error"]["type"], said["error"]["code"]) == ("error", "invalid_request_error", code)
    assert (said["error"]["param"] or "").startswith(param or "")


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"model": "nobody"}, 404, "model_not_found"),
        ({"max_output_tokens": 0}, 400, "invalid_argument"),
        ({"max_output_tokens": 4096}, 400, "context_length_exceeded"),
        ({"previous_response_id": "resp_1"}, 400, "not_stored"),
        ({"conversation": "conv_1"}, 400, "not_stored"),
        ({"background": True}, 400, "not_stored"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, 400, "not_stored"),
        ({"input": []}, 400, "invalid_argument"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, 400, "files_unsupported"),
        (
            {
                "input": [
                    {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA"}]}
                ]
            },
            400,
            "images_unsupported",
        ),
        ({"reasoning": {"effort": 101}}, 400, "invalid_argument"),
        ({"metadata": {"a": 1}}, 400, "invalid_argument"),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object", "mystery": 1}}}},
            400,
            "constraint_invalid",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_responses_get_openais_error(
    http: httpx.Client, change: dict[str, Any], status: int, code: str, stream: bool
) -> None:
    answer = http.post("/v1/responses", json={**RESPONSE, **change, "stream": stream})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == (code, "invalid_request_error")


@pytest.mark.parametrize("path", ["/v1/responses", "/responses"])
def test_responses_are_answered_with_what_was_asked(http: httpx.Client, path: str) -> None:
    answer = http.post(path, json={**RESPONSE, "metadata": {"a": "b"}, "store": True}).json()
    assert (answer["object"], answer["status"], answer["store"]) == ("response", "incomplete", False)
    assert (answer["incomplete_details"], answer["metadata"]) == ({"reason": "max_output_tokens"}, {"a": "b"})
    assert (answer["usage"]["output_tokens"], answer["shoal"]["seed"]) == (12, 5)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("POST", "/v1/messages", 400), ("POST", "/v1/completions", 400), ("GET", "/v1/models", 200), ("GET", "/no", 404)],
)
def test_every_response_has_a_name(http: httpx.Client, method: str, path: str, status: int) -> None:
    answers = [http.request(method, path, json={}) for _ in range(2)]
    names = [answer.headers["x-request-id"] for answer in answers]
    assert [answer.status_code for answer in answers] == [status, status]
    assert [answer.headers["request-id"] for answer in answers] == names
    assert len(set(names)) == 2
    if path == "/v1/messages":
        assert [answer.json()["request_id"] for answer in answers] == names


def test_the_openai_package_streams_a_response(mesh: GatewayMesh) -> None:
    client = openai.OpenAI(base_url=mesh.url, api_key="none", max_retries=0, timeout=20)
    own = {"shoal": RESPONSE["shoal"]}
    create: Any = client.responses.create
    known = {key: value for key, value in RESPONSE.items() if key != "shoal"}
    whole = create(**known, extra_body=own)
    read = list(create(**known, extra_body=own, stream=True))
    assert "".join(one.delta for one in read if one.type == "response.output_text.delta") == whole.output_text
    assert [one.sequence_number for one in read] == list(range(len(read)))
    assert read[-1].type == "response.incomplete"
    assert read[-1].response.usage == whole.usage


def test_a_silence_is_filled_and_the_end_of_patience_told_of(tmp_path: Path) -> None:
    rank = {"SHOAL_MOCK_RANK_MS_PER_TOKEN": "5"}
    gateway = {
        "SHOAL_GATEWAY_KEEP_ALIVE_S": "0.1",
        "SHOAL_GATEWAY_ADMISSION_S": "0.1",
        "SHOAL_GATEWAY_REQUEST_TIMEOUT_S": "1.5",
    }
    bodies = {
        "/v1/messages": {**MESSAGE, "stream": True, "max_tokens": 3000},
        "/v1/responses": {**RESPONSE, "stream": True, "max_output_tokens": 3000},
        "/messages": {**MESSAGE, "max_tokens": 3000},
    }
    with gateway_mesh(tmp_path, rank=rank, gateway=gateway) as mesh:

        def read(path: str) -> str:
            text = ""
            with httpx.stream("POST", f"http://{mesh.http}{path}", json=bodies[path], timeout=20) as answer:
                for piece in answer.iter_text():
                    if "_delta" in piece or ".delta" in piece:
                        mesh.ranks[0].popen.send_signal(signal.SIGSTOP)
                    text += piece
            return text

        try:
            with ThreadPoolExecutor(3) as clients:
                message, response, whole = clients.map(read, bodies)
        finally:
            mesh.ranks[0].popen.send_signal(signal.SIGCONT)
    name, last = events(message)[-1]
    assert message.count('event: ping\ndata: {"type":"ping"}\n\n') >= 4
    assert (name, last["error"]["code"]) == ("error", "deadline_exceeded")
    assert last["request_id"]
    name, last = events(response)[-1]
    assert response.count(": keep-alive\n\n") >= 4
    assert (name, last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "deadline_exceeded"
    assert len(whole) - len(whole.lstrip("\n")) >= 4
    assert json.loads(whole)["error"]["code"] == "deadline_exceeded"


junk = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)
OTHERS = ["tools", "tool_choice", "stream", "system", "stop_sequences", "metadata", "output_config", "top_k", "text"]
OTHERS += ["instructions", "include", "previous_response_id", "background", "parallel_tool_calls"]


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(st.sampled_from([*MESSAGE, *RESPONSE, *OTHERS]), junk, max_size=4), junk)
def test_junk_is_never_the_servers_fault(http: httpx.Client, fields: dict[str, Any], one: Any) -> None:
    bodies = {
        "/v1/messages": {**MESSAGE, "max_tokens": 1, "messages": [one], **fields},
        "/v1/messages/count_tokens": {**MESSAGE, "system": one, **fields},
        "/v1/responses": {**RESPONSE, "max_output_tokens": 1, "input": [one], **fields},
    }
    for path, body in bodies.items():
        answer = http.post(path, content=json.dumps(body).encode())
        assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text
        assert answer.status_code == 200 or answer.json()["error"]["code"]
