"""The OpenAPI document against the code: what is served, what is read within which bounds, what is answered."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from deepseek_recipe import Tokenizer
from shoal.common.v1 import sampling_pb2
from shoal.common.v1.tokens_pb2 import PositionLogprobs, TokenLogprob
from shoal_common.telemetry import Metrics
from shoal_gateway.completions import CompletionEncoder
from shoal_gateway.config import GatewayConfig
from shoal_gateway.dialect import CHAT_DIALECT, MESSAGES_DIALECT, RESPONSES_DIALECT
from shoal_gateway.edge.keys import secret_of
from shoal_gateway.encode import Encoder
from shoal_gateway.fields import Fields
from shoal_gateway.gateway import Gateway
from shoal_gateway.http.chat import Chat
from shoal_gateway.http.completions import Completions
from shoal_gateway.http.messages import Messages
from shoal_gateway.http.responses import Responses
from shoal_gateway.openapi.document import document
from shoal_gateway.output_reader import OutputReader
from shoal_gateway.refusals import NoCapacity
from shoal_gateway.responses_fields import echoed
from shoal_gateway.served_model import ServedModel

DOCUMENT = document()
SCHEMAS = DOCUMENT["components"]["schemas"]
SHOAL = {"stop_token_ids": [3], "bad_words": ["a", [5]], "forced_ids": [5]}
READS = ("integer", "number", "boolean", "text", "mapping", "items", "token_ids")


def schema_validator(schema: dict[str, Any]) -> Any:
    return jsonschema.Draft202012Validator({**schema, "components": {"schemas": SCHEMAS}})


def validator(name: str) -> Any:
    return schema_validator({"$ref": f"#/components/schemas/{name}"})


def position(token_id: int) -> PositionLogprobs:
    one = TokenLogprob(token_id=token_id, logprob=-0.5)
    return PositionLogprobs(emitted=one, top=[one])


def options(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A schema and whatever it may be instead."""
    if "$ref" in schema:
        schema = SCHEMAS[schema["$ref"].rpartition("/")[2]]
    yield schema
    for one in schema.get("anyOf", ()):
        yield from options(one)


def at(schema: dict[str, Any], path: str) -> list[dict[str, Any]]:
    """All that may stand at a path like a.b[0].c."""
    found = [schema]
    for step in re.findall(r"[^.\[\]]+|\[\d+\]", path):
        inner = []
        for one in (option for each in found for option in options(each)):
            if step.startswith("["):
                inner += [one["items"]] if "items" in one else []
            elif step in one.get("properties", {}):
                inner.append(one["properties"][step])
            elif isinstance(one.get("additionalProperties"), dict):
                inner.append(one["additionalProperties"])
        found = inner
    return [option for each in found for option in options(each)]


def says(schema: dict[str, Any], kind: str, arguments: tuple[Any, ...]) -> bool:
    """Whether a schema allows what this read allows."""
    types = schema.get("type", [])
    types = types if isinstance(types, list) else [types]
    if kind in ("integer", "number"):
        # Zero itself is refused after the read where it is an exclusive bound.
        least = schema.get("exclusiveMinimum", schema.get("minimum"))
        return kind in types and (least, schema.get("maximum")) == arguments
    if kind == "boolean":
        return "boolean" in types
    if kind == "text":
        return "enum" in schema or ("string" in types and schema.get("maxLength") == arguments[0])
    if kind == "mapping":
        return "object" in types
    if kind == "items":
        return "array" in types and schema.get("maxItems") == arguments[0]
    # Where the model's context is the bound, the document has none.
    return "array" in types and schema.get("maxItems") in (None, arguments[1])


