"""Every finished constrained answer parses and validates; one that is cut is a beginning of one."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shoal_common.constraints import ConstraintKind
from support.grammar_walk import EOS, matcher, text_of, walk

SEEDS = range(4)
ITEM = {"type": "object", "properties": {"id": {"type": "integer"}, "tag": {"enum": ["a", "b", 3, None]}}}
SCHEMAS: list[Any] = [
    True,
    {},
    {"type": "null"},
    {"type": ["string", "boolean"]},
    {"const": {"a": [1, "x"]}},
    {"enum": ["a", 1, None, [1, 2], {"k": True}]},
    {"type": "integer", "minimum": -7, "exclusiveMaximum": 100},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 2.5},
    {"type": "integer", "multipleOf": 3},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "string", "pattern": "^[a-z]{2}-[0-9]+$"},
    {"type": "string", "pattern": "b+c"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
    {"type": "array", "items": ITEM},
    {"type": "object"},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}, "required": ["b"]},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"type": "object", "patternProperties": {"^x_": {"type": "null"}}, "additionalProperties": False},
    {"type": "object", "properties": {'ä"\\': {"type": "null"}}, "required": ['ä"\\'], "additionalProperties": False},
    {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "null"}}]},
    {"oneOf": [{"type": "string"}, {"type": "integer"}]},
    {"allOf": [{"type": "integer", "minimum": 5}, {"maximum": 9}]},
    {
        "type": "object",
        "properties": {"n": {"$ref": "#/$defs/n"}},
        "$defs": {"n": {"type": "integer"}},
        "required": ["n"],
    },
    {
        "type": "object",
        "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["v", "next"],
        "additionalProperties": False,
    },
    {"type": "object", "properties": {"t": {"type": "array", "items": {"$ref": "#"}}}, "additionalProperties": False},
    {
        "title": "annotated",
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"a": {"type": "string", "description": "d", "default": "x", "examples": ["y"]}},
    },
]


def check(schema: Any, seed: int) -> bool:
    tokens, is_complete = walk(matcher(ConstraintKind.JSON_SCHEMA, json.dumps(schema)), seed)
    if is_complete:
        value = json.loads(text_of(tokens))
        jsonschema.validate(value, schema, cls=jsonschema.Draft202012Validator)
    return is_complete


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda one: json.dumps(one)[:60])
def test_a_finished_answer_validates(schema: Any) -> None:
    assert any([check(schema, seed) for seed in SEEDS]), "some answer comes to its end"


WRITABLE = st.text(alphabet=st.characters(exclude_categories=("Cs", "Cc")), max_size=3)
VALUES = st.one_of(st.integers(-9, 99), WRITABLE, st.none(), st.booleans())


def schemas() -> st.SearchStrategy[Any]:
    scalars: list[st.SearchStrategy[Any]] = [
        st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "string", "maxLength": 4}]),
        st.builds(
            lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
            st.integers(-1000, 1000),
            st.integers(0, 500),
        ),
        st.lists(VALUES, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    ]

    def inside(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        arrays = st.builds(
            lambda items, low, more: {"type": "array", "items": items, "minItems": low, "maxItems": low + more},
            children,
            st.integers(0, 2),
            st.integers(0, 2),
        )
        objects = st.builds(
            lambda named, closed: {
                "type": "object",
                "properties": named,
                "required": [name for index, name in enumerate(named) if index % 2 == 0],
                **({"additionalProperties": False} if closed else {}),
            },
            st.dictionaries(st.text(min_size=1, max_size=4), children, max_size=3),
            st.booleans(),
        )
        unions = st.lists(children, min_size=1, max_size=3).map(lambda options: {"anyOf": options})
        return st.one_of(arrays, objects, unions)

    return st.recursive(st.one_of(scalars), inside, max_leaves=6)


@settings(max_examples=60, deadline=None)
@given(schema=schemas(), seed=st.integers(0, 1000))
def test_a_finished_answer_to_any_schema_validates(schema: Any, seed: int) -> None:
    check(schema, seed)


@pytest.mark.long
@settings(max_examples=2000, deadline=None)
@given(schema=schemas(), seed=st.integers(0, 1000))
def test_a_finished_answer_to_very_many_schemas_validates(schema: Any, seed: int) -> None:
    check(schema, seed)


@pytest.mark.parametrize("pattern", ["(ab|c)+d?", "[0-9]{3}-[a-z]*", "a.c", "(?i)yes|no", "[0-9]+\\.[0-9]{2}", "ä+ß?"])
def test_a_finished_text_matches_the_expression_as_a_whole(pattern: str) -> None:
    for seed in SEEDS:
        tokens, is_complete = walk(matcher(ConstraintKind.REGEX, pattern), seed, 60)
        assert re.fullmatch(pattern, text_of(tokens)) or not is_complete


def test_what_is_cut_is_a_beginning_of_what_would_have_come() -> None:
    schema = json.dumps(SCHEMAS[-3])
    whole, is_complete = walk(matcher(ConstraintKind.JSON_SCHEMA, schema), 3)
    assert is_complete
    for cut in range(len(whole)):
        at = matcher(ConstraintKind.JSON_SCHEMA, schema)
        assert all(at.commit(token) for token in whole[:cut])
        # Any other path from there also comes to an end that validates.
        rest, is_complete = walk(at, cut)
        if is_complete:
            jsonschema.validate(json.loads(text_of(whole[:cut] + rest)), SCHEMAS[-3])


def test_an_object_is_an_object() -> None:
    for seed in SEEDS:
        tokens, is_complete = walk(matcher(ConstraintKind.JSON_OBJECT, ""), seed)
        assert not is_complete or isinstance(json.loads(text_of(tokens)), dict)
        assert EOS not in tokens[:-1]


@pytest.mark.parametrize("text", ["<think>x</think>", "a<｜end▁of▁sentence｜>b", "<｜User｜>", "x｜DSML｜"])
def test_where_only_the_name_of_a_special_token_fits_it_is_spelled(text: str) -> None:
    for kind, constraint in (
        (ConstraintKind.REGEX, re.escape(text)),
        (ConstraintKind.JSON_SCHEMA, json.dumps({"const": text})),
    ):
        tokens, is_complete = walk(matcher(kind, constraint), 0)
        assert is_complete
        said = text_of(tokens)
        assert (said if kind is ConstraintKind.REGEX else json.loads(said)) == text
