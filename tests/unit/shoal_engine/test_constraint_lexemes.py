"""Repetitions of a grammar as lexemes, and the vocabulary in slices: faster masks, and the same to the bit."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray
from shoal_common.constraints import ConstraintKind, normalise
from shoal_common.constraints.ebnf import parse_ebnf, parts_of
from shoal_engine.constraints import CompilerLimits
from shoal_engine.constraints.compiler import engine_limits
from shoal_engine.constraints.ebnf_grammar import lark_of
from shoal_engine.constraints.ebnf_lexemes import Lexemes, find_lexemes
from shoal_engine.constraints.grammar import grammar_of
from support.grammar_walk import EOS, VOCAB, grammar_tokenizer, ids_of

Masks = list[NDArray[np.int32]]
LIMITS = engine_limits(CompilerLimits())
UNSLICED = grammar_tokenizer().engine.with_slices([])


def lexemes_of(grammar: str) -> Lexemes:
    return find_lexemes(parse_ebnf(grammar, "f"))


def matchers_of(grammar: str) -> tuple[LLMatcher, LLMatcher]:
    """By characters over the vocabulary as a whole, and by lexemes over it in slices."""
    found = lexemes_of(grammar)
    plain = LLMatcher.grammar_from_lark(lark_of(Lexemes(found.rules)))
    fast = LLMatcher.grammar_from_lark(lark_of(found))
    return matcher(UNSLICED, plain), matcher(grammar_tokenizer().engine, fast)


def matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    made = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    assert not made.is_error(), made.get_error()
    return made


def walked(one: LLMatcher, other: LLMatcher, seed: int, tokens: int) -> Iterator[tuple[bytes, bytes]]:
    """Masks of both along one random text."""
    choices = random.Random(seed)
    for _ in range(tokens):
        masks: Masks = [np.empty(VOCAB // 32, dtype=np.int32) for _ in "ab"]
        for engine, mask in zip((one, other), masks, strict=True):
            engine.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        assert one.is_error() == other.is_error()
        if one.is_error():
            return
        yield masks[0].tobytes(), masks[1].tobytes()
        ids = np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little"))
        ids = ids[ids != EOS]
        if not len(ids):
            return
        token = choices.choice(ids.tolist())
        assert one.consume_token(token)
        assert other.consume_token(token)


LEAVES = st.sampled_from(
    ['"e"', '"th"', '"s "', "[a-z]", "[est]", "[^e]", "[^a-z]", "[ ]", "[0-9]", '"\u00e9"', "[\u00e8e]", "a", "b", "b"]
)
BOUNDS = st.sampled_from(["", "", "?", "*", "*", "+", "+", "{2}", "{0,3}", "{2,}", "{1,2}"])


def _grouped(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    sequences = st.lists(st.builds("{}{}".format, inner, BOUNDS), min_size=1, max_size=3).map(" ".join)
    return st.lists(sequences, min_size=1, max_size=3).map(lambda options: f"({' | '.join(options)})")


RULES = st.recursive(LEAVES, _grouped, max_leaves=8)
GRAMMARS = st.builds(
    'root ::= {} | {} "x"\na ::= {} | "m"\nb ::= [a-d]* | "(" a ")"'.format, _grouped(RULES), RULES, RULES
)


def same_texts(one: LLMatcher, other: LLMatcher, chars: str, length: int) -> None:
    """Both take the same texts of these characters up to this length, as a whole and as a beginning."""
    assert one.is_accepting() == other.is_accepting()
    for char in chars if length else "":
        ids = ids_of(char)
        counts = [engine.try_consume_tokens(ids) for engine in (one, other)]
        assert (counts[0] == len(ids)) == (counts[1] == len(ids)), char
        if counts[0] == len(ids):
            same_texts(one, other, chars, length - 1)
        for engine, count in zip((one, other), counts, strict=True):
            engine.rollback(count)


def is_alike(grammar: str, seed: int, chars: str = "es0\u00e9", length: int = 4) -> bool:
    """Whether it has lexemes; both ways take the same texts and give the same masks."""
    same_texts(*matchers_of(grammar), chars, length)
    for plain, fast in walked(*matchers_of(grammar), seed, 8):
        assert plain == fast, grammar
    return bool(lexemes_of(grammar).ids)


@settings(max_examples=60, deadline=None)
@given(grammar=GRAMMARS, seed=st.integers(0, 100))
def test_masks_are_the_same_with_lexemes_and_slices(grammar: str, seed: int) -> None:
    is_alike(grammar, seed)


@pytest.mark.long
@settings(max_examples=1000, deadline=None)
@given(grammar=GRAMMARS, seed=st.integers(0, 100))
def test_masks_of_very_many_grammars_are_the_same_with_lexemes_and_slices(grammar: str, seed: int) -> None:
    is_alike(grammar, seed)


JSON = r"""
root ::= value
value ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws | "[" ws (value ("," ws value)*)? "]" ws
  | string | number ws | "true" ws
