"""Documents into fixed-length training rows. Packed documents do not see each other: packing changes no result."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from shoal_nano.prompt import Rendered
from shoal_nano.tokenizer import PAD


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """Token ids, the loss weight of *predicting* each id, and the prompt length that bounded replay counts from."""

    family: str
    ids: list[int]
    weights: list[float]
    prompt_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where a document lies: row, positions [start, end)."""

    family: str
    row: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Rows of T positions.

    ids      int32[B, T]
    start    int32[B, T]  first position of the position's own document; documents start at multiples of 8
    replay   int32[B, T]  lowest position whose decoder window key exists for this row (>= start)
    weight   float32[B, T]  loss weight of predicting ids[t + 1] at t
    placed   where each document lies
    """

    ids: NDArray[np.int32]
    start: NDArray[np.int32]
    replay: NDArray[np.int32]
    weight: NDArray[np.float32]
    placed: tuple[Placed, ...]


# Keeps ratio-2 groups and candidate blocks inside one document, aligned as if it stood alone.
ALIGNMENT = 8


class DialogueEncoder:
    """Rendered dialogues to documents: segment by segment, as the recipe's `encode` does."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()}

    def encode_text(self, text: str) -> list[int]:
        """Ids of text that must not form special tokens. Nano's texts never spell one."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode(self, rendered: Rendered, family: str, weight: float) -> Document:
        """Document whose answer tokens weigh `weight` and whose prompt tokens weigh nothing."""
        ids: list[int] = []
        weights: list[float] = []
        prompt_length = 0
        for (is_special, text), is_answer in zip(rendered.segments, rendered.is_answer, strict=True):
            new = [self._special[text]] if is_special else self.encode_text(text)
            if not is_answer:
                prompt_length = len(ids) + len(new)
            ids += new
            weights += [weight if is_answer else 0.0] * len(new)
        return Document(family=family, ids=ids, weights=weights, prompt_length=prompt_length)


def pack(documents: Iterator[Document], rows: int, length: int, rng: random.Random, *, replay_rows: int, replay_share: float,
         pad_id: int, pool: int = 64) -> Iterator[Packed]:  # fmt: skip
    """Fill `rows` x `length` arrays with documents, taking for each gap the largest waiting document that fits.

    A document longer than a row is cut. `replay_share` of the documents get the window bound of bounded replay: rows from
    `prompt_length - replay_rows` on do not see decoder window keys below it (v41-flash.md section 8.4).
    """
    waiting: list[Document] = []
    while True:
        ids = np.full((rows, length), pad_id, np.int32)
        start = np.zeros((rows, length), np.int32)
        replay = np.zeros((rows, length), np.int32)
        weight = np.zeros((rows, length), np.float32)
        placed: list[Placed] = []
        for row in range(rows):
            at = 0
            while at < length - 1:
                while len(waiting) < pool:
                    waiting.append(next(documents))
                space = length - at
                fitting = [i for i, document in enumerate(waiting) if len(document.ids) <= space]
                if at == 0:
                    chosen = 0
                elif fitting:
                    chosen = max(fitting[:16], key=lambda i: len(waiting[i].ids)) if space < 400 else fitting[0]
                else:
                    break
                document = waiting.pop(chosen)
                count = min(len(document.ids), space)
                end = at + count
                ids[row, at:end] = document.ids[:count]
                weight[row, at : end - 1] = document.weights[1:count]
                start[row, at:] = at
                bound = max(at, at + document.prompt_length - replay_rows) if rng.random() < replay_share else at
                replay[row, at:] = at
                replay[row, min(bound, length) :] = bound
                placed.append(Placed(family=document.family, row=row, start=at, end=end))
                at = end + -end % ALIGNMENT
            start[row, at:] = min(at, length - 1)
            replay[row, at:] = min(at, length - 1)
        yield Packed(ids=ids, start=start, replay=replay, weight=weight, placed=tuple(placed))


def pad_id_of(tokenizer: Tokenizer) -> int:
    """Id of the pad token. Raises ValueError if the tokenizer has none."""
    token_id = tokenizer.token_to_id(PAD)
    if token_id is None:
        raise ValueError(f"the tokenizer has no {PAD}")
    return int(token_id)
