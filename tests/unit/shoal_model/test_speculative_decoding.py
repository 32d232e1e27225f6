"""Drafting never changes an answer: whatever is proposed and verified, the tokens are those of plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from shoal_model.draft import Anchor
from shoal_model.model import Model
from shoal_model.propose import propose
from shoal_model.rows import RowBatch
from shoal_model.sampler import RowSampling, SampleRow, accept_length, sample
from shoal_model.sequence import SequenceRun
from support.seldom import seldom
from support.tiny_model import REPLAY, text, tiny_model
from torch import Tensor

COUNT, PROMPT = 30, 120
SEED = (1 << 63) + 11

GREEDY = RowSampling(temperature=0.0)
WARM = RowSampling(temperature=1.0)
FILTERED = RowSampling(temperature=0.7, top_p=0.9, top_k=50, min_p=0.01)

Drafts = Callable[[Model, SequenceRun, list[int]], list[int]]


def draw(sampling: RowSampling, logits: Tensor, first_index: int) -> list[int]:
    rows = [SampleRow(sampling=sampling, seed=SEED, output_index=first_index + i) for i in range(len(logits))]
    tokens: list[int] = sample(logits, rows).token_ids.tolist()
    return tokens


def prefilled(model: Model, slot: int) -> tuple[SequenceRun, Tensor]:
    run = SequenceRun(
        model, slot=slot, block_table=[1 + 2 * slot, 2 + 2 * slot], prompt_length=PROMPT, replay_length=REPLAY
    )
    return run, model.logits(run.run_chunks(text(PROMPT), 64))


def plain(model: Model, sampling: RowSampling) -> list[int]:
    run, logits = prefilled(model, 0)
    tokens = draw(sampling, logits, 0)
    while len(tokens) < COUNT:
        tokens += draw(sampling, model.logits(run.run(tokens[-1:], (0,))), len(tokens))
    return tokens


def speculative(model: Model, sampling: RowSampling, drafts_for: Drafts) -> tuple[list[int], int]:
    """The tokens, and how many of them were drafts."""
    run, logits = prefilled(model, 1)
    tokens, accepted_total = draw(sampling, logits, 0), 0
    while len(tokens) < COUNT:
        drafts, base = drafts_for(model, run, tokens), run.length
        rows = [tokens[-1], *drafts]
        sampled = draw(sampling, model.logits(run.run(rows, range(len(rows)))), len(tokens))
        accepted = accept_length(drafts, sampled)
        run.rewind(base + 1 + accepted)
        tokens += sampled[: accepted + 1]
        accepted_total += accepted
    return tokens[:COUNT], accepted_total


def own_drafts(sampling: RowSampling) -> Drafts:
    def drafts(model: Model, run: SequenceRun, tokens: list[int]) -> list[int]:
        def choose(j: int, logits: Tensor, _: Tensor) -> Tensor:
            return torch.tensor(draw(sampling, logits, len(tokens) + j))

        proposed: list[int] = propose(model, [run.anchor(tokens[-1])], choose).token_ids[0].tolist()
        return proposed

    return drafts


@pytest.mark.parametrize("sampling", [FILTERED, *seldom(GREEDY, WARM)], ids=["filtered", "greedy", "warm"])
def test_own_drafts_change_nothing(sampling: RowSampling) -> None:
    model = tiny_model()
    tokens, _ = speculative(model, sampling, own_drafts(sampling))
    assert tokens == plain(model, sampling)


@pytest.mark.parametrize("sampling", [GREEDY, *seldom(FILTERED)], ids=["greedy", "filtered"])
def test_drafts_that_are_right_up_to_a_random_place_change_nothing_and_are_accepted(sampling: RowSampling) -> None:
    model, random = tiny_model(), Random(2)
    expected = plain(model, sampling)

    def nearly_right(_: Model, __: SequenceRun, tokens: list[int]) -> list[int]:
        right = expected[len(tokens) : len(tokens) + random.randint(0, 5)]
        return [*right, *(random.randrange(512) for _ in range(5))][: random.randint(0, 5)]

    tokens, accepted = speculative(model, sampling, nearly_right)
    assert tokens == expected
    assert accepted > 5


def test_random_drafts_change_nothing() -> None:
    model, random = tiny_model(), Random(4)
    tokens, _ = speculative(model, WARM, lambda *_: [random.randrange(512) for _ in range(5)])
    assert tokens == plain(model, WARM)


def test_drafts_are_made_up_to_the_end_of_the_context() -> None:
    model = tiny_model()
    # The rings of a sequence that stands a few tokens before the end; what they hold does not matter here.
    end = model.config.max_position_embeddings
    position, window = end - 3, model.config.sliding_window
    model.cache.state.draft.tags.mark(
        model.cache.state.draft.tags.places(np.zeros(window, np.int64), np.arange(position - window, position)),
        np.arange(position - window, position),
    )
    head = model.draft([Anchor(slot=0, position=position, token_id=9)])
    assert head.base_logits.shape == (1, 5, model.config.vocab_size)
    run = SequenceRun(model, slot=0, block_table=[1] * 32)
    beyond = replace(run.segment([9, 9], ()), start=end - 1)
    with pytest.raises(ValueError, match="positions"):
        model.forward(RowBatch(segments=(beyond,)))