string ::= "\"" char* "\"" ws
char ::= [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4})
number ::= "-"? [0-9]+ ("." [0-9]+)?
ws ::= [ \n]{0,20}
"""
DEEP, DEEP_END = '("x" ' * 40, ")" * 40
TAKEN = [
    (JSON, 4),
    ("root ::= [a-z]{0,9}", 1),
    ('root ::= "if" | [a-c]+', 1),
    ('root ::= "x" ([a-z]{2,3} " "){1,3} "A"', 1),
    ('root ::= e\ne ::= e "+" e | "(" e ")" | [0-9]+', 1),
    ('root ::= ("<" text ">")*\ntext ::= [^<>]*', 1),
]
LEFT = [
    ('root ::= [ab]+ "b"', "ab"),
    ("root ::= [ab]* [a-z]* [0-9]", "ab1"),
    ('root ::= word{2} "."\nword ::= [ab]+', "ab."),
    ('root ::= "in" "." | [a-z]+ ","', "in.,"),
    ('root ::= "x" list\nlist ::= [a-z]+ "." | [0-9a-f]+ ","', "xa0.,"),
    ("root ::= ([ab]+){2,3} [0-9]", "ab0"),
    ('root ::= "<" [a-z\u00e9]* "\u00e8"', "<a\u00e9\u00e8"),
    ('root ::= "<" ws ws ">"\nws ::= [ ]{2,3}', "< >"),
    ('root ::= "<" ("a"?){2,3} ">"', "<a>"),
    ('root ::= ("a" | "ab")* "c"', "abc"),
    ("root ::= [^a]{0,1000} [a] [^a]{0,1000}", "ab"),
]


@pytest.mark.parametrize(("grammar", "count"), TAKEN)
def test_repetitions_become_lexemes_where_greed_changes_nothing(grammar: str, count: int) -> None:
    assert len(lexemes_of(grammar).ids) == count
    assert any([is_alike(grammar, seed) for seed in range(3)])


@pytest.mark.parametrize(("grammar", "chars"), LEFT)
def test_repetitions_that_greed_would_change_or_that_cost_much_stay(grammar: str, chars: str) -> None:
    assert len(lexemes_of(grammar).ids) == ("1000" in grammar)
    is_alike(grammar, 1, chars, 7)


@pytest.mark.parametrize(
    "grammar",
    [
        "root ::= r0\n" + "\n".join(f'r{i} ::= "x"? r{i + 1}?' for i in range(2500)) + '\nr2500 ::= "a"*',
        "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(40)) + '\nr40 ::= "a"*\nroot ::= r0*',
        "root ::= " + " ".join(f'([a-z]* | "{i}")' for i in range(900)),
        "root ::= " + "(" * 60 + "x" + ")*" * 60 + "\nx ::= [ab] root?",
        "root ::= " + '("a" ' * 60 + "[b]+" + ")? [c]" * 60,
        "root ::= r0*\n" + "\n".join(f"r{i} ::= {DEEP}r{i + 1}{DEEP_END}" for i in range(30)) + '\nr30 ::= "a"',
    ],
)
def test_a_search_that_takes_too_long_or_goes_too_deep_finds_none(grammar: str) -> None:
    rules = parse_ebnf(grammar, "f")
    found = find_lexemes(rules)
    assert not found.ids
    assert found.rules is rules


def test_the_same_grammar_has_the_same_lexemes_every_time() -> None:
    assert lark_of(lexemes_of(JSON)) == lark_of(lexemes_of(JSON))
    assert lark_of(lexemes_of(JSON)) == lark_of(find_lexemes(lexemes_of(JSON).rules))


def test_lexemes_hold_no_reference_and_are_repetitions_of_the_grammar() -> None:
    found = lexemes_of(JSON)
    held = [one for rule in found.rules.values() for one in parts_of(rule) if id(one) in found.ids]
    assert len(held) == len(found.ids) == 4


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (ConstraintKind.REGEX, "[a-z ]{5,80}: [0-9]{3}"),
        (ConstraintKind.REGEX, "[A-Za-z0-9 .,'-]{1,200}"),
        (ConstraintKind.REGEX, r"\w{1,60}(-\w{1,60})*|.{3,9}"),
        (ConstraintKind.REGEX, "[a-zA-Z_][a-zA-Z0-9_]{0,11}( [a-z ]{0,12})?"),
        (ConstraintKind.JSON_SCHEMA, '{"type":"object"}'),
        (ConstraintKind.JSON_SCHEMA, '{"type":"string","pattern":"^[a-z ]{3,12}$"}'),
        (ConstraintKind.STRUCTURAL_TAG, '{"type":"tool_calls","choice":"auto","tools":[{"name":"a"}]}'),
    ],
)
def test_masks_are_the_same_over_the_vocabulary_in_slices_and_as_a_whole(kind: ConstraintKind, text: str) -> None:
    grammar = grammar_of(normalise(kind, text), grammar_tokenizer().special_ids)
    for seed in range(3):
        whole, parted = matcher(UNSLICED, grammar), matcher(grammar_tokenizer().engine, grammar)
        for plain, sliced in walked(whole, parted, seed, 20):
            assert plain == sliced
