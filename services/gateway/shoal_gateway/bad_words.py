"""Bad words that a client spells: as the token sequences that would write them."""

from __future__ import annotations

from collections.abc import Sequence

from deepseek_recipe import Tokenizer
from shoal.common.v1 import sampling_pb2, tokens_pb2
from shoal_common.errors import InvalidArgument
from shoal_common.sampling_limits import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS

FIELD = "shoal.bad_words"


def add_bad_words(
    params: sampling_pb2.SamplingParams, words: Sequence[str | Sequence[int]], tokenizer: Tokenizer
) -> None:
    """Add sequences as they are, and a text as it is tokenised alone and behind a space. Raises InvalidArgument."""
    sequences: dict[tuple[int, ...], int] = {}
    for index, word in enumerate(words):
        spellings = (
            [tokenizer.encode(text) for text in (word, f" {word.lstrip()}")] if isinstance(word, str) else [word]
        )
        for ids in spellings:
            sequences.setdefault(tuple(ids), index)
    if len(sequences) > MAX_BAD_WORDS:
        raise InvalidArgument.at(FIELD, f"are {len(sequences)} token sequences, at most {MAX_BAD_WORDS} are possible")
    for ids, index in sequences.items():
        if not 1 <= len(ids) <= MAX_BAD_WORD_TOKENS:
            raise InvalidArgument.at(f"{FIELD}[{index}]", f"must be 1 to {MAX_BAD_WORD_TOKENS} tokens, got {len(ids)}")
    params.bad_words.extend(tokens_pb2.TokenIds(ids=ids) for ids in sequences)


def _spellings(word: str, tokenizer: Tokenizer) -> list[list[int]]:
    try:
        return [tokenizer.encode(text) for text in (word, f" {word.lstrip()}")]
    except UnicodeEncodeError as error:
        raise InvalidArgument.at(FIELD, "is not valid Unicode", reason="INVALID_TEXT") from error
