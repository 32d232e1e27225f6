"""Which constraint a chat body or a Generation asks for, where it begins, and which field an error about it names."""

from __future__ import annotations

import json
from typing import Any

import pytest
from deepseek_recipe import Tokenizer
from shoal.common.v1 import sampling_pb2
from shoal.inference.v1 import chat_pb2, generation_pb2
from shoal_common.constraints import TABLE, ConstraintInvalid, ConstraintKind, OutputConstraint
from shoal_common.errors import InvalidArgument, OutOfCapacity
from shoal_gateway.constraint import AskedConstraint
from shoal_gateway.dialect import MESSAGES_DIALECT, RESPONSES_DIALECT, Dialect
from shoal_gateway.encode import Encoder
from shoal_gateway.generation import prepare_now

BASE: dict[str, Any] = {"model": "deepseek-flash", "messages": [{"role": "user", "content": "Some json"}]}
PLAIN = {**BASE, "thinking": {"type": "disabled"}}
SCHEMA = {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}
STRICT = {**SCHEMA, "required": ["a"], "additionalProperties": False}


def tool(name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": STRICT, **more}}


def asked(encoder: Encoder, body: dict[str, Any]) -> OutputConstraint | None:
    found = encoder.chat_now(body).request.constraint
    return None if found is None else found.constraint


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}}


def test_strict_forms_keep_every_keyword(encoder: Encoder) -> None:
    items: Any = {"type": "array", "items": {"type": "string", "minLength": 3}, "minItems": 4}
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"b": items, "a": {"const": 1, "type": "integer"}},
        "required": ["b", "a"],
    }
    schema["additionalProperties"] = False
    found = asked(encoder, {**PLAIN, **schema_format(schema, strict=True)})
    assert found is not None
    assert json.loads(found.text)["properties"] == schema["properties"]
    assert list(json.loads(found.text)["properties"]) == ["b", "a"]
    found = asked(encoder, {**PLAIN, "tools": [tool(strict=True, parameters=schema)]})
    assert found is not None
    assert json.loads(found.text)["tools"][0]["parameters"]["properties"] == schema["properties"]
    with pytest.raises(ConstraintInvalid, match="flurb"):
        asked(encoder, {**PLAIN, **schema_format({**schema, "flurb": 1}, strict=True)})


def test_nothing_is_asked_for_unless_something_is(encoder: Encoder) -> None:
    assert asked(encoder, BASE) is None
    assert asked(encoder, {**BASE, "response_format": {"type": "text"}}) is None
    assert asked(encoder, {**BASE, "tools": [tool()]}) is None
    assert asked(encoder, {**PLAIN, "tools": [tool(strict=True)], "tool_choice": "none"}) is None


def test_response_formats(encoder: Encoder) -> None:
    found = asked(encoder, {**PLAIN, "response_format": {"type": "json_object"}})
    assert found is not None
    assert (found.kind, found.text, found.start_after_ids) == (ConstraintKind.JSON_OBJECT, "", ())
    found = asked(encoder, {**PLAIN, **schema_format(SCHEMA)})
    assert found is not None
    assert json.loads(found.text) == SCHEMA
    assert found.engine == TABLE[ConstraintKind.JSON_SCHEMA]
    # Strict means what the hosted API means: all properties come, and no others; definitions stay.
    found = asked(encoder, {**PLAIN, **schema_format(SCHEMA, strict=True)})
    assert found is not None
    assert json.loads(found.text) == STRICT
    found = asked(encoder, {**PLAIN, "response_format": {"type": "regex", "regex": "a+"}})
    assert found is not None
    assert (found.kind, found.text) == (ConstraintKind.REGEX, "a+")


def test_it_begins_behind_the_thinking(encoder: Encoder, tokenizer: Tokenizer) -> None:
    found = asked(encoder, {**BASE, "response_format": {"type": "json_object"}})
    assert found is not None
    assert found.start_after_ids == tuple(tokenizer.encode("</think>"))
    assert len(found.start_after_ids) == 1


def tag(encoder: Encoder, body: dict[str, Any]) -> Any:
    found = asked(encoder, body)
    assert found is not None
    assert found.kind is ConstraintKind.STRUCTURAL_TAG
    return json.loads(found.text)


