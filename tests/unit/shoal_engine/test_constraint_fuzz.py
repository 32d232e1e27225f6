"""Whatever a caller sends as a constraint is compiled or refused, and what is said under it validates."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shoal_common.constraints import ConstraintInvalid, ConstraintKind, OutputConstraint
from shoal_engine.constraint import Matcher
from shoal_engine.constraints import CompilerLimits, ConstraintCompiler, ConstraintFailed
from support.grammar_walk import compiler, grammar_tokenizer, takes, text_of, walk

SCHEMA, REGEX, EBNF, TAG = (
    ConstraintKind.JSON_SCHEMA,
    ConstraintKind.REGEX,
    ConstraintKind.EBNF,
    ConstraintKind.STRUCTURAL_TAG,
)
NUMBERS = st.one_of(
    st.integers(-20, 20),
    st.sampled_from(
        [2**53, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30, -(10**400), 0.1, -1e-7, 5e-324, 1e308]
    ),
    st.floats(allow_nan=False, allow_infinity=False),
)
NAMES = st.sampled_from(["a", "b", "", "\u00e4", "\n", "\x01", '"', "\\", "/", "$ref", "x_1", "\U0001f600"])
TEXTS = st.one_of(NAMES, st.text(max_size=4))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=4,
)
PATTERNS = st.sampled_from(
    [
        "^a",
        "b$",
        "[a-c]{2,3}",
        r"^\d+$",
        r"\w",
        r"\s",
        ".",
        "(",
        "a{99999}",
        "(a|b)*c",
        "(?=a)",
        "\x00",
        "^\x01$",
        "",
        "^$",
    ]
)
COUNTS = st.one_of(st.integers(0, 3), st.sampled_from([-1, 10**5, 10**6, 2**64, 1.0, 2.5, True]))
TYPES = st.sampled_from(["object", "array", "string", "number", "integer", "boolean", "null", "thing"])


def keywords(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Schemas of any keywords, most of the right type."""
    maps = st.dictionaries(NAMES, children, max_size=3)
    lists = st.lists(children, max_size=3)
    known: dict[str, st.SearchStrategy[Any]] = {
        "type": st.one_of(TYPES, TYPES, st.lists(TYPES, max_size=2)),
        "enum": st.lists(VALUES, max_size=3),
        "const": VALUES,
        "properties": maps,
        "patternProperties": st.dictionaries(PATTERNS, children, max_size=2),
        "required": st.lists(NAMES, max_size=3),
        "additionalProperties": children,
        "items": children,
        "additionalItems": children,
        "prefixItems": lists,
        "pattern": PATTERNS,
        "format": st.sampled_from(["date", "uuid", "email", "ipv4", "time", "unheard-of"]),
        "$ref": st.sampled_from(["#", "#/$defs/a", "#/properties/a", "#/$defs/%61", "http://x/y", "#a", ""]),
        "$defs": maps,
        "$id": TEXTS,
        "$schema": TEXTS,
        "default": VALUES,
        "title": VALUES,
        **dict.fromkeys(("anyOf", "oneOf", "allOf"), lists),
        **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), NUMBERS),
        **dict.fromkeys(("minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength"), COUNTS),
    }
    some = st.lists(st.sampled_from(sorted(known)), max_size=4, unique=True)
    right = some.flatmap(lambda names: st.fixed_dictionaries({name: known[name] for name in names}))
    wrong = st.dictionaries(st.sampled_from([*known, "unknown", "x-guidance"]), VALUES, min_size=1, max_size=1)
    return st.one_of(right, right, right, st.builds(lambda a, b: {**a, **b}, right, wrong))


SCHEMAS: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.booleans(), st.just({}), keywords(st.booleans())), keywords, max_leaves=5
)


@cache
def patient_compiler() -> ConstraintCompiler:
    """Of the nano model. A busy machine spends the usual limit on a harmless text; the limit has a test of its own."""
    return ConstraintCompiler(grammar_tokenizer(), CompilerLimits(compile_s=50.0))


def compiled(kind: ConstraintKind, text: str) -> Matcher | None:
    """None: refused, by an error that names the field and says why."""
    future = patient_compiler().compile(OutputConstraint(kind=kind, text=text, engine=""))
    error = future.exception(60)
    if error is None:
        return future.result().matcher()
    assert isinstance(error, ConstraintInvalid)
    assert error.violations[0].field.startswith(f"constraint.{kind.value}")
    assert error.violations[0].description
    return None


def check(schema: Any, seed: int) -> bool:
    """Whether it is taken and some answer came to its end."""
    return walks(SCHEMA, json.dumps(schema), seed, schema)


def walks(kind: ConstraintKind, text: str, seed: int, schema: Any = True) -> bool:
    """As `check`, of any kind; what is said under a schema validates against it."""
    at = compiled(kind, text)
    if at is None:
        return False
    try:
        tokens, is_complete = walk(at, seed, 150)
    except ConstraintFailed:
        return False
    if is_complete and kind is SCHEMA:
        value = json.loads(text_of(tokens))
        jsonschema.Draft202012Validator(schema).validate(value)
    return is_complete


