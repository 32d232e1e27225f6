"""How deep references lead: the same as walking every way, and no body takes the recipe below its stack."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal.inference.v1 import chat_pb2, generation_pb2
from shoal_common.constraints import ConstraintInvalid
from shoal_common.errors import InvalidArgument
from shoal_gateway.dialect import CHAT_DIALECT, MESSAGES_DIALECT, RESPONSES_DIALECT, Dialect
from shoal_gateway.encode import Encoder
from shoal_gateway.generation import prepare_now
from shoal_gateway.schema_depth import MAX_LEVELS, levels_of

MODEL = "deepseek-flash"
CIRCLES = {
    "properties": {"a": {"$ref": "#"}},
    "$defs": {"b": {"$ref": "#/$defs/c"}, "c": {"not": {"$ref": "#/$defs/b"}}},
}


def chain(length: int, link: str = "#/$defs/d{}") -> dict[str, Any]:
    """Each of so many schemas is a reference to the next."""
    links = {f"d{index}": {"$ref": link.format(index + 1), "$anchor": f"d{index}"} for index in range(length)}
    return {"type": "object", "properties": {"a": {"$ref": link.format(0)}}, "$defs": {**links, f"d{length}": {}}}


@st.composite
def acyclic(draw: st.DrawFn) -> dict[str, Any]:
    """Schemas that refer to later ones only."""
    count = draw(st.integers(1, 6))
    defs: dict[str, Any] = {f"d{count}": {}}
    for index in range(count):
        later = st.integers(index + 1, count).map(lambda one: {"$ref": f"#/$defs/d{one}"})
        within = st.recursive(
            later | st.just({}), lambda one: st.lists(one, max_size=2).map(lambda some: {"anyOf": some})
        )
        defs[f"d{index}"] = draw(within)
    return {"anyOf": [{"$ref": "#/$defs/d0"}, {"$ref": f"#/$defs/d{draw(st.integers(0, count))}"}], "$defs": defs}


def deepest(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(deepest, inner), default=0)


def longest(name: str, root: dict[str, Any]) -> int:
    """By walking every way. Of each part on it all levels count, whether the reference is that deep or not."""
    part = root["$defs"][name] if name else root
    names = {piece.split('"')[0] for piece in json.dumps(part).split('"$ref": "#/$defs/')[1:]}
    return deepest(part) + max((longest(one, root) for one in names), default=0)


@given(acyclic())
def test_levels_are_those_of_the_longest_way(schema: dict[str, Any]) -> None:
    assert levels_of(schema) == longest("", schema)


@pytest.mark.parametrize("link", ["#/$defs/d{}", "#d{}", "#/%24defs/d{}", "other.json#/$defs/d{}"])
def test_chains_are_as_long_as_they_are_however_they_are_written(link: str) -> None:
    assert levels_of(chain(40, link)) >= 40
    assert levels_of(chain(MAX_LEVELS, link)) > MAX_LEVELS


def test_circles_are_bounded_by_all_that_is_in_them() -> None:
    assert 3 <= levels_of(CIRCLES) <= 20
    assert levels_of({"type": "string"}) == 2


BODIES: list[tuple[Dialect, str, Any]] = [
    (CHAT_DIALECT, "response_format", lambda one: {"type": "json_schema", "json_schema": {"name": "x", "schema": one}}),
    (CHAT_DIALECT, "tools", lambda one: [{"type": "function", "function": {"name": "f", "parameters": one}}]),
    (MESSAGES_DIALECT, "tools", lambda one: [{"name": "f", "input_schema": one}]),
    (RESPONSES_DIALECT, "text", lambda one: {"format": {"type": "json_schema", "name": "x", "schema": one}}),
    (RESPONSES_DIALECT, "tools", lambda one: [{"type": "function", "name": "f", "parameters": one}]),
]


@pytest.mark.parametrize(("dialect", "field", "made"), BODIES)
@pytest.mark.parametrize("link", ["#/$defs/d{}", "#d{}", "#/%24defs/d{}"])
def test_what_leads_too_deep_is_refused_where_it_stands(
    encoder: Encoder, dialect: Dialect, field: str, made: Any, link: str
) -> None:
    body = {"model": MODEL, "max_tokens": 5, field: made(chain(6_000, link))}
    body["input" if dialect is RESPONSES_DIALECT else "messages"] = [{"role": "user", "content": "json"}]
    with pytest.raises(ConstraintInvalid, match="levels deep") as error:
        encoder.chat_now(body, dialect)
    assert error.value.violations[0].field.startswith(field)


def test_a_tool_of_a_grpc_request_that_leads_too_deep_is_refused(encoder: Encoder) -> None:
    tool = chat_pb2.Tool(name="f", parameters_json_schema=json.dumps(chain(6_000)))
    message = chat_pb2.ChatMessage(role=chat_pb2.CHAT_ROLE_USER, content="Hi")
    asked = generation_pb2.Generation(chat=chat_pb2.ChatPrompt(messages=[message], tools=[tool]))
    with pytest.raises(InvalidArgument, match="levels deep"):
        prepare_now(asked, encoder)


def test_what_is_long_costs_what_it_is_long(encoder: Encoder) -> None:
    key, digits = "k" * 400_000, "9" * 5_000
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    # Paths to all of these would take gigabytes.
    assert encoder.chat_now({**body, "metadata": {key: [{}] * 50_000}}).request.prompt_ids
    schema = {"type": "object", "properties": {"a": {"$ref": f"#/anyOf/{digits}"}}, "anyOf": [{}]}
    with pytest.raises(InvalidArgument):
        encoder.chat_now({**body, "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]})
    assert levels_of(schema) < MAX_LEVELS


def test_a_schema_as_people_write_them_is_taken(encoder: Encoder) -> None:
    defs: dict[str, Any] = {"d30": {"type": "string"}}
    for index in range(30):
        defs[f"d{index}"] = {"type": "object", "properties": {"a": {"anyOf": [{"$ref": f"#/$defs/d{index + 1}"}]}}}
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": defs}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "tools": tools}
    assert encoder.chat_now(body).request.prompt_ids
