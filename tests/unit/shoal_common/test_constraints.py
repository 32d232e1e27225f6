"""Constraints are checked alike everywhere, without an engine: sizes, syntax, keywords, whether they have an end."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal.common.v1 import sampling_pb2
from shoal_common.constraints import (
    MAX_TEXT_BYTES,
    TABLE,
    ConstraintInvalid,
    ConstraintKind,
    constraint_id,
    engine_of,
    normalise,
)
from shoal_common.constraints.json_schema import check_schema
from shoal_common.constraints.wire import constraint_message, kind_and_text

SELF = {"$ref": "#"}
LIST = {"type": "object", "properties": {"next": {"anyOf": [SELF, {"type": "null"}]}}, "required": ["next"]}

FINE: list[Any] = [
    True,
    {},
    LIST,
    {"type": "array", "items": SELF},
    {"type": "object", "properties": {"a": SELF}},
    {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "string"}}},
    {"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"},
    {"properties": {"x-guidance": {}, "foo": True}},
    {"title": "t", "default": {"anything": 1}, "examples": [{"foo": 1}]},
]
WRONG: list[tuple[Any, str]] = [
    (3, "must be a schema"),
    ({"properties": {"a": []}}, "must be a schema"),
    ({"foo": 1}, "'foo' is not supported"),
    ({"x-guidance": {"lenient": True}}, "not supported"),
    ({"properties": {"a": {"uniqueItems": True}}}, "/properties/a: keyword 'uniqueItems'"),
    ({"not": {}}, "'not'"),
    ({"if": {}, "then": {}}, "not supported"),
    ({"exclusiveMinimum": 2, "exclusiveMaximum": 2.5}, "less than 1 from the other"),
    ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0, "multipleOf": 0.25}, "less than 1 from the other"),
    ({"enum": []}, "at least one value"),
    ({"anyOf": []}, "at least one schema"),
    ({"required": "a"}, "list of names"),
    ({"type": {"a": 1}}, "type must be"),
    ({"minLength": -1}, "minLength"),
    ({"maxItems": 10**9}, "maxItems"),
    ({"maxItems": True}, "maxItems"),
    ({"$ref": "https://example.com/schema"}, "into this document"),
    ({"$ref": "#/$defs/none"}, "names no schema"),
    ({"properties": {"a": {"$id": "b"}}}, "$id"),
    ({"items": [{}]}, "prefixItems"),
    (SELF, "no finite value"),
    ({"allOf": [SELF]}, "no finite value"),
    ({"anyOf": [SELF, {"type": "null"}], "allOf": [SELF]}, "no finite value"),
    ({"type": "object", "properties": {"a": SELF}, "required": ["a"]}, "no finite value"),
    ({"type": "object", "additionalProperties": SELF, "required": ["a"]}, "no finite value"),
    ({"type": "array", "items": SELF, "minItems": 1}, "no finite value"),
    ({"type": "array", "prefixItems": [SELF], "minItems": 1}, "no finite value"),
    (
        {
            "$ref": "#/$defs/a",
            "$defs": {
                "a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]},
                "b": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 2},
            },
        },
        "no finite value",
    ),
    # It could be left out, but generation might begin it.
    ({"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}}, "no finite value"),
]


@pytest.mark.parametrize("schema", FINE, ids=json.dumps)
def test_a_schema_that_can_be_met_passes(schema: Any) -> None:
    assert check_schema(schema, "f") is schema


@pytest.mark.parametrize(("schema", "said"), WRONG, ids=lambda one: json.dumps(one)[:60])
def test_a_schema_that_cannot_be_enforced_is_refused_with_its_place(schema: Any, said: str) -> None:
    with pytest.raises(ConstraintInvalid) as caught:
        normalise(ConstraintKind.JSON_SCHEMA, json.dumps(schema), field="response_format.x")
    assert said in caught.value.message
    assert caught.value.violations[0].field == "response_format.x"
    assert (caught.value.code, caught.value.reason) == ("INVALID_ARGUMENT", "CONSTRAINT_INVALID")


@pytest.mark.parametrize(
    "text", ["", "{", "NaN", '{"a": Infinity}', "[" * 100_000, '{"const": "\\ud800"}', "1" * 5000, '"\ud800"']
)
def test_what_is_no_json_is_no_schema(text: str) -> None:
    with pytest.raises(ConstraintInvalid):
        normalise(ConstraintKind.JSON_SCHEMA, text)


junk = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(
                [
                    "type",
                    "properties",
                    "required",
                    "items",
                    "anyOf",
                    "enum",
                    "$ref",
                    "minItems",
                    "$defs",
                    "pattern",
                    "x",
                ]
            ),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=12,
)


@given(value=junk)
def test_junk_is_refused_and_nothing_else_happens(value: Any) -> None:
    for kind in ConstraintKind:
        with contextlib.suppress(ConstraintInvalid):
            normalise(kind, json.dumps(value))


@given(text=st.text(alphabet='root ::="[]ab\\-^(){}|*+?.,0123\n#', max_size=40))
def test_junk_grammars_are_refused_and_nothing_else_happens(text: str) -> None:
    for grammar in (text, f"root ::= {text}"):
        with contextlib.suppress(ConstraintInvalid):
            normalise(ConstraintKind.EBNF, grammar)


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ('x ::= "a"', "no rule 'root'"),
        ('root ::= "a" b', "'b', which is not defined"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1: rule 'root' is defined twice"),
        ('root ::= root "a"', "no finite text"),
        ('root ::= "a" | x\nx ::= "(" x ")"', "rule 'x' derives no finite text"),
        ('root ::= "a', "does not end"),
        ("root ::= [z-a]", "must ascend"),
        ("root ::= []", "at least one character"),
        (r'root ::= "a" | "b" [^\x00-\U0010FFFF]', "at least one character"),
        (r"root ::= [^\uE000-\U0010FFFF\x00-\uD7FF]", "at least one character"),
        ('root ::= "' + "a" * 20_000 + '"', "more than 20000 parts"),
        ("root ::= a{3,2}\na ::= 'b'", "bounds"),
        ('root ::= "a"{2000}', "at most 1000"),
        ('root ::= ("a"', "')' was expected"),
        ('root ::= "\\q"', "escape"),
        ('root ::= "\\ud800"', "hex digits of a character"),
        ("root ::= <a>", "was not expected"),
    ],
)
def test_a_grammar_that_is_wrong_is_refused_with_its_place(grammar: str, said: str) -> None:
    with pytest.raises(ConstraintInvalid, match="f: ") as caught:
        normalise(ConstraintKind.EBNF, grammar, field="f")
    assert said in caught.value.message


TOOL: dict[str, Any] = {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}


@pytest.mark.parametrize(
    "tag",
    [
        {},
        {"type": "tool_calls"},
        {"type": "tool_calls", "choice": "required", "tools": []},
        {"type": "tool_calls", "choice": "never", "tools": [TOOL]},
        {"type": "tool_calls", "choice": "auto", "tools": [TOOL, TOOL]},
        {"type": "tool_calls", "choice": "auto", "tools": [TOOL], "more": 1},
        {"type": "tool_calls", "choice": "auto", "tools": [TOOL], "parallel": 1},
        {"type": "tool_calls", "choice": "required", "tools": [TOOL], "content": {}},
        {"type": "tool_calls", "choice": "auto", "tools": [{"name": 'a"b'}]},
        {"type": "tool_calls", "choice": "auto", "tools": [{"name": "｜DSML｜"}]},
        {"type": "tool_calls", "choice": "auto", "tools": [{"name": "f", "parameters": {"type": "string"}}]},
        {"type": "tool_calls", "choice": "auto", "tools": [{"name": "f", "parameters": {"anyOf": [{}]}}]},
        {"type": "tool_calls", "choice": "auto", "tools": [{"name": "f", "parameters": {"properties": {"<": {}}}}]},
        {"type": "tool_calls", "choice": "auto", "tools": [{"name": "f", "parameters": {"required": ["z"]}}]},
        {"type": "tool_calls", "choice": "auto", "tools": [{"name": "f", "parameters": {"foo": 1}}]},
    ],
    ids=json.dumps,
)
def test_a_structural_tag_that_is_wrong_is_refused(tag: Any) -> None:
    with pytest.raises(ConstraintInvalid):
        normalise(ConstraintKind.STRUCTURAL_TAG, json.dumps(tag))


def test_too_large_a_constraint_is_refused() -> None:
    for kind in (ConstraintKind.JSON_SCHEMA, ConstraintKind.REGEX, ConstraintKind.EBNF, ConstraintKind.STRUCTURAL_TAG):
        with pytest.raises(ConstraintInvalid, match=str(MAX_TEXT_BYTES)):
            normalise(kind, "x" * (MAX_TEXT_BYTES + 1))


def test_equal_schemas_become_equal_texts_and_properties_keep_their_order() -> None:
    one = normalise(ConstraintKind.JSON_SCHEMA, '{"properties": {"b": {}, "a": {}}}')
    assert one == normalise(ConstraintKind.JSON_SCHEMA, '{ "properties":{"b":{},\n"a":{} } }')
    assert one.text == '{"properties":{"b":{},"a":{}}}'


def test_every_kind_has_its_engine_and_versions_change_the_id() -> None:
    assert set(TABLE) == set(ConstraintKind)
    assert all(normalise(kind, text).engine == engine_of(kind) for kind, text in [(ConstraintKind.REGEX, "a")])
    assert (
        constraint_id({"llguidance": "1"}) == constraint_id({"llguidance": "1"}) != constraint_id({"llguidance": "2"})
    )


def test_a_constraint_travels_unchanged() -> None:
    for kind, text in [
        (ConstraintKind.JSON_OBJECT, ""),
        (ConstraintKind.REGEX, "a+"),
        (ConstraintKind.EBNF, 'root ::= "a"'),
    ]:
        assert kind_and_text(constraint_message(normalise(kind, text)), "f") == (kind, text)
    for message in (sampling_pb2.Constraint(), sampling_pb2.Constraint(json_object=False)):
        with pytest.raises(ConstraintInvalid):
            kind_and_text(message, "f")
