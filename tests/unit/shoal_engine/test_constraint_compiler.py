"""Compiling: once, kept within bounds, in time, and nobody else's loss. Matchers: pure functions of accepted tokens."""

from __future__ import annotations

import json
import random
import threading
import time
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher
from shoal_common.constraints import ConstraintInvalid, ConstraintKind, OutputConstraint, normalise
from shoal_common.errors import MeshError
from shoal_engine.constraint import Constraint
from shoal_engine.constraints import (
    CompilerLimits,
    ConstraintCompiler,
    ConstraintFailed,
    ConstraintTimeout,
    GrammarTokenizer,
    announced_id,
)
from shoal_engine.constraints.errors import CompilerBusy
from shoal_engine.constraints.grammar import grammar_of
from shoal_engine.constraints.matcher import TokenMatcher
from shoal_engine.matching import allowed_count, row_masks
from support.grammar_walk import EOS, NANO, THINK_END, VOCAB, allowed, grammar_tokenizer, ids_of, matcher, text_of, walk

SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}})
A_MB = "x" * 1024 * 1024


class Held:
    """Compiles when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, real = threading.Event(), grammar_of

        def wait(source: OutputConstraint, special_ids: Any) -> str:
            assert self.go.wait(30)
            return real(source, special_ids)

        monkeypatch.setattr("shoal_engine.constraints.compiler.grammar_of", wait)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    return Held(monkeypatch)


def schema(number: int) -> OutputConstraint:
    return normalise(ConstraintKind.JSON_SCHEMA, json.dumps({"const": number}))


def made(**limits: Any) -> ConstraintCompiler:
    return ConstraintCompiler(grammar_tokenizer(), CompilerLimits(**limits))


def test_equal_constraints_are_compiled_once_also_at_the_same_time(held: Held) -> None:
    one = made()
    waiting = [one.compile(schema(1)) for _ in range(20)]
    assert one.waiting_count == 1
    held.go.set()
    matchers = [each.result(30).matcher() for each in waiting]
    assert one.compile(schema(1)).result(0).matcher() not in matchers
    assert one.compile_count == 1
    assert one.waiting_count == 0


def test_what_is_kept_stays_within_its_bytes_and_the_oldest_goes() -> None:
    one = made(cache_bytes=5 * 70_000)
    for number in range(20):
        one.compile(schema(number)).result(30)
        assert one.kept_bytes <= 5 * 70_000
    one.compile(schema(19)).result(30)
    assert one.compile_count == 20
    one.compile(schema(0)).result(30)
    assert one.compile_count == 21


def test_one_that_is_not_compiled_in_time_fails_alone(held: Held) -> None:
    one = made(compile_s=0.05, threads=1)
    one.compile(schema(2))
    with pytest.raises(ConstraintTimeout) as caught:
        one.compile(schema(1)).result(30)
    assert caught.value.reason == "CONSTRAINT_TIMEOUT"
    assert caught.value.code == "INVALID_ARGUMENT"
    held.go.set()
    # The same constraint in other hands is compiled as if nothing had been.
    assert made().compile(schema(1)).result(30) is not None


def test_more_than_may_wait_are_refused_at_once(held: Held) -> None:
    one = made(max_waiting=2, threads=1)
    first: list[Future[Constraint]] = [one.compile(schema(number)) for number in range(2)]
    with pytest.raises(CompilerBusy):
        one.compile(schema(2)).result(0)
    held.go.set()
    assert all(each.result(30) for each in first)


def test_a_failure_is_not_kept() -> None:
    one = made()
    for count in (1, 2):
        with pytest.raises(ConstraintInvalid):
            one.compile(normalise(ConstraintKind.REGEX, "([")).result(30)
        assert (one.compile_count, one.kept_bytes) == (count, 0)


NASTY: list[tuple[ConstraintKind, str]] = [
    (ConstraintKind.JSON_SCHEMA, A_MB),
    (ConstraintKind.REGEX, A_MB),
    (ConstraintKind.EBNF, A_MB),
    (ConstraintKind.STRUCTURAL_TAG, A_MB),
    (ConstraintKind.JSON_SCHEMA, "[" * 100_000),
    (ConstraintKind.JSON_SCHEMA, '{"not":' * 60 + "{}" + "}" * 60),
    (ConstraintKind.JSON_SCHEMA, '{"items":' * 5000 + "{}" + "}" * 5000),
    (ConstraintKind.JSON_SCHEMA, json.dumps({"enum": list(range(30_000))})),
    (ConstraintKind.JSON_SCHEMA, json.dumps({"enum": [f"value {i}" for i in range(15_000)]})),
    (
        ConstraintKind.JSON_SCHEMA,
        json.dumps(
            {
                "allOf": [
                    {"anyOf": [{"properties": {f"{side}{i}": {"type": "integer"}}} for side in "xy"]} for i in range(20)
                ]
            }
        ),
    ),
    (ConstraintKind.JSON_SCHEMA, json.dumps({"type": "string", "pattern": "(.*a){400}"})),
    (ConstraintKind.JSON_SCHEMA, json.dumps({"type": "string", "minLength": 100_000})),
    (ConstraintKind.JSON_SCHEMA, json.dumps({"type": "string", "minLength": 10**9})),
    (ConstraintKind.REGEX, "(a{1,1000}){1,1000}"),
    (ConstraintKind.REGEX, "(?:a?){500}a{500}"),
    (ConstraintKind.REGEX, "(" * 5000 + "a" + ")" * 5000),
    (ConstraintKind.REGEX, "(x+x+)+y"),
    (ConstraintKind.EBNF, "root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
    (ConstraintKind.EBNF, 'root ::= (("a"{1,1000}){1,1000}){1,1000}'),
    (ConstraintKind.EBNF, "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(40)) + '\nr40 ::= "a"\nroot ::= r0'),
    (ConstraintKind.EBNF, 'root ::= a a a a a a\na ::= "x"* "x"* "x"* | a a'),
]


@pytest.mark.parametrize(("kind", "text"), NASTY, ids=lambda one: str(one)[:40])
def test_a_malicious_constraint_is_bounded(kind: ConstraintKind, text: str) -> None:
    """It is refused, or costs little, however it goes on."""
    began_s = time.process_time()
    try:
        at = made().compile(OutputConstraint(kind=kind, text=text, engine="")).result(60).matcher()
        walk(at, 1, 40)
    except (ConstraintInvalid, ConstraintFailed):
        pass
    assert time.process_time() - began_s < 10.0


BAD: list[tuple[ConstraintKind, str]] = [
    (ConstraintKind.JSON_SCHEMA, '{"enum": []}'),
    (ConstraintKind.JSON_SCHEMA, "false"),
    (ConstraintKind.JSON_SCHEMA, '{"type": "integer", "minimum": 3, "maximum": 2}'),
    (ConstraintKind.JSON_SCHEMA, '{"type": "string", "format": "unheard-of"}'),
    (ConstraintKind.JSON_SCHEMA, '{"type": "string", "pattern": "("}'),
    (ConstraintKind.JSON_SCHEMA, '{"type": "thing"}'),
    (ConstraintKind.REGEX, "a(?=b)"),
    (ConstraintKind.REGEX, ""),
    (ConstraintKind.EBNF, ""),
    (ConstraintKind.EBNF, 'root ::= "a" |' + " x"),
    (ConstraintKind.STRUCTURAL_TAG, "{}"),
]


@pytest.mark.parametrize(("kind", "text"), BAD)
def test_what_cannot_be_compiled_is_the_caller_s_fault_and_names_the_field(kind: ConstraintKind, text: str) -> None:
    with pytest.raises(ConstraintInvalid) as caught:
        made().compile(OutputConstraint(kind=kind, text=text, engine="")).result(30)
    assert caught.value.reason == "CONSTRAINT_INVALID"
    assert caught.value.violations[0].field.startswith(f"constraint.{kind.value}")


def test_a_tokenizer_that_does_not_fit_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab"):
        GrammarTokenizer.from_file(NANO / "tokenizer.json", vocab_size=3000, eos_id=EOS)


@pytest.mark.parametrize("vocab", [3594, 3595, 3615, 3616, 3617, 4096])
def test_a_mask_covers_the_vocabulary_whatever_its_length(vocab: int) -> None:
    made_of = GrammarTokenizer.from_file(NANO / "tokenizer.json", vocab_size=vocab, eos_id=EOS)
    at = ConstraintCompiler(made_of).compile(normalise(ConstraintKind.REGEX, "(?s:.*)")).result(30).matcher()
    words = -(-vocab // 32)
    guarded = np.full(words + 2, 77, dtype=np.int32)
    assert at.fill(guarded[1:-1])
    assert guarded[[0, -1]].tolist() == [77, 77]
    bits = np.unpackbits(guarded[1:-1].view(np.uint8), bitorder="little")
    assert not bits[3569:].any(), "ids without text, and bits behind the last id"
    assert bits[1] == 1


def test_the_id_names_engine_version_and_table() -> None:
    assert len(announced_id()) == 32


@pytest.mark.parametrize("start", [(), (THINK_END,), (10, 11, 10)])
@pytest.mark.parametrize("salt", range(3))
def test_what_was_tried_and_taken_back_leaves_no_trace(start: tuple[int, ...], salt: int) -> None:
    choices = random.Random(salt)
    at = matcher(ConstraintKind.JSON_SCHEMA, SCHEMA, start)
    taken: list[int] = []
    for _ in range(200):
        if taken and choices.random() < 0.4:
            count = choices.randint(1, min(len(taken), 6))
            at.rollback(count)
            del taken[-count:]
        else:
            token = choices.choice([*start, *allowed(at).tolist()[:400], choices.randrange(VOCAB)])
            if at.accept(token):
                taken.append(token)
        fresh = matcher(ConstraintKind.JSON_SCHEMA, SCHEMA, start)
        assert all(fresh.accept(token) for token in taken)
        assert allowed(fresh).tolist() == allowed(at).tolist()


@pytest.mark.parametrize(
    ("start", "before"),
    [
        ((THINK_END,), [50, 60, THINK_END]),
        ((10, 11), [10, 10, 11]),
        ((10, 11, 10, 12), [10, 11, 10, 11, 10, 12]),
        ((10, 10), [10, 11, 10, 10]),
    ],
)
def test_it_begins_behind_the_first_occurrence_of_the_tokens(start: tuple[int, ...], before: list[int]) -> None:
    at = matcher(ConstraintKind.REGEX, "a+", start)
    for token in before:
        ids = set(allowed(at).tolist())
        assert len(ids) == VOCAB - 1, "anything but the end"
        assert EOS not in ids
        assert at.accept(token)
    assert set(allowed(at).tolist()) == set(allowed(matcher(ConstraintKind.REGEX, "a+")).tolist())


def test_an_ignored_end_comes_only_where_nothing_else_may() -> None:
    made_of = made().compile(normalise(ConstraintKind.REGEX, "a{1,2}")).result(30)
    at = made_of.matcher(avoids_end=True)
    (a,) = ids_of("a")
    assert at.accept(a)
    assert EOS not in allowed(at)
    assert at.accept(a)
    assert allowed(at).tolist() == [EOS]


def test_rows_have_the_masks_of_their_drafts_and_end_where_the_constraint_does() -> None:
    at = matcher(ConstraintKind.JSON_OBJECT, "")
    drafts = [*ids_of('{"a"'), *ids_of("}")]
    count = allowed_count(at, drafts)
    assert text_of(drafts[:count]) == '{"a"'
    rows = row_masks(at, drafts[:count], VOCAB)
    for row in range(count + 1):
        fresh = matcher(ConstraintKind.JSON_OBJECT, "")
        assert all(fresh.accept(token) for token in drafts[:row])
        expected = np.empty(VOCAB // 32, dtype=np.int32)
        fresh.fill(expected)
        mask = rows.at(row)
        assert mask is not None
        assert np.array_equal(mask, expected)
    # Nothing may be drafted behind the end.
    assert allowed_count(at, [*ids_of("{}"), EOS, *ids_of("a")]) == len(ids_of("{}")) + 1


class Costly(TokenMatcher):
    """Fails wherever the output ends with a certain token."""

    def _mask(self) -> Any:
        if self._inside[-1:] == ids_of("7"):
            raise ConstraintFailed("too much")
        return super()._mask()


def test_a_failure_on_a_draft_counts_only_if_its_row_does() -> None:
    engine = LLMatcher(grammar_tokenizer().engine, LLMatcher.grammar_from_regex("[0-9]*"), log_level=0)
    at = Costly(engine.deep_copy, grammar_tokenizer(), fill_s=1.0)
    rows = row_masks(at, [*ids_of("1"), *ids_of("7"), *ids_of("1")], VOCAB)
    assert [rows.fails_at(row) for row in range(4)] == [False, False, True, True]
    assert isinstance(rows.failure, MeshError)
    # It stands where it stood, and goes another way unharmed.
    assert row_masks(at, ids_of("1") * 2, VOCAB).failure is None


def test_an_engine_in_error_is_made_anew_when_the_tokens_are_taken_back() -> None:
    engine = LLMatcher(grammar_tokenizer().engine, LLMatcher.grammar_from_regex("[0-9]*"), log_level=0)
    at = TokenMatcher(engine.deep_copy, grammar_tokenizer(), fill_s=1.0)
    assert all(at.accept(token) for token in ids_of("12"))
    assert not at._engine.consume_token(ids_of("x")[0])
    with pytest.raises(ConstraintFailed):
        at.accept(ids_of("3")[0])
    at.rollback(1)
    assert at.accept(ids_of("3")[0])
    assert EOS in allowed(at)