def test_tools_become_a_structural_tag(encoder: Encoder) -> None:
    strict = [{"name": "f", "parameters": STRICT}]
    assert tag(encoder, {**PLAIN, "tools": [tool(strict=True)]}) == {
        "type": "tool_calls",
        "choice": "auto",
        "tools": strict,
    }
    required = {**PLAIN, "tools": [tool(), tool("g")], "tool_choice": "required"}
    assert tag(encoder, required)["tools"] == [{"name": "f"}, {"name": "g"}]
    named = {**required, "tool_choice": {"type": "function", "function": {"name": "g"}}, "parallel_tool_calls": False}
    assert tag(encoder, named) == {
        "type": "tool_calls",
        "choice": "required",
        "parallel": False,
        "tools": [{"name": "g"}],
    }
    both = tag(encoder, {**PLAIN, "tools": [tool()], "response_format": {"type": "json_object"}})
    assert (both["choice"], both["content"]) == ("auto", {"type": "object"})


def test_a_required_call_needs_an_answer_without_thinking(encoder: Encoder) -> None:
    with pytest.raises(InvalidArgument):
        encoder.chat_now({**BASE, "tools": [tool()], "tool_choice": "required"})


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        (schema_format({"type": "object", "properties": {"a": {"odd": 1}}}), "response_format.json_schema.schema"),
        ({"response_format": {"type": "regex", "regex": "x" * 300_000}}, "response_format.regex"),
        (
            {"tools": [tool(strict=True, parameters={**STRICT, "$defs": {"n": {"odd": 1}}})]},
            "tools[0].function.parameters",
        ),
        ({"tools": [tool()], "response_format": {"type": "regex", "regex": "x"}}, "response_format.regex"),
        (
            {"tools": [tool()], **schema_format({"type": "object", "properties": {"a": {"odd": 1}}})},
            "response_format.json_schema.schema",
        ),
    ],
)
def test_what_is_wrong_is_named_by_the_client_s_field(encoder: Encoder, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ConstraintInvalid) as caught:
        encoder.chat_now({**PLAIN, **fields})
    assert caught.value.violations[0].field == field


