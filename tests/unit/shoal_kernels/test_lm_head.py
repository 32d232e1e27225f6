"""The LM head with its arg-max and the Markov loop: on the host they are the steps they are made of."""

from __future__ import annotations

import pytest
import torch
from shoal_kernels.ops.linear import LinearWeight, linear
from shoal_kernels.ops.lm_head import lm_head_argmax, markov_loop
from shoal_kernels.ops.sampling import (
    RowSampling,
    coupled_argmax,
    coupled_margins,
    inverse_temperatures,
    process_logits,
)
from shoal_kernels.precision import SERVED
from torch import Tensor
from unit.shoal_kernels.parity import assert_rows_independent, normal

SETTINGS = [RowSampling(temperature=t) for t in (1.0, 0.0, 0.7, 1e300, 1.3)]


def head(vocab: int, depth: int) -> LinearWeight:
    return LinearWeight.from_bf16(normal(vocab, depth, seed=vocab, scale=0.3).bfloat16())


def how(rows: int) -> tuple[list[RowSampling], Tensor, Tensor, Tensor]:
    settings = [SETTINGS[i % len(SETTINGS)] for i in range(rows)]
    greedy = torch.tensor([row.is_greedy for row in settings], dtype=torch.bool)
    return settings, torch.arange(rows) * 0x123456789ABCDEF, torch.arange(rows) * 3, greedy


@pytest.mark.parametrize("rows", [0, 1, 11])
def test_the_fused_token_is_that_of_the_logits(rows: int) -> None:
    weight, hidden, (settings, seeds, positions, greedy) = head(300, 64), normal(rows, 64, seed=rows), how(rows)
    inverse = inverse_temperatures(settings)
    got = lm_head_argmax(hidden, weight, inverse, seeds, positions, greedy, precision=SERVED)
    logits = linear(hidden, weight, out="f32", precision=SERVED)
    assert torch.equal(got, coupled_argmax(process_logits(logits, settings), seeds, positions, greedy))


def test_a_hidden_row_keeps_its_token_in_any_batch() -> None:
    weight, hidden, (settings, seeds, positions, greedy) = head(300, 64), normal(20, 64, seed=1), how(20)
    inverse = inverse_temperatures(settings)
    assert_rows_independent(
        lambda at: lm_head_argmax(
            hidden[at], weight, inverse[at], seeds[at], positions[at], greedy[at], precision=SERVED
        ),
        20,
    )


@pytest.mark.parametrize("width", [1, 4])
def test_the_markov_loop_is_its_steps_one_by_one(width: int) -> None:
    count, size, vocab, depth, rank = 6, 5, 200, 48, 16
    base, hidden = normal(count, size, vocab, seed=1), normal(count, size, depth, seed=2)
    embed, markov = normal(vocab, rank, seed=3).bfloat16(), head(vocab, rank)
    confidence, (settings, seeds, positions, greedy) = head(1, depth + rank), how(count)
    previous = torch.arange(count) * 7
    got = markov_loop(
        base,
        hidden,
        previous,
        embed,
        markov,
        confidence,
        inverse_temperatures(settings),
        seeds,
        positions,
        greedy,
        width=width,
        precision=SERVED,
    )
    assert got.token_ids.shape == got.confidence_logits.shape == (count, width)
    for j in range(width):
        embedded = embed[previous].float()
        logits = base[:, j] + linear(embedded, markov, out="f32", precision=SERVED)
        seen = torch.cat([hidden[:, j], embedded], dim=1)
        assert torch.equal(got.confidence_logits[:, j], linear(seen, confidence, out="f32", precision=SERVED)[:, 0])
        z = process_logits(logits, settings)
        previous = coupled_argmax(z, seeds, positions + j, greedy)
        assert torch.equal(got.token_ids[:, j], previous)
        assert torch.equal(got.margins[:, j], coupled_margins(z, seeds, positions + j, greedy, previous))


def test_a_plain_row_has_neither_filters_nor_edits() -> None:
    assert all(row.is_plain for row in SETTINGS)
    assert RowSampling(temperature=0.0, top_p=0.1).is_plain
    assert not RowSampling(top_k=3).is_plain
    assert not RowSampling(presence_penalty=0.1).is_plain
    assert not RowSampling(temperature=0.0, allowed=torch.ones(1, dtype=torch.int32)).is_plain


def test_arguments_that_do_not_fit_are_refused() -> None:
    weight, (settings, seeds, positions, greedy) = head(300, 64), how(2)
    inverse = inverse_temperatures(settings)
    with pytest.raises(ValueError, match="hidden"):
        lm_head_argmax(torch.zeros(2, 32), weight, inverse, seeds, positions, greedy, precision=SERVED)
    with pytest.raises(ValueError, match="seeds"):
        lm_head_argmax(torch.zeros(2, 64), weight, inverse, seeds[:1], positions, greedy, precision=SERVED)
    stored = LinearWeight.from_bf16(torch.zeros(300, 64), keep_bytes=True)
    with pytest.raises(ValueError, match="prepared for precision served"):
        lm_head_argmax(torch.zeros(2, 64), stored, inverse, seeds, positions, greedy, precision=SERVED)
