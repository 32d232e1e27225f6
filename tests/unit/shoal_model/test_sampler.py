"""The sampler: one rule for plain, draft and verify rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from shoal_model.sampler import RowSampling, SampleRow, accept_length, sample
from support.tiny_model import golden
from torch import Tensor


def logits(rows: int = 8, vocab: int = 64) -> Tensor:
    return torch.from_numpy(np.random.default_rng(5).normal(size=(rows, vocab)).astype(np.float32)) * 3


def row(index: int = 0, seed: int = 7, num_logprobs: int | None = None, **fields: float) -> SampleRow:
    return SampleRow(
        sampling=RowSampling(**fields),  # type: ignore[arg-type]
        seed=seed,
        output_index=index,
        num_logprobs=num_logprobs,
    )


def test_a_token_depends_on_its_own_row_only() -> None:
    z = logits()
    rows = [row(i, seed=i % 3, temperature=(0.0, 0.7, 1.0)[i % 3], top_p=0.9, top_k=20) for i in range(8)]
    together = sample(z, rows).token_ids
    order = [5, 2, 7, 0]
    assert torch.equal(sample(z[order], [rows[i] for i in order]).token_ids, together[order])
    for i in range(8):
        assert int(sample(z[i : i + 1], [rows[i]]).token_ids[0]) == int(together[i])


def test_the_same_output_index_draws_the_same_token_and_another_index_another() -> None:
    z = torch.zeros(200, 64)
    again = sample(z, [row(i, temperature=1.0) for i in range(200)]).token_ids
    assert torch.equal(again, sample(z, [row(i, temperature=1.0) for i in range(200)]).token_ids)
    assert len(set(again.tolist())) > 40


def test_sampled_tokens_follow_the_distribution() -> None:
    z = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    count = 4000
    tokens = sample(z.expand(count, 4).contiguous(), [row(i) for i in range(count)]).token_ids
    frequencies = torch.bincount(tokens, minlength=4) / count
    torch.testing.assert_close(frequencies, torch.tensor([0.5, 0.3, 0.15, 0.05]), atol=0.03, rtol=0)


def test_temperature_zero_is_the_argmax_and_ties_go_to_the_lower_id() -> None:
    z = logits()
    z[0, 9] = z[0, 30] = 50.0
    tokens = sample(z, [row(i, temperature=0.0, top_p=0.1) for i in range(8)]).token_ids
    assert torch.equal(tokens[1:], z[1:].argmax(1))
    assert int(tokens[0]) == 9


def test_seeds_use_all_64_bits() -> None:
    z = torch.zeros(1, 512)
    high, low = sample(z, [row(seed=5 + (1 << 63))]).token_ids, sample(z, [row(seed=5)]).token_ids
    assert int(high[0]) != int(low[0])


@pytest.mark.parametrize("seed", [-1, 1 << 64])
def test_a_seed_outside_64_bits_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match="unsigned 64-bit"):
        row(seed=seed)


def test_logprobs_are_those_of_the_processed_distribution() -> None:
    recorded = golden("units")
    rows = [
        row(i, num_logprobs=3, temperature=float(t), top_p=float(p), top_k=int(k))
        for i, (t, p, k) in enumerate(
            zip(recorded["sample.temperature"], recorded["sample.top_p"], recorded["sample.top_k"], strict=True)
        )
    ]
    sampled = sample(recorded["sample.logits"], rows)
    for i, entry in enumerate(sampled.logprobs):
        if rows[i].sampling.is_greedy:
            continue
        assert entry is not None
        expected = recorded["sample.logprobs"][i]
        assert entry.logprob == pytest.approx(float(expected[sampled.token_ids[i]]), abs=1e-4)
        likeliest = torch.sort(expected, descending=True, stable=True)
        wanted = [(int(t), float(v)) for v, t in zip(*likeliest, strict=True) if v > -torch.inf][:3]
        assert [token for token, _ in entry.top] == [token for token, _ in wanted]
        assert [value for _, value in entry.top] == pytest.approx([value for _, value in wanted], abs=1e-4)


def test_rows_that_ask_for_no_logprobs_get_none() -> None:
    sampled = sample(logits(2), [row(), row(num_logprobs=0)])
    assert sampled.logprobs[0] is None
    assert sampled.logprobs[1] is not None
    assert sampled.logprobs[1].top == ()


@pytest.mark.parametrize(
    ("drafts", "sampled", "length"), [([], [4], 0), ([1, 2], [1, 2, 3], 2), ([1, 2], [1, 3, 2], 1), ([1], [2, 9], 0)]
)
def test_the_leading_equal_drafts_stand(drafts: list[int], sampled: list[int], length: int) -> None:
    assert accept_length(drafts, sampled) == length