ODD = {"$defs": {"n": {"odd": 1}}}
OTHER_APIS: dict[str, tuple[Dialect, dict[str, Any]]] = {
    "tools[0].input_schema": (
        MESSAGES_DIALECT,
        {"messages": BASE["messages"], "tools": [{"name": "f", "input_schema": {**STRICT, **ODD}, "strict": True}]},
    ),
    "tools[0].parameters": (
        RESPONSES_DIALECT,
        {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": {**STRICT, **ODD}, "strict": True}]},
    ),
    "text.format.schema": (
        RESPONSES_DIALECT,
        {
            "input": "x",
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object", "properties": ODD}}},
        },
    ),
}


@pytest.mark.parametrize("field", OTHER_APIS)
def test_in_the_other_apis_too(encoder: Encoder, field: str) -> None:
    dialect, body = OTHER_APIS[field]
    with pytest.raises(ConstraintInvalid) as caught:
        encoder.chat_now({"model": "deepseek-flash", **body}, dialect)
    assert caught.value.violations[0].field == field


def test_all_apis_hold_an_answer_to_the_same(encoder: Encoder) -> None:
    chat = asked(encoder, {**PLAIN, "tools": [tool(strict=True)], "parallel_tool_calls": False})
    message = {
        "model": "deepseek-flash",
        "messages": PLAIN["messages"],
        "thinking": {"type": "disabled"},
        "tools": [{"name": "f", "input_schema": tool()["function"]["parameters"], "strict": True}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    }
    response = {
        "model": "deepseek-flash",
        "input": "json please",
        "reasoning": {"effort": "none"},
        "tools": [{"type": "function", **tool(strict=True)["function"]}],
        "parallel_tool_calls": False,
    }
    for dialect, body in ((MESSAGES_DIALECT, message), (RESPONSES_DIALECT, response)):
        found = encoder.chat_now(body, dialect).request.constraint
        assert found is not None
        assert found.constraint == chat
    form = {"type": "json_schema", "name": "n", "schema": STRICT, "strict": True}
    chat = asked(encoder, {**PLAIN, "response_format": {"type": "json_schema", "json_schema": {**form, "type": None}}})
    found = encoder.chat_now({**response, "tools": [], "text": {"format": form}}, RESPONSES_DIALECT).request.constraint
    assert found is not None
    assert found.constraint == chat


def test_json_mode_needs_the_word_in_the_prompt(encoder: Encoder) -> None:
    with pytest.raises(InvalidArgument, match="json"):
        encoder.chat_now(
            {**PLAIN, "messages": [{"role": "user", "content": "hi"}], "response_format": {"type": "json_object"}}
        )


def test_a_worker_s_error_about_the_constraint_names_the_client_s_field(encoder: Encoder) -> None:
    found = encoder.chat_now({**PLAIN, "response_format": {"type": "regex", "regex": "a+"}}).request.constraint
    assert isinstance(found, AskedConstraint)
    said = found.as_asked(ConstraintInvalid.at("constraint.regex", "is odd", reason="CONSTRAINT_INVALID"))
    assert (said.violations[0].field, said.violations[0].description) == ("response_format.regex", "is odd")
    assert said.reason == "CONSTRAINT_INVALID"
    other = OutOfCapacity("full")
    assert found.as_asked(other) is other


def test_a_generation_carries_its_constraint(encoder: Encoder, tokenizer: Tokenizer) -> None:
    made = generation_pb2.Generation(text="x", constraint=sampling_pb2.Constraint(ebnf='root ::= "a"'))
    found = prepare_now(made, encoder).request.constraint
    assert found is not None
    assert (found.constraint.kind, found.constraint.start_after_ids) == (ConstraintKind.EBNF, ())
    message = found.message()
    assert (message.constraint.ebnf, message.engine) == ('root ::= "a"', TABLE[ConstraintKind.EBNF])
    chat = chat_pb2.ChatPrompt(messages=[chat_pb2.ChatMessage(role=chat_pb2.CHAT_ROLE_USER, content="x")])
    made = generation_pb2.Generation(chat=chat, constraint=sampling_pb2.Constraint(json_object=True))
    found = prepare_now(made, encoder).request.constraint
    assert found is not None
    assert found.constraint.start_after_ids == tuple(tokenizer.encode("</think>"))


@pytest.mark.parametrize("tool_type", [{}, {"type": "custom"}])
def test_any_of_messages_demands_one_of_the_tools(encoder: Encoder, tool_type: dict[str, str]) -> None:
    """The recipe takes it for `auto`, and a tool that says it is the client's own for one of a server."""
    tools = [{**tool_type, "name": name, "input_schema": {"type": "object"}} for name in ("f", "g")]
    body = {**PLAIN, "max_tokens": 9, "tools": tools, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    found = encoder.chat_now(body, MESSAGES_DIALECT).request.constraint
    assert found is not None
    assert json.loads(found.constraint.text) == {
        "type": "tool_calls",
        "choice": "any",
        "parallel": False,
        "tools": [{"name": "f"}, {"name": "g"}],
    }


@pytest.mark.parametrize("has_tools", [False, True])
async def test_the_format_of_messages_holds_the_text_to_its_schema(encoder: Encoder, has_tools: bool) -> None:
    tools = {"tools": [{"name": "f", "input_schema": {"type": "object"}}]} if has_tools else {}
    body = {**PLAIN, "max_tokens": 9, "output_config": {"format": {"type": "json_schema", "schema": STRICT}}, **tools}
    found = encoder.chat_now(body, MESSAGES_DIALECT).request.constraint
    assert found is not None
    held = json.loads(found.constraint.text)
    assert (held["content"] if has_tools else held) == STRICT
    for wrong in ({"type": "text"}, {"schema": STRICT}, {"type": "json_schema"}, "json"):
        with pytest.raises(InvalidArgument, match=r"output_config\.format"):
            encoder.chat_now({**body, "output_config": {"format": wrong}}, MESSAGES_DIALECT)
        with pytest.raises(InvalidArgument, match=r"output_config\.format"):
            await encoder.count_tokens({**body, "output_config": {"format": wrong}}, 100, MESSAGES_DIALECT)


FORM = "response_format.json_schema.schema"
RECIPE_REFUSES: list[tuple[dict[str, Any], str, str]] = [
    (schema_format(5), FORM, "CONSTRAINT_INVALID"),
    (
        schema_format({**STRICT, "required": []}, strict=True),
        "response_format.json_schema.schema",
        "CONSTRAINT_INVALID",
    ),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "INVALID_ARGUMENT"),
    ({"response_format": 5}, "response_format", "INVALID_ARGUMENT"),
    (
        {"messages": [{"role": "user", "content": "Hi"}], "response_format": {"type": "json_object"}},
        "response_format",
        "INVALID_ARGUMENT",
    ),
    (
        {"tools": [tool("g"), tool(parameters={"type": "integer"})]},
        "tools[1].function.parameters",
        "CONSTRAINT_INVALID",
    ),
    (
        {"tools": [tool(parameters={**STRICT, "additionalProperties": True}, strict=True)]},
        "tools[0].function.parameters",
        "CONSTRAINT_INVALID",
    ),
    ({"tools": [tool("g"), {"type": "function"}]}, "tools[1].function", "INVALID_ARGUMENT"),
    ({"tools": 5}, "tools", "INVALID_ARGUMENT"),
]


@pytest.mark.parametrize(("fields", "field", "reason"), RECIPE_REFUSES)
def test_what_the_recipe_refuses_names_the_field(
    encoder: Encoder, fields: dict[str, Any], field: str, reason: str
) -> None:
    with pytest.raises(InvalidArgument) as error:
        encoder.chat_now({**PLAIN, **fields})
    assert (error.value.violations[0].field, error.value.reason) == (field, reason)


@pytest.mark.parametrize(
    ("dialect", "fields", "field"),
    [
        (
            RESPONSES_DIALECT,
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": 5}}},
            "text.format.schema",
        ),
        (
            RESPONSES_DIALECT,
            {"tools": [{"type": "function", "name": "f", "parameters": {"type": "integer"}, "strict": True}]},
            "tools[0].parameters",
        ),
        (MESSAGES_DIALECT, {"max_tokens": 9, "tools": [{"name": "f", "input_schema": 5}]}, "tools[0].input_schema"),
    ],
)
def test_what_the_recipe_refuses_names_the_field_of_each_api(
    encoder: Encoder, dialect: Dialect, fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConstraintInvalid) as error:
        encoder.chat_now({**PLAIN, "input": "Some json", **fields}, dialect)
    assert error.value.violations[0].field == field


def test_what_is_wrong_with_a_message_is_not_blamed_on_a_schema(encoder: Encoder) -> None:
    with pytest.raises(InvalidArgument) as error:
        encoder.chat_now({**PLAIN, "messages": [{"role": "x", "content": ""}], **schema_format(STRICT)})
    assert error.value.reason == "INVALID_ARGUMENT"
    assert not any("schema" in one.field for one in error.value.violations)


@pytest.mark.parametrize(
    ("said", "over_http", "over_grpc"),
    [
        ("params.forced_ids[3]", "shoal.forced_ids[3]", "generation.sampling.forced_ids[3]"),
        ("params.prompt_logprobs", "shoal.prompt_logprobs", "generation.sampling.prompt_logprobs"),
        ("params.min_p", "min_p", "generation.sampling.min_p"),
        ("prompt_ids", "prompt_ids", "prompt_ids"),
    ],
)
def test_a_workers_error_names_the_parameter_as_the_client_wrote_it(
    encoder: Encoder, said: str, over_http: str, over_grpc: str
) -> None:
    refusal = InvalidArgument.at(said, "is wrong", reason="SOME_REASON")
    generation = generation_pb2.Generation(text="a", constraint=sampling_pb2.Constraint(json_object=True))
    requests = (encoder.chat_now(PLAIN).request, prepare_now(generation, encoder).request)
    for request, field in zip(requests, (over_http, over_grpc), strict=True):
        told = request.as_asked(refusal)
        assert (told.violations[0].field, told.reason) == (field, "SOME_REASON")
        assert told.message == f"{field}: is wrong"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"top_p": 0}, "top_p"),
        ({"top_p": 0.0, "thinking": {"type": "enabled"}}, "top_p"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"min_tokens": 9, "max_completion_tokens": 8, "max_tokens": 20}, "min_tokens"),
        ({"min_tokens": 393_216}, "min_tokens"),
    ],
)
def test_sampling_that_cannot_be_is_refused(encoder: Encoder, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        encoder.chat_now({**PLAIN, **fields})
    assert error.value.violations[0].field == field
