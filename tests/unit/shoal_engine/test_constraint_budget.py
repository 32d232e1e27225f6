"""A constraint's budget belongs to one choice: where it fails is a function of its own output, and of nothing else."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from shoal_common.constraints import ConstraintKind, OutputConstraint, normalise
from shoal_engine.constraint import Matcher
from shoal_engine.constraints import CompilerLimits, ConstraintCompiler, ConstraintFailed
from shoal_engine.constraints.matcher import TokenMatcher
from shoal_engine.matching import allowed_count, row_masks
from support.grammar_walk import VOCAB, allowed, grammar_tokenizer, ids_of

LETTERS = [ids_of(letter)[0] for letter in "abx"]
STATES = 300
COSTLY = normalise(ConstraintKind.REGEX, "[abx]*a[abx]{12}y")
"""Its automaton has 2 ** 13 states: every text meets new ones."""
CHEAP = normalise(ConstraintKind.REGEX, "[abx]{2000}")


def made(**limits: int) -> ConstraintCompiler:
    return ConstraintCompiler(grammar_tokenizer(), CompilerLimits(lexer_states=STATES, **limits))


def fresh(one: ConstraintCompiler, source: OutputConstraint = COSTLY) -> TokenMatcher:
    at = one.compile(source).result(30).matcher()
    assert isinstance(at, TokenMatcher)
    return at


def text(salt: int, length: int = 400) -> list[int]:
    return random.Random(salt).choices(LETTERS, k=length)


def fails_at(at: Matcher, tokens: Sequence[int]) -> int:
    """How many of the tokens are output before it fails."""
    mask = np.empty(VOCAB // 32, dtype=np.int32)
    for place, token in enumerate(tokens):
        try:
            at.fill(mask)
        except ConstraintFailed:
            return place
        assert at.commit(token)
    return len(tokens)


def alone(tokens: Sequence[int]) -> int:
    """Where it fails in a compiler of its own."""
    return fails_at(fresh(made()), tokens)


def test_requests_before_it_leave_a_request_its_whole_budget() -> None:
    one = made()
    places = {alone(text(salt)) for salt in range(6)}
    assert max(places) < 400, "the constraint is costly enough"
    for salt in range(6):
        assert fails_at(fresh(one), text(salt)) == alone(text(salt))
    # Also those that go on at the same time, token by token.
    several = [fresh(one) for _ in range(4)]
    reached = [0] * 4
    for token in text(0):
        for index, at in enumerate(several):
            reached[index] += fails_at(at, [token])
    assert set(reached) == {alone(text(0))}


@pytest.mark.parametrize("salt", range(3))
@pytest.mark.parametrize("width", range(1, 6))
def test_drafts_right_or_wrong_do_not_move_the_place(width: int, salt: int) -> None:
    one, choices, tokens = made(), random.Random(salt), text(salt)
    at, place = fresh(one), 0
    while place < len(tokens):
        right = choices.randrange(width + 1)
        drafts = [*tokens[place + 1 : place + 1 + right], *choices.choices(LETTERS, k=width - right)]
        rows = row_masks(at, (), VOCAB)
        if rows.fails_at(0):
            break
        assert at.commit(tokens[place])
        place += 1
        count = allowed_count(at, drafts, VOCAB)
        rows = row_masks(at, drafts[:count], VOCAB)
        if rows.fails_at(0):
            break
        assert rows.failure is None, "drafts are cut where there is no mask behind them"
        for row in range(count):
            if drafts[row] != tokens[place : place + 1][0]:
                break
            try:
                assert at.commit(drafts[row])
            except ConstraintFailed:
                break
            place += 1
    assert place == alone(tokens)


def test_an_interrupted_request_fails_where_it_would_have() -> None:
    tokens = text(1)
    place = alone(tokens)
    for cut in (1, place // 2, place - 1, place):
        at = made().compile(COSTLY, [tokens[:cut]]).result(30).matcher(output=tokens[:cut])
        assert cut + fails_at(at, tokens[cut:]) == place
    with pytest.raises(ConstraintFailed):
        made().compile(COSTLY).result(30).matcher(output=tokens[: place + 1])


def test_masks_behind_drafts_are_those_behind_output_also_when_engines_are_used_up() -> None:
    one, choices = made(), random.Random(5)
    at, tokens = fresh(one, CHEAP), text(3, 120)
    drafted = 0
    for place, token in enumerate(tokens):
        drafts = choices.choices(LETTERS, k=3)
        count = allowed_count(at, drafts, VOCAB)
        drafted += count
        rows = row_masks(at, drafts[:count], VOCAB)
        other = fresh(one, CHEAP)
        assert all(other.commit(each) for each in tokens[:place])
        for row in range(count + 1):
            mask = np.empty(VOCAB // 32, dtype=np.int32)
            other.fill(mask)
            found = rows.at(row)
            assert found is not None
            assert np.array_equal(found, mask)
            assert row == count or other.commit(drafts[row])
        assert at.commit(token)
    assert drafted > 100


def test_what_drafts_share_is_built_anew_when_it_is_used_up() -> None:
    one = made(threads=1)
    for salt in range(8):
        at = fresh(one)
        tokens = text(salt)
        taken = allowed_count(at, tokens, VOCAB)
        assert 0 < taken < len(tokens)
        assert allowed(at).tolist() == allowed(fresh(one)).tolist()
    assert one.compile_count == 1