# What is nowhere in these bodies, but read under the name that it has in a chat.
AS_IN_CHAT: dict[str, set[str]] = {
    "ChatRequest": set(),
    "CompletionRequest": {"max_completion_tokens", "parallel_tool_calls", "reasoning_effort"},
    "MessagesRequest": {
        *("n", "min_tokens", "max_tokens", "max_completion_tokens", "stream_options", "min_p", "presence_penalty"),
        *(
            "frequency_penalty",
            "repetition_penalty",
            "reasoning_effort",
            "parallel_tool_calls",
            "user_id",
            "logit_bias",
        ),
    },
}
AS_IN_CHAT["ResponsesRequest"] = AS_IN_CHAT["MessagesRequest"] | {"top_k"}


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, tuple[Any, ...]]]:
    """Every read of a field while a body is prepared: path, kind, bounds."""
    recorded: list[tuple[str, str, tuple[Any, ...]]] = []

    def recording(kind: str) -> Any:
        plain = getattr(Fields, kind)

        def read(self: Fields, key: str, *bounds: Any) -> Any:
            recorded.append((self.name(key), kind, bounds))
            return plain(self, key, *bounds)

        return read

    for kind in READS:
        monkeypatch.setattr(Fields, kind, recording(kind))
    return recorded


def test_every_schema_is_one_and_every_reference_leads_somewhere() -> None:
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    for name, kind in re.findall(r'"#/components/(\w+)/(\w+)"', json.dumps(DOCUMENT)):
        assert kind in DOCUMENT["components"][name]


def test_every_example_fits_its_own_schema() -> None:
    for methods in DOCUMENT["paths"].values():
        for operation in methods.values():
            if "requestBody" in operation:
                body = operation["requestBody"]["content"]["application/json"]
                for example in body["examples"].values():
                    validator(body["schema"]["$ref"].rpartition("/")[2]).validate(example["value"])


async def test_what_is_served_is_described_and_nothing_else(tiny: tuple[ServedModel, Tokenizer]) -> None:
    model, tokenizer = tiny
    gateway = Gateway(
        instance_id="g", config=GatewayConfig(), cache_secret="s", model=model, tokenizer=tokenizer, metrics=Metrics()
    )
    served = {
        (f"{path}{{model}}" if path.endswith("/") else path, method.lower())
        for path, methods in gateway.app.routes.items()
        for method in methods
    }
    await gateway.close()
    assert served == {(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods}


CHATS = {"temperature": 1, "stream_options": {}, "logit_bias": {"5": 1}, "shoal": SHOAL, "reasoning_effort": 50}


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("ChatRequest", {"messages": [{"role": "user", "content": "x"}], **CHATS}),
        ("CompletionRequest", {"prompt": ["x"], "stop": ["y"], "response_format": {"type": "regex", "regex": "a"}}),
        ("CompletionRequest", {"prompt": "x", "stop": "y", **CHATS}),
        ("CompletionRequest", {"prompt": [[5]]}),
        (
            "MessagesRequest",
            {
                "messages": [{"role": "user", "content": "x"}],
                "metadata": {"user_id": "a"},
                "output_config": {"effort": 5},
                "tool_choice": {"type": "auto"},
                "shoal": SHOAL,
            },
        ),
        ("ResponsesRequest", {"input": "x", "reasoning": {"effort": 5}, "metadata": {"a": "b"}, "shoal": SHOAL}),
    ],
)
def test_every_field_that_is_read_is_described_with_the_same_bounds(
    encoder: Encoder, reads: list[tuple[str, str, tuple[Any, ...]]], name: str, body: dict[str, Any]
) -> None:
    body = {"model": "deepseek-flash", "shoal": {}, **body}
    if name == "CompletionRequest":
        CompletionEncoder(encoder).prepare_now(body)
    else:
        dialects: dict[str, Any] = {
            "ChatRequest": CHAT_DIALECT,
            "MessagesRequest": MESSAGES_DIALECT,
            "ResponsesRequest": RESPONSES_DIALECT,
        }
        encoder.chat_now(body, dialects[name])
    if name == "ResponsesRequest":
        echoed(body)
    assert len(reads) > 20
    for path, kind, bounds in reads:
        if path in AS_IN_CHAT[name]:
            continue
        allowed = at(SCHEMAS[name], path)
        assert any(says(one, kind, bounds) for one in allowed), (path, kind, bounds, allowed)