CHARS = st.sampled_from(
    [*'abx01()[]{}|?*+.^$-,:=\\"/&~#%<> \n\x00', "root ::= ", "\\d", "\\p{L}", "{2,5}", "\u00e4", "\ud800"]
)
WORDS = st.lists(CHARS, max_size=12).map("".join)
TAGS = st.builds(
    lambda schema, choice: json.dumps(
        {"type": "tool_calls", "choice": choice, "tools": [{"name": "t", "parameters": schema}]}
    ),
    SCHEMAS,
    st.sampled_from(["auto", "required", "no", 1]),
)
ANY = st.one_of(
    st.tuples(st.just(REGEX), WORDS),
    st.tuples(st.just(EBNF), WORDS.map("root ::= {}".format)),
    st.tuples(st.just(TAG), TAGS),
    st.tuples(st.sampled_from([SCHEMA, TAG]), WORDS),
)


@settings(max_examples=150, deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 100))
def test_any_schema_is_refused_or_obeyed(schema: Any, seed: int) -> None:
    check(schema, seed)


@settings(max_examples=120, deadline=None)
@given(asked=ANY)
def test_any_text_is_refused_or_compiled(asked: tuple[ConstraintKind, str]) -> None:
    walks(*asked, seed=1)


@pytest.mark.long
@settings(max_examples=6000, deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 100))
def test_very_many_schemas_are_refused_or_obeyed(schema: Any, seed: int) -> None:
    check(schema, seed)


@pytest.mark.long
@settings(max_examples=4000, deadline=None)
@given(asked=ANY)
def test_very_many_texts_are_refused_or_compiled(asked: tuple[ConstraintKind, str]) -> None:
    walks(*asked, seed=1)


def chain(count: int) -> dict[str, Any]:
    """Of references, each to the next."""
    links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{count}": {"type": "null"}}}


RULES = "\n".join(f'r{i} ::= "x"? r{i + 1}?' for i in range(2500))
"""Each of these has ended the process once: the engine's stack ran over."""
DEEP: list[tuple[ConstraintKind, str]] = [
    (SCHEMA, json.dumps({"const": -(2**63)})),
    (SCHEMA, json.dumps({"enum": [[-(2.0**63)]]})),
    (SCHEMA, json.dumps(chain(5000))),
    (EBNF, f'root ::= r0\n{RULES}\nr2500 ::= "a"'),
    (EBNF, 'root ::= "a"' + "+" * 5000),
    (EBNF, "root ::= " + "(" * 60 + '"a"' + ")++++" * 60),
]


@pytest.mark.parametrize(("kind", "text"), DEEP, ids=lambda one: str(one)[:30])
def test_what_has_no_end_inside_the_engine_ends_no_process(kind: ConstraintKind, text: str) -> None:
    walks(kind, text, seed=1)


REFUSED: list[tuple[Any, str]] = [
    ({"const": 10**30}, "2 ** 53"),
    ({"minimum": 2**63}, "2 ** 53"),
    ({"const": [{"a": 8.034496600493813e-10}]}, "15 digits"),
    ({"const": "a\x01"}, "control"),
    ({"multipleOf": 0}, "positive"),
    ({"minLength": None}, "whole number"),
    ({"pattern": 1}, "string"),
    ({"type": ["null", "null"]}, "type"),
    ({"required": ["a", "a"]}, "once"),
    ({"type": "array", "prefixItems": [{}], "additionalItems": False}, "additionalItems"),
    ({"type": "object", "minProperties": 2}, "minProperties"),
    ({"oneOf": [{"minimum": 1}, {"minimum": 2}]}, "use anyOf"),
]


@pytest.mark.parametrize(("schema", "said"), REFUSED, ids=lambda one: str(one)[:30])
def test_what_cannot_be_held_to_exactly_is_refused_and_said(schema: Any, said: str) -> None:
    with pytest.raises(ConstraintInvalid, match=re.escape(said)):
        compiler().compile(OutputConstraint(kind=SCHEMA, text=json.dumps(schema), engine="")).result(60)


def test_a_member_given_twice_is_refused() -> None:
    with pytest.raises(ConstraintInvalid, match="twice"):
        compiler().compile(OutputConstraint(kind=SCHEMA, text='{"type":"null","type":"object"}', engine="")).result(60)


OPEN = {"type": "object", "properties": {"a": {"type": "integer"}, "b/": {}}, "required": ["a"]}
SPELLINGS = [
    ('{"a":1}', True),
    ('{"\\u0061":"x"}', False),
    ('{"a":1,"\\u0061":"x"}', False),
    ('{"a":1,"b\\/":2}', False),
    ('{"a":1,"b/":2}', True),
    ('{"a":1,"b":2,"b":3}', True),
]


@pytest.mark.parametrize(("answer", "is_taken"), SPELLINGS)
def test_a_name_has_one_spelling(answer: str, is_taken: bool) -> None:
    at = compiled(SCHEMA, json.dumps(OPEN))
    assert at is not None
    assert takes(at, answer) is is_taken
