"""What a request forbids at an output index, and the counts its penalties read, against naive definitions."""

from __future__ import annotations

import contextlib
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal_common.errors import InvalidArgument
from shoal_engine.requests import SamplingSpec
from shoal_engine.row_rules import banned_ids, forced_id, is_empty, row_mask
from shoal_engine.token_history import TokenHistory

SMALL = st.integers(0, 5)
TOKENS = st.lists(SMALL, max_size=40)


def ids_of(mask: np.ndarray, vocab: int) -> set[int]:
    """The ids that a packed mask allows."""
    return {i for i in range(vocab) if mask[i // 32] >> (i % 32) & 1}


@given(st.lists(SMALL, min_size=1, max_size=40), TOKENS, TOKENS, st.data())
def test_counts_are_those_of_the_whole_output(
    prompt: list[int], output: list[int], assumed: list[int], data: st.DataObject
) -> None:
    history = TokenHistory(np.array(prompt, dtype=np.int64))
    for length in sorted(data.draw(st.lists(st.integers(0, len(output)), max_size=4))):
        history.counted(output[:length], assumed[:2])
    found = history.counted(output, assumed)
    want = Counter([*output, *assumed])
    assert dict(zip(found.output_ids.tolist(), found.output_counts.tolist(), strict=True)) == want
    assert len(found.output_ids) == len(want)
    assert sorted(found.seen_ids.tolist()) == sorted({*prompt, *output, *assumed})
    again = history.counted(output, ())
    assert dict(zip(again.output_ids.tolist(), again.output_counts.tolist(), strict=True)) == Counter(output)


@given(st.lists(st.lists(SMALL, min_size=1, max_size=4).map(tuple), max_size=6).map(tuple), TOKENS, TOKENS)
def test_a_bad_word_bans_its_last_token_where_the_output_ends_with_the_others(
    words: tuple[tuple[int, ...], ...], output: list[int], assumed: list[int]
) -> None:
    whole = tuple([*output, *assumed])
    got = banned_ids(SamplingSpec(bad_words=words), frozenset(), 0, output, assumed)
    # Never a sequence in the output: the definition itself.
    assert got == {token for token in range(6) if any(_ends((*whole, token), word) for word in words)}


def _ends(whole: tuple[int, ...], word: tuple[int, ...]) -> bool:
    return whole[-len(word) :] == word


def test_stops_are_banned_below_min_tokens_drafts_counted() -> None:
    spec, stops = SamplingSpec(min_tokens=3), frozenset({1, 9})
    assert banned_ids(spec, stops, 3, [5], [6]) == stops
    assert banned_ids(spec, stops, 3, [5, 6], [7]) == frozenset()


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 97])
def test_bans_a_forced_id_and_a_constraint_leave_what_all_of_them_allow(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    words = -(-vocab // 32)
    for _ in range(50):
        mask = rng.integers(-(2**31), 2**31, words).astype(np.int32) if rng.random() < 0.7 else None
        banned = frozenset(rng.integers(0, vocab, rng.integers(0, 5)).tolist())
        forced = int(rng.integers(0, vocab)) if rng.random() < 0.5 else None
        before = None if mask is None else mask.copy()
        got = row_mask(mask, banned, forced, vocab)
        want = set(range(vocab)) if mask is None else ids_of(mask, vocab)
        want = (want - banned) & ({forced} if forced is not None else want)
        assert (set(range(vocab)) if got is None else ids_of(got, vocab)) == want
        assert got is None or is_empty(got, vocab) == (not want)
        if mask is not None and before is not None:
            assert np.array_equal(mask, before), "a constraint's mask is shared"


@given(st.lists(SMALL, max_size=12).map(tuple), st.lists(SMALL, min_size=1, max_size=3).map(tuple))
def test_a_bad_word_among_the_forced_ids_is_refused(forced: tuple[int, ...], word: tuple[int, ...]) -> None:
    is_forced = any(forced[i : i + len(word)] == word for i in range(len(forced)))
    with pytest.raises(InvalidArgument, match="is forced") if is_forced else contextlib.nullcontext():
        SamplingSpec(forced_ids=forced, bad_words=(word,))


def test_forced_ids_begin_the_output_and_then_nothing_is_forced() -> None:
    spec = SamplingSpec(forced_ids=(7, 8))
    assert [forced_id(spec, i) for i in range(4)] == [7, 8, None, None]


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ({"bad_words": ((),)}, "bad_words[0]"),
        ({"bad_words": ((1,) * 33,)}, "bad_words[0]"),
        ({"bad_words": ((1,),) * 129}, "bad_words"),
        ({"bad_words": ((1.5,),)}, "bad_words[0]"),
        ({"forced_ids": (True,)}, "forced_ids"),
        ({"forced_ids": (2**70,)}, "forced_ids"),
        ({"forced_ids": (1,) * 8193}, "forced_ids"),
        ({"bad_words": ((4,), (2, 3)), "forced_ids": (1, 2, 3)}, "bad_words[1]"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
def test_sequences_outside_of_their_range_are_refused(bad: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        SamplingSpec(**bad)  # type: ignore[arg-type]
    assert caught.value.violations[0].field == field
