"""What each kind of constraint lets through, and what it does not."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import jsonschema
import pytest
from deepseek_recipe import (
    ChatCompletionRequest,
    ConversionOptions,
    InferenceChunk,
    InferenceFinishReason,
    StreamProcessor,
    Tokenizer,
)
from shoal_common.constraints import ConstraintKind
from support.grammar_walk import DSML, EOS, NANO, THINK_END, allowed, ids_of, matcher, takes, walk

CALLS_END = "</｜DSML｜ calls>"
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["c", "cf"]},
        "days": {"$ref": "#/$defs/days"},
        "any": {},
        "code": {"type": "string", "pattern": "^x+$"},
        "short": {"type": "string", "minLength": 1, "maxLength": 3},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"days": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#/$defs/days"}}]}},
}
TOOLS: list[dict[str, Any]] = [
    {"name": "weather", "parameters": CITY},
    {"name": "loose"},
    {"name": "none", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
]


def tag(choice: str, **more: Any) -> str:
    return json.dumps({"type": "tool_calls", "choice": choice, "tools": TOOLS, **more})


def parameter(name: str, value: str, is_text: bool = True) -> str:
    kind = "true" if is_text else "false"
    return f'<｜DSML｜ parameter name="{name}" string="{kind}">{value}</｜DSML｜ parameter>\n'


def invoke(name: str, *parameters: str) -> str:
    return f'<｜DSML｜ invoke name="{name}">\n{"".join(parameters)}</｜DSML｜ invoke>\n'


GOOD = [
    invoke("weather", parameter("city", "a </b\n")),
    invoke("weather", parameter("city", "x"), parameter("unit", "cf"), parameter("days", "[1, [2]]", False)),
    invoke("weather", parameter("city", ""), parameter("any", "text"), parameter("code", '"xx"', False)),
    invoke("weather", parameter("city", "x"), parameter("any", '{"a": 1}', False), parameter("short", "abc")),
    invoke("loose"),
    invoke("loose", parameter("a", "t"), parameter("b", "1.5", False)),
    invoke("none") + invoke("weather", parameter("city", "x")),
]
BAD = [
    "",
    invoke("weather"),
    invoke("storm"),
    invoke("weather", parameter("unit", "c"), parameter("city", "x")),
    invoke("weather", parameter("city", "x"), parameter("unit", "f")),
    invoke("weather", parameter("city", "x"), parameter("days", '"1"', False)),
    invoke("weather", parameter("city", "x"), parameter("short", "abcd")),
    invoke("weather", parameter("city", "x"), parameter("code", "xx")),
    invoke("none", parameter("a", "b")),
]


@pytest.mark.parametrize("calls", GOOD)
def test_calls_that_fit_their_tools_are_taken(calls: str) -> None:
    assert takes(matcher(ConstraintKind.STRUCTURAL_TAG, tag("required")), calls + CALLS_END)


@pytest.mark.parametrize("calls", BAD)
def test_calls_that_do_not_fit_are_not(calls: str) -> None:
    assert not takes(matcher(ConstraintKind.STRUCTURAL_TAG, tag("required")), calls + CALLS_END)


def test_only_one_call_comes_where_calls_are_not_parallel() -> None:
    one, two = invoke("none") + CALLS_END, invoke("none") * 2 + CALLS_END
    assert takes(matcher(ConstraintKind.STRUCTURAL_TAG, tag("required", parallel=False)), one)
    assert not takes(matcher(ConstraintKind.STRUCTURAL_TAG, tag("required", parallel=False)), two)


@pytest.mark.parametrize(
    ("text", "is_taken"),
    [
        ("", True),
        ("a < b, and </｜ too", True),
        ("hi\n\n<｜DSML｜ calls>\n" + invoke("none") + CALLS_END, True),
        ("<｜DSML｜ calls>\n" + invoke("none") + CALLS_END, True),
        ("hi<｜DSML｜ calls>\n" + invoke("none") + CALLS_END, False),
        ("hi\n\n<｜DSML｜ calls>\n" + CALLS_END, False),
        ("hi\n\n<｜DSML｜ calls>\n" + invoke("storm") + CALLS_END, False),
        ("hi\n\n<｜DSML｜ calls>\n" + invoke("none") + CALLS_END + "more", False),
        ("</think>", False),
    ],
)
def test_text_may_end_in_calls(text: str, is_taken: bool) -> None:
    assert takes(matcher(ConstraintKind.STRUCTURAL_TAG, tag("auto")), text) is is_taken


def test_text_beside_calls_may_be_held_to_a_schema() -> None:
    block = "\n\n<｜DSML｜ calls>\n" + invoke("none") + CALLS_END
    for text, is_taken in [
        ("{}", True),
        (block, True),
        ('{"a":1}' + block, True),
        ("hi", False),
        ("hi" + block, False),
    ]:
        at = matcher(ConstraintKind.STRUCTURAL_TAG, tag("auto", content={"type": "object"}))
        assert takes(at, text) is is_taken


def test_the_spelling_of_a_tag_s_token_cannot_come_out_of_other_tokens() -> None:
    at = matcher(ConstraintKind.STRUCTURAL_TAG, tag("auto"))
    spelled = [token for char in "｜DSML｜" for token in ids_of(char)]
    assert DSML not in spelled
    assert not all(at.accept(token) for token in spelled)


def test_random_calls_are_read_back_with_arguments_that_validate() -> None:
    """By the official parser, as the gateway reads them."""
    tools = [
        {"type": "function", "function": {"name": "weather", "description": "", "parameters": CITY}},
        {"type": "function", "function": {"name": "none", "description": "", "parameters": {"type": "object"}}},
    ]
    body = {
        "model": "DeepSeek-V4.1-Flash",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": tools,
        "tool_choice": "required",
        "reasoning_effort": "none",
    }
    converted = ChatCompletionRequest(body).convert(ConversionOptions())
    read = 0
    for seed in range(12):
        tokens, is_complete = walk(matcher(ConstraintKind.STRUCTURAL_TAG, tag("required", tools=TOOLS[::2])), seed, 900)
        if not is_complete:
            continue
        processor = StreamProcessor(
            ChatCompletionRequest.chunk_generator(converted, "", ""),
            converted.parsing_options,
            Tokenizer.from_file(str(NANO / "tokenizer.json")),
        )
        chunks = processor.push(InferenceChunk.ready())
        for token in tokens[:-1]:
            chunks += processor.push(InferenceChunk.tokens([token]))
        chunks += processor.push(InferenceChunk.finish(InferenceFinishReason.Stop)) + processor.finish()
        calls: dict[int, dict[str, str]] = {}
        for chunk in chunks:
            for part in json.loads(chunk.to_json())["choices"][0]["delta"].get("tool_calls") or ():
                call = calls.setdefault(part["index"], {"name": "", "arguments": ""})
                call["name"] += part["function"].get("name") or ""
                call["arguments"] += part["function"].get("arguments") or ""
        assert calls
        for call in calls.values():
            schema = CITY if call["name"] == "weather" else TOOLS[2]["parameters"]
            jsonschema.validate(json.loads(call["arguments"]), schema)
            read += 1
    assert read >= 3


# Grammars over short texts of these characters, with a regular expression for the same language.
EBNF = [
    ('root ::= "ab" | "a"', "ab|a"),
    ('root ::= [ab]+ "b"', "[ab]+b"),
    ('root ::= x x?\nx ::= "a" | "ab" | "b"{2,3}', "(a|ab|bb|bbb)(a|ab|bb|bbb)?"),
    ('root ::= ([^b] "b")* # comment\n', "([^b]b)*"),
    ('root ::= [a-b]{2} | "" | "\\x63"', "[ab]{2}||c"),
    ('root ::= y "c" | y\ny ::= [ab]*', "[ab]*c?"),
    ('root ::= (("a"?)*)+ "c"', "a*c"),
    ('root ::= "if" | [a-c]+', "if|[a-c]+"),
]


@pytest.mark.parametrize(("grammar", "pattern"), EBNF)
def test_a_grammar_takes_exactly_its_language(grammar: str, pattern: str) -> None:
    for length in range(5):
        for chars in itertools.product("abc", repeat=length):
            text = "".join(chars)
            at = matcher(ConstraintKind.EBNF, grammar)
            is_taken = all(at.accept(token) for char in text for token in ids_of(char)) and at.accept(EOS)
            assert is_taken is bool(re.fullmatch(pattern, text)), text


def test_a_grammar_may_nest() -> None:
    grammar = 'root ::= e\ne ::= e "+" e | "(" e ")" | [0-9]+'
    for text, is_taken in [("(1+22)+3", True), ("((1))", True), ("(1", False), ("1+", False)]:
        assert takes(matcher(ConstraintKind.EBNF, grammar), text) is is_taken


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (ConstraintKind.JSON_SCHEMA, '{"type":"string"}'),
        (ConstraintKind.REGEX, "(?s:.*)"),
        (ConstraintKind.EBNF, "root ::= [^a]*"),
        (ConstraintKind.STRUCTURAL_TAG, tag("auto")),
    ],
)
def test_special_tokens_are_no_text(kind: ConstraintKind, text: str) -> None:
    at = matcher(kind, text)
    if kind is ConstraintKind.JSON_SCHEMA:
        assert at.accept(ids_of('"')[0])
    ids = set(allowed(at).tolist())
    assert len(ids) > 1000
    assert not ids & {0, 2, 3, 4, 5, THINK_END, DSML, 8, 9, *range(3569, 4096)}
    # The end of the sequence exactly where the text is complete.
    assert (EOS in ids) is (kind is not ConstraintKind.JSON_SCHEMA)


def test_the_end_is_allowed_exactly_where_the_text_is_complete() -> None:
    at = matcher(ConstraintKind.JSON_SCHEMA, '{"type":"integer"}')
    assert EOS not in allowed(at)
    for char, may_end in [("-", False), ("1", True), ("0", True)]:
        assert at.accept(ids_of(char)[0])
        assert (EOS in allowed(at)) is may_end
    assert at.accept(EOS)
    assert allowed(at).tolist() == [EOS]
    assert not at.accept(ids_of("1")[0])
