"""The sampler: one rule for plain, draft and verify rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from shoal_model.sampler import REMOVED, RowSampling, SampleRow, accept_length, model_logprobs, sample
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
        assert [value for _, value in entry.top[: len(wanted)]] == pytest.approx([v for _, v in wanted], abs=1e-4)
        # What the filters removed follows, likeliest first.
        ranked = torch.sort(recorded["sample.logits"][i], descending=True, stable=True).indices[:3].tolist()
        assert [token for token, _ in entry.top] == ranked
        assert all(value == REMOVED for _, value in entry.top[len(wanted) :])


def test_masked_tokens_come_last_by_their_id() -> None:
    z = torch.tensor([[3.0, 9.0, 2.0, 9.0, 1.0]])
    allowed = torch.tensor([0b00101], dtype=torch.int32)
    sampling = RowSampling(temperature=0.0, allowed=allowed)
    sampled = sample(z, [SampleRow(sampling=sampling, seed=1, output_index=0, num_logprobs=9)])
    (entry,) = sampled.logprobs
    assert entry is not None
    assert [token for token, _ in entry.top] == [0, 2, 1, 3, 4]
    assert [value == REMOVED for _, value in entry.top] == [False, False, True, True, True]
    assert entry.logprob == entry.top[0][1] == pytest.approx(-0.3133, abs=1e-4)


def test_logprobs_do_not_change_the_token() -> None:
    z = logits()
    rows = [row(i, temperature=(0.0, 1.0)[i % 2], top_k=5) for i in range(8)]
    asked = [replace(one, num_logprobs=4) for one in rows]
    assert torch.equal(sample(z, rows).token_ids, sample(z.clone(), asked, in_place=True).token_ids)


def test_the_model_s_distribution_is_reported_for_given_tokens() -> None:
    z = logits(3)
    found = model_logprobs(z, [5, 0, 63], 2)
    want = z.log_softmax(1)
    for i, token in enumerate((5, 0, 63)):
        assert found[i].logprob == pytest.approx(float(want[i, token]), abs=1e-5)
        best = want[i].topk(2)
        assert [token for token, _ in found[i].top] == best.indices.tolist()
        assert [value for _, value in found[i].top] == pytest.approx(best.values.tolist(), abs=1e-5)


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
