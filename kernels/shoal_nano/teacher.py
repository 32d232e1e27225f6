"""Scores by one forward pass per batch: an item is right if every token of its reference answer is the arg-max.

For families whose right answer is unique this equals greedy decoding, at the price of one pass.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch

from shoal_nano.losses import token_loss
from shoal_nano.net import Net
from shoal_nano.packing import Document, pack
from shoal_nano.stream import REPLAY_ROWS, Corpus
from shoal_nano.weights import Parameters

ITEMS = 96


def _then_padding(documents: Sequence[Document], pad_id: int) -> Iterator[Document]:
    yield from documents
    while True:
        yield Document(family="", ids=[pad_id] * 8, weights=[0.0] * 8, prompt_length=8)


def score_documents(net: Net, parameters: Parameters, corpus: Corpus, families: Sequence[str], rows: int, length: int,
                    device: torch.device, full: bool) -> dict[str, float]:  # fmt: skip
    """Share of right held-out items per family, served numerics and bounded replay; for `text` the mean loss in nats."""
    documents = []
    for family in families:
        count = ITEMS if full else 4
        documents += corpus.held_out_documents(family, count if family != "text" else count // 2, seed=0)
    documents = [d for d in documents if len(d.ids) <= length]
    random.Random(0).shuffle(documents)
    total = len(documents)
    right: dict[str, list[float]] = {family: [] for family in families}
    source = pack(_then_padding(documents, corpus.pad_id), rows, length, random.Random(0), replay_rows=REPLAY_ROWS,
                  replay_share=1.0, pad_id=corpus.pad_id)  # fmt: skip
    done = 0
    # Gradients stay on although nobody asks for them: the compiled forward of training is used as it is.
    w = net.serve(parameters)
    while done < total:
        packed = next(source)
        ids, start, replay = (torch.from_numpy(x).to(device).long() for x in (packed.ids, packed.start, packed.replay))
        weight = torch.from_numpy(packed.weight).to(device)
        out = net.forward(w, ids, start, replay, sparse=True)
        _, each = token_loss(net, w, out, ids, weight)
        hidden = out.hidden.detach()
        best = torch.stack([net.logits(w, row).detach().argmax(-1) for row in hidden])
        wrong = ((best != torch.roll(ids, -1, 1)) & (weight > 0)).cpu()
        each = each.cpu()
        for place in packed.placed:
            if not place.family:
                continue
            done += 1
            inside = slice(place.start, place.end)
            if place.family == "text":
                right["text"].append(float(each[place.row, inside].sum()) / (place.end - place.start - 1))
            else:
                right[place.family].append(float(not wrong[place.row, inside].any()))
    return {family: round(sum(values) / len(values), 4) for family, values in right.items() if values}
