"""Texts that a constraint allows, token by token at random over the nano model's vocabulary."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from shoal_common.constraints import ConstraintKind, normalise
from shoal_engine.constraint import Matcher
from shoal_engine.constraints import ConstraintCompiler, GrammarTokenizer
from tokenizers import Tokenizer

NANO = Path(__file__).parents[2] / "kernels" / "shoal_nano" / "release"
VOCAB, EOS, THINK_END, DSML = 4096, 1, 6, 7


@cache
def grammar_tokenizer() -> GrammarTokenizer:
    """Of the nano model."""
    return GrammarTokenizer.from_file(NANO / "tokenizer.json", vocab_size=VOCAB, eos_id=EOS)


@cache
def compiler() -> ConstraintCompiler:
    """For the nano model."""
    return ConstraintCompiler(grammar_tokenizer())


@cache
def tokenizer() -> Tokenizer:
    """The nano model's own."""
    return Tokenizer.from_file(str(NANO / "tokenizer.json"))


@cache
def _weights() -> NDArray[np.float64]:
    weights = np.ones(VOCAB)
    for token in range(VOCAB):
        text = tokenizer().decode([token], skip_special_tokens=False)
        weights[token] = 30.0 if text in ('"', "]", "}") else 0.01 if text and not text.strip() else 1.0
    weights[EOS] = 1000.0
    return weights


def matcher(kind: ConstraintKind, text: str, start_after_ids: tuple[int, ...] = ()) -> Matcher:
    """A fresh one."""
    return compiler().compile(normalise(kind, text, start_after_ids=start_after_ids)).result(60).matcher()


def allowed(at: Matcher) -> NDArray[np.int64]:
    """Ids that may come next."""
    mask = np.empty(-(-VOCAB // 32), dtype=np.int32)
    at.fill(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB])


def ids_of(text: str) -> list[int]:
    """Text as tokens; spellings of special tokens become these tokens."""
    ids: list[int] = tokenizer().encode(text, add_special_tokens=False).ids
    return ids


def text_of(tokens: list[int]) -> str:
    """The text of tokens, the end of sequence left out."""
    text: str = tokenizer().decode([token for token in tokens if token != EOS], skip_special_tokens=False)
    return text


def walk(at: Matcher, seed: int, max_tokens: int = 400) -> tuple[list[int], bool]:
    """Random allowed tokens, those that close something first; and whether the text came to its end."""
    choices, tokens = random.Random(seed), list[int]()
    while len(tokens) < max_tokens:
        ids = allowed(at)
        token = choices.choices(ids.tolist(), _weights()[ids].tolist())[0]
        assert at.accept(token), "what the mask allows is accepted"
        tokens.append(token)
        if token == EOS:
            return tokens, True
    return tokens, False


def takes(at: Matcher, text: str) -> bool:
    """Whether the text is complete under the constraint."""
    return all(at.accept(token) for token in ids_of(text)) and at.accept(EOS)
