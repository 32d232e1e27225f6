r"""What is said about regular expressions without an engine, and about bounds that several schemas give one value."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal_common.constraints import ConstraintInvalid, ConstraintKind, normalise
from shoal_common.constraints.patterns import writable

NUMBER = {"type": "number"}
NEAR: list[dict[str, Any]] = [
    {"allOf": [{**NUMBER, "exclusiveMinimum": 1}, {"maximum": 1.5}]},
    {"allOf": [{"allOf": [{**NUMBER, "maximum": 1.5}]}], "exclusiveMinimum": 1},
    {**NUMBER, "exclusiveMinimum": 1, "$ref": "#/$defs/a", "$defs": {"a": {"maximum": 1.5}}},
    {**NUMBER, "exclusiveMaximum": 2, "anyOf": [{"minimum": 1.5}, {"maximum": 0}]},
    {"anyOf": [{**NUMBER, "exclusiveMaximum": 2, "anyOf": [{"minimum": 1.5}]}, {"type": "null"}]},
    {
        "type": "object",
        "allOf": [{"properties": {"a": {"exclusiveMinimum": 1}}}, {"properties": {"a": {"maximum": 1.5}}}],
    },
    {
        "type": "object",
        "properties": {"a/b": {"exclusiveMinimum": 1}},
        "allOf": [{"additionalProperties": {"maximum": 1.5}}, {"patternProperties": {"b$": {"maximum": 7}}}],
    },
    {"allOf": [{"type": "array", "prefixItems": [{"maximum": 1.5}]}, {"items": {"exclusiveMinimum": 1}}]},
    {
        "type": "array",
        "items": {"allOf": [{"$ref": "#/$defs/a"}, {"exclusiveMinimum": 1}]},
        "$defs": {"a": {"maximum": 1.5}},
    },
]
APART: list[dict[str, Any]] = [
    {"anyOf": [{**NUMBER, "exclusiveMinimum": 1}, {**NUMBER, "maximum": 1.5}]},
    {"type": "integer", "allOf": [{"exclusiveMinimum": 1}, {"maximum": 2.5}, {"maximum": 1.5}]},
    {"type": "object", "properties": {"a": {"exclusiveMinimum": 1}, "b": {"maximum": 1.5}}},
    {"allOf": [{**NUMBER, "exclusiveMinimum": 1}, {"maximum": 2}, {"minimum": 1.5}]},
    {"allOf": [{**NUMBER, "exclusiveMinimum": 0.5}, {"maximum": 1}]},
]


@pytest.mark.parametrize("schema", NEAR)
def test_bounds_that_the_engine_widens_are_found_wherever_they_meet(schema: dict[str, Any]) -> None:
    with pytest.raises(ConstraintInvalid, match="less than 1 from the other bound"):
        normalise(ConstraintKind.JSON_SCHEMA, json.dumps(schema))


@pytest.mark.parametrize("schema", APART)
def test_bounds_that_do_not_meet_are_taken(schema: dict[str, Any]) -> None:
    normalise(ConstraintKind.JSON_SCHEMA, json.dumps(schema))


def test_schemas_put_together_in_too_many_ways_are_refused() -> None:
    many: dict[str, Any] = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{j}"} for j in range(i)]} for i in range(1, 120)}
    many["d0"] = True
    items: dict[str, Any] = {"type": "array", "prefixItems": [{"$ref": "#/$defs/d118"}] * 900}
    schema = {**items, "$defs": {**many, "x": {"exclusiveMinimum": 0, "maximum": 0.5}}}
    with pytest.raises(ConstraintInvalid, match="too many ways"):
        normalise(ConstraintKind.JSON_SCHEMA, json.dumps(schema))


@pytest.mark.parametrize(
    "expression", [r"\w*" * 1001, "(a|)" * 1001, "(a{1000}){1000}", "((a{0,99}){99}b){99}", "x" * 140_000]
)
def test_an_expression_that_costs_too_much_is_refused_before_it_is_compiled(expression: str) -> None:
    with pytest.raises(ConstraintInvalid, match="parts"):
        normalise(ConstraintKind.REGEX, expression)
    for schema in ({"pattern": expression}, {"patternProperties": {expression: True}}):
        with pytest.raises(ConstraintInvalid, match="parts"):
            normalise(ConstraintKind.JSON_SCHEMA, json.dumps(schema))


def test_the_expressions_of_one_constraint_are_bounded_together() -> None:
    one: dict[str, Any] = {"pattern": r"\w*" * 400}
    several = {"type": "object", "properties": {str(i): one for i in range(7)}}
    with pytest.raises(ConstraintInvalid, match="too many optional parts"):
        normalise(ConstraintKind.JSON_SCHEMA, json.dumps(several))
    few = {"type": "object", "properties": {str(i): one for i in range(3)}}
    normalise(ConstraintKind.JSON_SCHEMA, json.dumps(few))
    tag = {"type": "tool_calls", "choice": "any", "tools": [{"name": f"t{i}", "parameters": few} for i in range(3)]}
    with pytest.raises(ConstraintInvalid, match="too many optional parts"):
        normalise(ConstraintKind.STRUCTURAL_TAG, json.dumps(tag))


@pytest.mark.parametrize(
    "expression", ["(ab|c){0,40}", ".{0,100000}", r"A{99999}", "|".join(f"w{i}" for i in range(9000))]
)
def test_large_expressions_that_cost_little_are_taken(expression: str) -> None:
    normalise(ConstraintKind.REGEX, expression)


W = r"&&[^\x00-\x07\x0b\x0e-\x1f\x7f]"


@pytest.mark.parametrize(
    ("pattern", "made"),
    [
        ("^a+$", "^a+$"),
        (r"\d\.\w{2}", r"\d\.\w{2}"),
        ('[^"]*', f'[[^"]{W}]*'),
        (r"\x01\n\u{1f}", rf"[\x01{W}]\n[\u{{1f}}{W}]"),
        (r"\S\x41\\x01", rf"[\S{W}]\x41\\x01"),
        (r"[]a][^]b][[:alpha:]\]]c", rf"[[]a]{W}][[^]b]{W}][[[:alpha:]\]]{W}]c"),
        (r"([a&&[^b]])?", rf"([[a&&[^b]]{W}])?"),
        (r"\p{Cc}\pL", rf"[\p{{Cc}}{W}][\pL{W}]"),
        ("[", f"[[{W}]"),
        ("\\", "\\"),
    ],
)
def test_classes_lose_what_json_cannot_write(pattern: str, made: str) -> None:
    assert writable(pattern) == made


@given(st.text(alphabet="ab[]^\\-x0 1{}(),*+?|&\x01", max_size=20))
def test_any_expression_can_be_read(pattern: str) -> None:
    taken = re.sub(re.escape(W), "", writable(pattern)).replace("[", "").replace("]", "")
    assert taken == pattern.replace("[", "").replace("]", "")