CALLS = (
    '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n'
    '<｜DSML｜ parameter name="K" string="true">V</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)
ASKED: dict[str, tuple[type[Any], str, dict[str, Any]]] = {
    "/chat/completions": (
        Chat,
        "hm</think>hi" + CALLS,
        {
            "messages": [{"role": "user", "content": "x"}],
            "logprobs": True,
            "top_logprobs": 1,
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "stream_options": {"include_usage": True},
            "shoal": {"prompt_logprobs": 1},
        },
    ),
    "/completions": (Completions, "naïve 🙂", {"prompt": "a", "echo": True, "logprobs": 1, "n": 2}),
    "/messages": (
        Messages,
        "hm</think>hi" + CALLS,
        {"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "f", "input_schema": {"type": "object"}}]},
    ),
    "/responses": (
        Responses,
        "hm</think>hi" + CALLS,
        {"input": "x", "top_logprobs": 1, "metadata": {"a": "b"}, "tools": [{"type": "function", "name": "f"}]},
    ),
}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", ASKED)
async def test_answers_with_all_that_may_be_in_them_fit_their_schemas(
    encoder: Encoder, tokenizer: Tokenizer, path: str, is_stream: bool
) -> None:
    kind, text, body = ASKED[path]
    size = 10
    prepared = await kind(encoder).prepare({"model": "deepseek-flash", "stream": is_stream, **body}, size)
    request = prepared.request
    reader = OutputReader(request.choice_count, request.output, tokenizer, request_id="r", prompt_tokens=5)
    ids = tokenizer.encode(text)
    told = [position(one) for one in ids]
    for index in range(request.choice_count):
        prompt = [position(one) for one in request.prompt_ids[1:]] if not index else []
        reader.add(index, ids, told, sampling_pb2.FINISH_REASON_STOP, prompt)
    outputs, _ = reader.read()
    form = prepared.form(SimpleNamespace(request_id="r"))
    usage = sampling_pb2.Usage(prompt_tokens=5, completion_tokens=3, drafted_by_position=[1])
    content = DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"]
    if not is_stream:
        form.add(outputs)
        schema_validator(content["application/json"]["schema"]).validate(json.loads(form.body(usage)))
        return
    raw = (form.events(outputs) + form.end(usage)).decode()
    seen = [line.removeprefix("data: ") for line in raw.split("\n") if line.startswith("data: ")]
    data = content["text/event-stream"]["itemSchema"]["properties"]["data"]
    told_in = data.get("anyOf", [{}, data])[1]["contentSchema"]
    if "anyOf" in data:
        assert seen.pop() == "[DONE]"
    assert len(seen) > 5 or path == "/completions"
    for one in [*seen, json.dumps(form_error(form))]:
        schema_validator(told_in).validate(json.loads(one))


def form_error(form: Any) -> Any:
    """What ends a stream that fails."""
    return json.loads(form.error(NoCapacity("full")).decode().rpartition("data: ")[2])


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("Error", {"error": {"message": "m", "type": "t", "param": None}}),
        ("Models", {"object": "list", "data": []}),
        ("Tokenized", {"tokens": [1.5], "count": 1, "max_model_len": 2, "token_strs": None}),
        ("Alive", {"status": "ok", "more": 1}),
    ],
)
def test_schemas_of_answers_refuse_what_is_not_answered(name: str, wrong: Any) -> None:
    assert not validator(name).is_valid(wrong)


def test_a_key_is_shown_in_any_header_that_is_read() -> None:
    """Each scheme alone is enough, and so is none where keys are off."""
    schemes = document()["components"]["securitySchemes"]
    assert document()["security"] == [{}, *({name: []} for name in schemes)]
    shown = {"http": "authorization", "apiKey": "x-api-key"}
    assert [shown[one["type"]] for one in schemes.values()] == ["authorization", "x-api-key"]
    assert schemes["api_key"]["name"] == "x-api-key"
    assert secret_of("Bearer one", "") == secret_of("", "one") == b"one"
