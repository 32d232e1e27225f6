"""Constrained answers through the whole mesh: what comes fits, what cannot be compiled is a 400 before any status."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from shoal.common.v1 import sampling_pb2
from shoal_client import Client, ShoalError, generation
from shoal_common.constraints import ConstraintKind, normalise
from shoal_engine import LLM
from support.asking import Question, ask, ask_offline
from support.mesh import Mesh
from support.worker_pair import prompt_of

pytestmark = pytest.mark.timeout(300)

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
# The tiny model would write blanks between any two tokens of JSON.
BLANKS = {str(token): -100 for token in (207, 208, 211, 230)}
OFF = {"thinking": {"type": "disabled"}}
TOOL = {"type": "function", "function": {"name": "get", "description": "", "strict": True, "parameters": SCHEMA}}


def chat(whole: Mesh, **fields: Any) -> httpx.Response:
    body = {
        "model": "deepseek-flash",
        "messages": [{"role": "user", "content": "Some json, please."}],
        "max_tokens": 60,
        "seed": 4,
        "logit_bias": BLANKS,
        **OFF,
    }
    return httpx.post(f"{whole.http}/v1/chat/completions", json={**body, **fields}, timeout=60)


def json_schema(schema: Any, strict: bool = True) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": strict, "schema": schema}}


def message(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def check(text: str) -> None:
    value = json.loads(text)
    assert set(value) == {"ok", "n"}
    assert isinstance(value["ok"], bool)
    assert 0 <= value["n"] <= 99


@pytest.mark.parametrize("strict", [True, False])
def test_an_answer_fits_its_schema(whole: Mesh, client: Client, strict: bool) -> None:
    choice = message(chat(whole, response_format=json_schema(SCHEMA, strict)))
    assert choice["finish_reason"] == "stop"
    check(choice["message"]["content"])


def test_an_answer_fits_a_regular_expression(whole: Mesh, client: Client) -> None:
    choice = message(chat(whole, response_format={"type": "regex", "regex": "(ab|c){2,5}-[0-9]{3}"}))
    assert re.fullmatch("(ab|c){2,5}-[0-9]{3}", choice["message"]["content"])


GRAMMAR = 'root ::= "c" word "t"\nword ::= "a" | "u" word'
ASKING: dict[str, tuple[dict[str, Any], tuple[str | int, ...]]] = {
    "/v1/chat/completions": (
        {"messages": [{"role": "user", "content": "Hi"}], **OFF},
        ("choices", 0, "message", "content"),
    ),
    "/v1/completions": ({"prompt": "Hi"}, ("choices", 0, "text")),
    "/v1/messages": ({"messages": [{"role": "user", "content": "Hi"}], **OFF}, ("content", 0, "text")),
    "/v1/responses": ({"input": "Hi", "reasoning": {"effort": "none"}}, ("output", 0, "content", 0, "text")),
}


@pytest.mark.parametrize("path", ASKING)
def test_an_answer_of_any_api_fits_a_grammar(whole: Mesh, client: Client, path: str) -> None:
    body, place = ASKING[path]
    tokens = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    asked = {"model": "deepseek-flash", tokens: 60, "shoal": {"seed": 2, "ebnf": GRAMMAR}, **body}
    response = httpx.post(f"{whole.http}{path}", json=asked, timeout=60)
    assert response.status_code == 200, response.text
    answer = response.json()
    for key in place:
        answer = answer[key]
    assert re.fullmatch("cu*at", answer)


def test_a_grammar_beside_another_constraint_is_refused(whole: Mesh, client: Client) -> None:
    for other in ({"tools": [TOOL]}, {"response_format": {"type": "regex", "regex": "a"}}):
        refused = chat(whole, shoal={"ebnf": GRAMMAR}, **other)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "shoal.ebnf")


def test_every_choice_fits(whole: Mesh, client: Client) -> None:
    response = chat(whole, n=3, response_format=json_schema(SCHEMA))
    message(response)
    for choice in response.json()["choices"]:
        check(choice["message"]["content"])


def test_an_answer_with_thoughts_fits_behind_them(whole: Mesh, client: Client) -> None:
    # While it thinks the hosted API ignores sampling fields; as sent, the thought ends soon.
    fields = {"thinking": {"type": "enabled"}, "shoal": {"sampling": "as_sent"}, "logit_bias": {**BLANKS, "6": 12}}
    choice = message(chat(whole, response_format=json_schema(SCHEMA), **fields))
    assert choice["finish_reason"] == "stop"
    check(choice["message"]["content"])


def test_a_required_tool_is_called_with_arguments_that_fit(whole: Mesh, client: Client) -> None:
    choice = message(chat(whole, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=200))
    assert choice["finish_reason"] == "tool_calls"
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get"
    check(call["function"]["arguments"])


ENDLESS = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
INVALID: list[tuple[dict[str, Any], str]] = [
    ({"response_format": json_schema({"type": "object", "properties": {"a": {"uniqueItems": True}}}, False)}, "schema"),
    ({"response_format": json_schema({"type": "object", "properties": {"a": {"enum": []}}}, False)}, "schema"),
    (
        {"response_format": json_schema({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]})},
        "schema",
    ),
    # Only the worker's engine finds these.
    ({"response_format": json_schema({"type": "object", "properties": {"a": {"format": "odd"}}}, False)}, "schema"),
    ({"response_format": {"type": "regex", "regex": "a(?=b)"}}, "response_format.regex"),
    # These have failed inside of the engine, or ended the worker.
    ({"response_format": json_schema({"type": "integer", "minimum": 10**30}, False)}, "schema"),
    ({"response_format": json_schema({"const": -(2**63)}, False)}, "schema"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "param"), INVALID)
def test_what_cannot_be_compiled_is_a_400_that_names_the_field(
    whole: Mesh, client: Client, fields: dict[str, Any], param: str, stream: bool
) -> None:
    response = chat(whole, stream=stream, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["code"] in ("constraint_invalid", "invalid_argument")
    if error["code"] == "constraint_invalid":
        assert param in error["param"]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (ConstraintKind.EBNF, 'root ::= [a-c]+ ("-" [0-9]+)?'),
        (ConstraintKind.REGEX, "[a-z]{1,8}( [a-z]{1,8}){3}"),
        (ConstraintKind.JSON_OBJECT, ""),
    ],
)
def test_tokens_are_those_of_the_offline_model(client: Client, offline: LLM, kind: ConstraintKind, text: str) -> None:
    asked = Question(prompt=tuple(prompt_of(40, seed=6)), seed=8, n=2, constraint=normalise(kind, text))
    assert [ask(client, asked).tokens] == ask_offline(offline, [asked])


def test_a_grpc_caller_is_told_its_own_field(client: Client) -> None:
    for made, field in [
        (sampling_pb2.Constraint(ebnf="root ::= x"), "generation.constraint.ebnf"),
        (sampling_pb2.Constraint(regex="("), "generation.constraint.regex"),
        (sampling_pb2.Constraint(json_schema='{"const": 1' + "0" * 30 + "}"), "generation.constraint.json_schema"),
        (
            sampling_pb2.Constraint(json_schema='{"format": "odd", "type": "string"}'),
            "generation.constraint.json_schema",
        ),
        (sampling_pb2.Constraint(), "generation.constraint"),
    ]:
        with pytest.raises(ShoalError) as caught:
            client.generate(generation("hi", constraint=made))
        assert caught.value.reason == "CONSTRAINT_INVALID"
        assert field in str(caught.value)


def test_a_constraint_that_leads_nowhere_fails_its_request_alone(whole: Mesh, client: Client) -> None:
    def plain() -> Any:
        return message(chat(whole, max_tokens=40))["message"]["content"]

    wanted = plain()
    stuck = {"response_format": {"type": "regex", "regex": "[0-9]{2}x"}, "shoal": {"bad_words": ["x"]}}
    with ThreadPoolExecutor(6) as pool:
        others = [pool.submit(plain) for _ in range(3)]
        failed = [pool.submit(chat, whole, stream=stream, **stuck) for stream in (False, True, False)]
    assert [one.result() for one in others] == [wanted] * 3
    for response in (one.result() for one in failed):
        if response.status_code == 200:
            [told] = [line for line in response.text.splitlines() if '"error"' in line]
            error = json.loads(told.removeprefix("data: "))["error"]
        else:
            error = response.json()["error"]
            assert response.status_code == 400
        assert error["code"] == "nothing_allowed"
