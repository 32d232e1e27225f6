"""Endless training batches: text slices and fresh task items in fixed token shares, made by worker processes."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from shoal_nano.packing import DialogueEncoder, Document, Packed, pack, pad_id_of
from shoal_nano.prompt import ToolsTexts, render
from shoal_nano.tasks import held_out_items, make_item
from shoal_nano.tokenizer import BOS

REPLAY_ROWS = 140
_QUEUE_DEPTH = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Token share of each source (`text` or a family) and the loss weight of its answer tokens."""

    shares: Mapping[str, float]
    weights: Mapping[str, float]
    replay_share: float = 0.5


class Corpus:
    """The prepared folder: tokenizer, tools text, text tokens."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tools = ToolsTexts(**json.loads((folder / "tools.json").read_text()))
        self.encoder = DialogueEncoder(self.tokenizer)
        self.pad_id = pad_id_of(self.tokenizer)
        self._bos = self.tokenizer.token_to_id(BOS)
        self.train: NDArray[np.uint16] = np.fromfile(folder / "train.u16", np.uint16)
        self.held_out: NDArray[np.uint16] = np.fromfile(folder / "held_out.u16", np.uint16)

    def text(self, rng: random.Random, length: int, *, held_out: bool) -> Document:
        """A slice of the text behind BOS; every token weighs 1. The replay point falls anywhere."""
        source = self.held_out if held_out else self.train
        offset = rng.randrange(len(source) - length)
        ids = [self._bos, *source[offset : offset + length - 1].tolist()]
        return Document(family="text", ids=ids, weights=[1.0] * length, prompt_length=rng.randrange(1, length))

    def item(self, family: str, rng: random.Random, weight: float) -> Document:
        """A fresh training item."""
        dialogue = make_item(family, rng, held_out=False).dialogue
        return self.encoder.encode(render(dialogue, self.tools), family, weight)

    def held_out_documents(self, family: str, count: int, seed: int) -> list[Document]:
        """Held-out items (or text slices of 1,024 tokens) as documents."""
        if family == "text":
            rng = random.Random(seed)
            return [self.text(rng, 1024, held_out=True) for _ in range(count)]
        items = held_out_items(family, count, seed)
        return [self.encoder.encode(render(item.dialogue, self.tools), family, 1.0) for item in items]


def documents(corpus: Corpus, mixture: Mixture, length: int, rng: random.Random) -> Iterator[Document]:
    """Endless documents; the source furthest behind its token share comes next."""
    seen = dict.fromkeys(mixture.shares, 0)
    total = 1
    while True:
        source = max(seen, key=lambda name: mixture.shares[name] * total - seen[name])
        if source == "text":
            document = corpus.text(rng, rng.randint(length // 8, length), held_out=False)
        else:
            document = corpus.item(source, rng, mixture.weights.get(source, 1.0))
        if len(document.ids) > length:
            continue
        seen[source] += len(document.ids)
        total += len(document.ids)
        yield document


def batches(corpus: Corpus, mixture: Mixture, rows: int, length: int, seed: str) -> Iterator[Packed]:
    """The stream of one worker; the seed decides it entirely."""
    rng = random.Random(seed)
    source = documents(corpus, mixture, length, rng)
    return pack(source, rows, length, rng, replay_rows=REPLAY_ROWS, replay_share=mixture.replay_share, pad_id=corpus.pad_id)


def _work(queue: Any, folder: Path, mixture: Mixture, rows: int, length: int, seed: str) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for packed in batches(Corpus(folder), mixture, rows, length, seed):
        queue.put(packed)


class Workers:
    """Several `batches` streams read in turn, so that the order does not depend on their speed."""

    def __init__(self, folder: Path, mixture: Mixture, rows: int, length: int, seed: str, count: int) -> None:
        context = mp.get_context("fork")
        self._queues = [context.Queue(_QUEUE_DEPTH) for _ in range(count)]
        self._processes = [
            context.Process(target=_work, args=(queue, folder, mixture, rows, length, f"{seed}/{i}"), daemon=True)
            for i, queue in enumerate(self._queues)
        ]

    def __enter__(self) -> Iterator[Packed]:
        for process in self._processes:
            process.start()
        return self._read()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self._processes:
            process.terminate()
            process.join(10)

    def _read(self) -> Iterator[Packed]:
        while True:
            for queue in self._queues:
                yield queue.get(timeout=120)
