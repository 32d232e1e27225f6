"""From a checked constraint to a grammar of llguidance."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from llguidance import LLMatcher
from shoal_common.constraints import ConstraintKind, OutputConstraint
from shoal_common.constraints.ebnf import parse_ebnf
from shoal_common.constraints.json_schema import compact, with_writable_patterns
from shoal_common.constraints.tool_calls import parse_tag

from shoal_engine.constraints.ebnf_grammar import ebnf_to_lark
from shoal_engine.constraints.tool_grammar import tag_to_lark

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
"""Between the tokens of JSON. Bounded: a model may otherwise write blanks until its last token."""
ESCAPES = '"\\nrbtf'
"""What may follow a backslash. Not `u`, nor `/`: a name must have one spelling, or it passes for another one."""
JSON_OPTIONS: JsonCompileOptions = {"whitespace_pattern": WHITESPACE, "json_allowed_escapes": ESCAPES}


def grammar_of(constraint: OutputConstraint, special_ids: Mapping[str, int]) -> str:
    """The grammar's text. `special_ids` are the tokenizer's. Raises ConstraintInvalid."""
    text = constraint.text
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            return json_grammar(text)
        case ConstraintKind.JSON_OBJECT:
            return json_grammar('{"type":"object"}')
        case ConstraintKind.REGEX:
            return str(LLMatcher.grammar_from_regex(text))
        case ConstraintKind.EBNF:
            return str(LLMatcher.grammar_from_lark(ebnf_to_lark(parse_ebnf(text, constraint.kind.value))))
        case ConstraintKind.STRUCTURAL_TAG:
            tag = parse_tag(text, constraint.kind.value)
            return str(LLMatcher.grammar_from_lark(tag_to_lark(tag, special_ids, JSON_OPTIONS)))


def json_grammar(schema: str) -> str:
    """Of a schema's text."""
    # The engine takes options from objects only; these two have their own spelling.
    text = {"true": "{}", "false": '{"enum":[]}'}.get(schema) or compact(with_writable_patterns(json.loads(schema)))
    return str(LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS))
