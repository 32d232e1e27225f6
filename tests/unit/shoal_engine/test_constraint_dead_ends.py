"""A schema is refused before anything is generated where no token could come, and patterns mean what they say."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from shoal_common.constraints import ConstraintInvalid, ConstraintKind
from support.grammar_walk import matcher, takes, text_of, walk

NONE = {"type": "integer", "minimum": 4, "maximum": 5.5, "multipleOf": 0.3}
OBJECT: dict[str, Any] = {"type": "object", "additionalProperties": False}
WHOLE = {"type": "integer", "minimum": 4, "maximum": 5.5}
CONTROL = {"type": "string", "pattern": r"^a\x01$"}
DEAD: list[dict[str, Any]] = [
    NONE,
    CONTROL,
    {**OBJECT, "properties": {"a": NONE}},
    {**OBJECT, "properties": {"a": CONTROL}, "required": ["a"]},
    {"type": "array", "items": NONE},
    {"type": "array", "items": {"$ref": "#/$defs/x"}, "$defs": {"x": NONE}},
    {"type": "array", "items": {"anyOf": [NONE, {**NONE, "maximum": 5}]}},
    {"allOf": [{"properties": {"a": {"multipleOf": 0.3}}}, {"properties": {"a": WHOLE}}]},
    {**OBJECT, "patternProperties": {r"[^\s\S]": True}, "minProperties": 1},
    {
        **OBJECT,
        "properties": {"a": {"type": "null"}},
        "patternProperties": {"^a$": {"type": "null"}},
        "required": ["a"],
        "minProperties": 2,
    },
]
ALIVE: list[dict[str, Any]] = [
    {"anyOf": [NONE, {"type": "null"}]},
    {
        "type": "array",
        "items": {"anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}]},
        "$defs": {"x": NONE},
        "maxItems": 3,
    },
    {**OBJECT, "properties": {"a": CONTROL}},
    {"type": "integer", "minimum": 4, "maximum": 6.5, "multipleOf": 0.3},
    {"type": "integer", "minimum": 5, "maximum": 9, "multipleOf": 5},
    {"type": "string", "pattern": r"^(a\x01|b)$"},
]


@pytest.mark.parametrize("schema", DEAD)
def test_a_schema_that_no_answer_fits_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ConstraintInvalid):
        matcher(ConstraintKind.JSON_SCHEMA, json.dumps(schema))


def test_a_tool_whose_argument_has_no_value_is_refused() -> None:
    tools = [{"name": "f", "parameters": {**OBJECT, "properties": {"a": NONE}}}]
    with pytest.raises(ConstraintInvalid, match="/properties/a: no value fits"):
        matcher(ConstraintKind.STRUCTURAL_TAG, json.dumps({"type": "tool_calls", "choice": "required", "tools": tools}))


@pytest.mark.parametrize("schema", ALIVE)
def test_what_another_value_fits_is_not(schema: dict[str, Any]) -> None:
    for seed in range(8):
        _, is_complete = walk(matcher(ConstraintKind.JSON_SCHEMA, json.dumps(schema)), seed)
        assert is_complete


@pytest.mark.parametrize(
    "pattern",
    [
        r'^[^"]$',
        r'^[^"\\]$',
        r"^[^\n]$",
        r"^[\x00-\x20]$",
        r"^\S$",
        r"^\s$",
        r"^\W$",
        r"^.$",
        r"^[\x0b-\x0d]$",
        r"^[^a]$",
    ],
)
def test_an_escape_is_allowed_exactly_where_its_character_is(pattern: str) -> None:
    for char in '\\"\n\r\t\b\fa! é':
        at = matcher(ConstraintKind.JSON_SCHEMA, json.dumps({"type": "string", "pattern": pattern}))
        expected = re.search(pattern, char, re.ASCII) is not None
        assert takes(at, json.dumps(char, ensure_ascii=False)) is expected, char


@pytest.mark.parametrize("pattern", [r'^[^"]{1,9}$', r"^(a\x01|[^\\]b){2}$", r"^\S+ [^x\n]$"])
def test_random_strings_match_their_pattern(pattern: str) -> None:
    for seed in range(10):
        at = matcher(ConstraintKind.JSON_SCHEMA, json.dumps({"type": "string", "pattern": pattern}))
        tokens, is_complete = walk(at, seed)
        if is_complete:
            assert re.search(pattern, json.loads(text_of(tokens)), re.ASCII)


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ('"a"{0} "b"', "b"),
        ('("a" | "b"){0,0}', ""),
        ('"a"{0}+', ""),
        ('x "c"\nx ::= "c"{0}', "c"),
        ('("a"{0} | "d"){2} "x"', "dx"),
        ('("" | "a"{0})* "y"', "y"),
    ],
)
def test_what_is_repeated_no_times_is_nothing(grammar: str, text: str) -> None:
    assert takes(matcher(ConstraintKind.EBNF, f"root ::= {grammar}"), text)
    assert not takes(matcher(ConstraintKind.EBNF, f"root ::= {grammar}"), f"a{text}")
