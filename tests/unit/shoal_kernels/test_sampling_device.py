"""Sampling on a device: noise and filters have the bits of the host, tokens are those of the exact noise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from shoal_kernels.ops.sampling import RowSampling, coupled_argmax, logprobs, noise, process_logits
from support.on_device import DEVICE, HAS_DEVICE, assert_equal_bits, assert_rows_independent, needs_device
from torch import Tensor

pytest.importorskip("triton")

from shoal_kernels.ops.sampling.noise_triton import FAST_ERROR
from support.seldom import seldom
from unit.shoal_kernels.noise_probe import cuda_noise_of_words, largest_error, noise_of_words
from unit.shoal_kernels.parity import packed

VOCABS = (5, 999, 129280) if HAS_DEVICE else (5, 700)
FILTERS = (
    RowSampling(top_p=0.9),
    RowSampling(top_p=0.3, top_k=4),
    RowSampling(top_k=1),
    RowSampling(top_k=7, min_p=0.05),
    RowSampling(min_p=1.0),
    RowSampling(top_p=1e-9, temperature=0.2),
    RowSampling(top_k=100000, top_p=0.999),
    RowSampling(),
)


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows_of(kind: str, rows: int, vocab: int) -> Tensor:
    """Processed logits with ties, masked tokens, huge and flat rows."""
    z = torch.randn(rows, vocab, generator=random(rows + vocab)) * 3.0
    if kind == "masked":
        z[:, ::5] = z[:, :1].clone()
        z[:, 3::7] = -torch.inf
        z[1::3] *= 20.0
        z[2::9] = 0.0
    if kind == "cold":
        # Values whose last place is larger than most noise, so that many tokens tie after rounding.
        z = (z * 4.0).round() * 2.0**22
    return z


def how(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=random(rows))
    positions = torch.arange(rows) + (1 << 33) * (torch.arange(rows) % 2)
    return seeds.to(DEVICE), positions.to(DEVICE), (torch.arange(rows) % 4 == 0).to(DEVICE)


def test_noise_has_the_bits_of_the_host_and_the_fast_one_is_near() -> None:
    edges = torch.arange(-64, 64)
    around = [edges % (1 << 32), edges + (1 << 31), edges + (1 << 29), torch.randint(0, 1 << 32, (640,))]
    words = torch.cat(around)
    exact, fast = noise_of_words(words.to(DEVICE))
    u = (words.to(torch.float64) + 0.5) * 2.0**-32
    assert_equal_bits(exact, (-noise.log64(-noise.log64(1.0 - u))).to(torch.float32))
    assert float((exact - fast).abs().max()) <= FAST_ERROR.value


@pytest.mark.gpu
@needs_device
def test_fast_noise_keeps_its_bound_for_every_word() -> None:
    assert largest_error(DEVICE) <= FAST_ERROR.value


@pytest.mark.gpu
@needs_device
def test_noise_in_cuda_has_the_bits_of_the_one_in_triton() -> None:
    edges = torch.arange(-512, 512)
    around = [edges % (1 << 32), edges + (1 << 31), edges + (1 << 29), torch.randint(0, 1 << 32, (1 << 20,))]
    words = torch.cat(around).to(DEVICE)
    assert_equal_bits(cuda_noise_of_words(words), noise_of_words(words))


@pytest.mark.parametrize("kind", ["plain", "masked", "cold"])
@pytest.mark.parametrize("rows", [0, 9])
@pytest.mark.parametrize("vocab", VOCABS)
def test_the_token_is_that_of_the_exact_noise(kind: str, rows: int, vocab: int) -> None:
    z, (seeds, positions, greedy) = rows_of(kind, rows, vocab), how(rows)
    got = coupled_argmax(z.to(DEVICE), seeds, positions, greedy, backend="triton")
    want = coupled_argmax(z, seeds.cpu(), positions.cpu(), greedy.cpu(), backend="reference")
    assert torch.equal(got.cpu(), want)


def test_a_row_of_logits_keeps_its_token_in_any_batch() -> None:
    z, (seeds, positions, greedy) = rows_of("masked", 7, VOCABS[-1]).to(DEVICE), how(7)
    assert_rows_independent(
        lambda at: coupled_argmax(z[at], seeds[at], positions[at], greedy[at], backend="triton"), 7, sizes=(1, 3)
    )


@pytest.mark.parametrize("scale", [8.0, *seldom(0.0, 1.0)])
def test_filters_have_the_bits_of_the_host(scale: float) -> None:
    vocab = VOCABS[-1] if HAS_DEVICE else 300
    z = torch.randn(len(FILTERS), vocab, generator=random(vocab)) * scale
    z[:, ::5] = z[:, :1].clone()
    z[:, 3::7] = -torch.inf
    got = process_logits(z.to(DEVICE), FILTERS, backend="triton")
    assert_equal_bits(got, process_logits(z, FILTERS, backend="reference"))


@pytest.mark.gpu
@needs_device
def test_a_filtered_row_does_not_depend_on_its_batch_on_the_device() -> None:
    z = torch.randn(len(FILTERS), 129280, generator=random(5)).to(DEVICE) * 4.0
    assert_rows_independent(lambda at: process_logits(z[at], [FILTERS[i] for i in at.tolist()]), len(FILTERS))


def test_edits_have_the_bits_of_the_host() -> None:
    vocab, generator = VOCABS[-1], random(3)
    output_ids = torch.randperm(vocab, generator=generator)[: 1 + vocab // 3]
    counts = torch.randint(1, 9, output_ids.shape, generator=generator, dtype=torch.int32)
    seen = torch.randperm(vocab, generator=generator)[: 1 + vocab // 5]
    allowed = packed(torch.rand(vocab, generator=generator) < 0.9)
    bias_ids, bias = torch.tensor([1, vocab - 1]), torch.tensor([1.5, -2.0])
    whole = RowSampling(
        temperature=0.7,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.2,
        output_ids=output_ids,
        output_counts=counts,
        seen_ids=seen,
        allowed=allowed,
        bias_ids=bias_ids,
        bias=bias,
    )
    rows = [
        whole,
        RowSampling(),
        replace(whole, temperature=0.0, output_ids=None, output_counts=None),
        RowSampling(bias_ids=bias_ids, bias=bias),
        RowSampling(temperature=1e300, allowed=allowed, repetition_penalty=1e300, seen_ids=seen),
    ]
    logits = torch.randn(len(rows), vocab, generator=generator) * 5.0
    kept = logits.clone()
    got = process_logits(logits.to(DEVICE), rows, backend="triton")
    assert_equal_bits(got, process_logits(logits, rows, backend="reference"))
    assert torch.equal(logits, kept)


@pytest.mark.parametrize("vocab", [1, 64, VOCABS[-1]])
def test_logprobs_have_the_bits_of_the_host(vocab: int) -> None:
    z = torch.randn(3, vocab, generator=random(vocab)) * 5.0
    z[:, 1::3] = -torch.inf
    assert_equal_bits(logprobs(z.to(DEVICE), backend="triton"), logprobs(z))
