"""A million draws of the coupled sampler follow the target: chi-square at 99.9 %, with every filter."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from shoal_kernels.ops.sampling import RowSampling, coupled_argmax, process_logits

DRAWS, AT_ONCE, VOCAB = 1_000_000, 100_000, 40
Z_999 = 3.0902
"""The normal quantile of 99.9 %."""
SETTINGS = {
    "plain": RowSampling(),
    "hot": RowSampling(temperature=1.7),
    "cold": RowSampling(temperature=0.3),
    "top-p": RowSampling(top_p=0.9),
    "top-k": RowSampling(temperature=0.8, top_k=7),
    "min-p": RowSampling(min_p=0.05),
    "all of them": RowSampling(temperature=1.2, top_p=0.95, top_k=20, min_p=0.01),
    "edited": RowSampling(
        bias_ids=torch.tensor([3, 30]),
        bias=torch.tensor([2.0, -1.0]),
        presence_penalty=0.7,
        frequency_penalty=0.2,
        repetition_penalty=1.4,
        output_ids=torch.tensor([0, 4, 9]),
        output_counts=torch.tensor([1, 5, 2], dtype=torch.int32),
        seen_ids=torch.tensor([0, 4, 9, 11]),
        allowed=torch.tensor([-1 ^ (1 << 6), 0x5F], dtype=torch.int32),
    ),
}


def logits(kind: str) -> NDArray[np.float64]:
    """One vector: like a language model's, nearly flat, or with two modes and ties."""
    rng = np.random.default_rng(sum(map(ord, kind)))
    if kind == "steep":
        return np.sort(rng.normal(size=VOCAB) * 3.0)[::-1].copy()
    if kind == "flat":
        return rng.normal(size=VOCAB) * 0.1
    z = np.full(VOCAB, -4.0)
    z[[3, 17]] = 2.0
    return z


def target(z: NDArray[np.float64], how: RowSampling) -> NDArray[np.float64]:
    """The distribution by its definition, in float64."""
    z = z.astype(np.float32).astype(np.float64)
    if how.bias_ids is not None and how.bias is not None:
        z[how.bias_ids.numpy()] += how.bias.numpy()
    if how.seen_ids is not None:
        seen = how.seen_ids.numpy()
        z[seen] = np.where(z[seen] > 0, z[seen] / how.repetition_penalty, z[seen] * how.repetition_penalty)
    if how.output_ids is not None and how.output_counts is not None:
        z[how.output_ids.numpy()] -= how.output_counts.numpy() * how.frequency_penalty + how.presence_penalty
    if how.allowed is not None:
        for token in range(VOCAB):
            if not int(how.allowed[token // 32]) >> (token % 32) & 1:
                z[token] = -np.inf
    p = np.exp((z - z.max()) / how.temperature)
    p /= p.sum()
    order = sorted(range(VOCAB), key=lambda token: (-p[token], token))
    kept, before = [], 0.0
    for rank, token in enumerate(order):
        in_k = how.top_k == 0 or rank < how.top_k
        if in_k and before <= how.top_p and p[token] >= how.min_p * p[order[0]]:
            kept.append(token)
        before += p[token]
    cut = np.zeros(VOCAB)
    cut[kept] = p[kept]
    cut /= cut.sum()
    return cut


def draws(z: NDArray[np.float64], how: RowSampling) -> NDArray[np.int64]:
    """How often each token came in a million output positions of a few seeds."""
    processed = process_logits(torch.from_numpy(z.astype(np.float32))[None], [how])
    many = processed.expand(AT_ONCE, VOCAB).contiguous()
    greedy = torch.zeros(AT_ONCE, dtype=torch.bool)
    counts = np.zeros(VOCAB, dtype=np.int64)
    for part in range(DRAWS // AT_ONCE):
        seeds = torch.full((AT_ONCE,), 1234567 * part - 5)
        tokens = coupled_argmax(many, seeds, torch.arange(AT_ONCE), greedy)
        counts += np.bincount(tokens.numpy(), minlength=VOCAB)
    return counts


def chi_square_limit(degrees: int) -> float:
    """The 99.9 % quantile, by Wilson and Hilferty."""
    spread = 2.0 / (9.0 * degrees)
    return degrees * float(1.0 - spread + Z_999 * math.sqrt(spread)) ** 3


def assert_follows(kind: str, how: RowSampling) -> None:
    z = logits(kind)
    p, counts = target(z, how), draws(z, how)
    assert not counts[p == 0.0].any(), "what is removed never comes"
    expected = p * DRAWS
    often = expected >= 5.0
    observed = [*counts[often], counts[~often].sum()]
    wanted = [*expected[often], expected[~often].sum()]
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, wanted, strict=True) if e > 0.0)
    degrees = sum(e > 0.0 for e in wanted) - 1
    assert degrees == 0 or statistic < chi_square_limit(degrees)


def test_a_million_draws_with_all_filters() -> None:
    assert_follows("steep", SETTINGS["all of them"])


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["steep", "flat", "two modes"])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_million_draws(kind: str, name: str) -> None:
    assert_follows(kind, SETTINGS[name])


def test_the_limit_is_the_tabulated_one() -> None:
    # Quantiles of printed tables.
    assert chi_square_limit(10) == pytest.approx(29.588, rel=1e-2)
    assert chi_square_limit(30) == pytest.approx(59.703, rel=1e-2)
