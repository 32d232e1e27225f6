"""Sampling: known answers of Philox, bits of the noise, order of processing, filters against a plain search."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from shoal_kernels.ops.sampling import (
    RowSampling,
    choice_seed,
    coupled_argmax,
    gumbel,
    logprobs,
    philox4x32,
    process_logits,
)
from unit.shoal_kernels.golden_units import golden
from unit.shoal_kernels.parity import assert_same_bits, normal, packed


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_answers(counter: list[int], key: list[int], want: list[int]) -> None:
    assert philox4x32(torch.tensor(counter), torch.tensor(key)).tolist() == want


def test_noise_is_the_double_logarithm_of_the_uniform() -> None:
    seeds, positions = torch.tensor([7, -3]), torch.tensor([0, 1 << 33])
    noise = gumbel(seeds, positions, 4099)
    for row in range(2):
        key = torch.tensor([int(seeds[row]) & 0xFFFFFFFF, int(seeds[row]) >> 32 & 0xFFFFFFFF])
        position = int(positions[row])
        for v in (0, 1, 5, 1000, 4098):
            counter = torch.tensor([v // 4, position & 0xFFFFFFFF, position >> 32, 0])
            u = (int(philox4x32(counter, key)[v % 4]) + 0.5) * 2.0**-32
            assert noise[row, v].item() == pytest.approx(-math.log(-math.log1p(-u)), rel=1e-6, abs=1e-7)


def test_noise_has_the_mean_and_variance_of_a_gumbel() -> None:
    noise = gumbel(torch.arange(16), torch.arange(16), 8192).double()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.02)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.05)


def _z(rows: int, vocab: int) -> torch.Tensor:
    z = normal(rows, vocab, seed=rows * vocab, scale=3.0)
    z[:, ::5] = z[:, :1].clone()
    z[:, 3::7] = -torch.inf
    return z


@pytest.mark.parametrize("rows", [0, 1, 6, 70])
@pytest.mark.parametrize("vocab", [5, 64, 999])
def test_compiled_arg_max_equals_the_reference(rows: int, vocab: int) -> None:
    z = _z(rows, vocab)
    z[1::3] *= 20.0
    z[2::9] = 0.0
    seeds, positions = torch.arange(rows) * 0x123456789ABCDEF, torch.arange(rows)
    greedy = torch.arange(rows) % 4 == 0
    got, want = (coupled_argmax(z, seeds, positions, greedy, backend=name) for name in ("cpu", "reference"))
    assert torch.equal(got, want)


def test_a_row_keeps_its_token_in_any_batch() -> None:
    z, seeds, positions = _z(40, 300), torch.arange(40) + 5, torch.arange(40) * 2
    greedy = torch.zeros(40, dtype=torch.bool)
    whole = coupled_argmax(z, seeds, positions, greedy)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    assert torch.equal(coupled_argmax(z[order], seeds[order], positions[order], greedy), whole[order])
    assert torch.equal(coupled_argmax(z[7:8], seeds[7:8], positions[7:8], greedy[7:8]), whole[7:8])


def test_greedy_ties_go_to_the_lower_id() -> None:
    z = torch.tensor([[0.0, 2.0, 2.0, -1.0]])
    zero = torch.zeros(1, dtype=torch.int64)
    assert coupled_argmax(z, zero, zero, torch.ones(1, dtype=torch.bool)).tolist() == [1]


def test_frequencies_follow_the_softmax() -> None:
    z = torch.tensor([[1.0, 0.0, -1.0, -torch.inf]]).expand(20000, 4).contiguous()
    greedy = torch.zeros(20000, dtype=torch.bool)
    tokens = coupled_argmax(z, torch.full((20000,), 11), torch.arange(20000), greedy)
    counts = torch.bincount(tokens, minlength=4) / 20000
    torch.testing.assert_close(counts, z[0].softmax(0), rtol=0, atol=0.02)


_FILTERS = [
    RowSampling(top_p=0.9),
    RowSampling(top_p=0.3, top_k=4),
    RowSampling(top_k=1),
    RowSampling(top_k=7, min_p=0.05),
    RowSampling(min_p=1.0),
    RowSampling(top_p=0.999, temperature=1.7),
    RowSampling(top_p=1e-9, temperature=0.2),
    RowSampling(top_k=100000),
]


@pytest.mark.parametrize("vocab", [4, 97, 2500])
def test_compiled_filters_equal_the_reference(vocab: int) -> None:
    z = _z(len(_FILTERS), vocab)
    got, want = (process_logits(z, _FILTERS, backend=name) for name in ("cpu", "reference"))
    assert_same_bits(got, want)
    flat = torch.zeros(len(_FILTERS), vocab)
    got, want = (process_logits(flat, _FILTERS, backend=name) for name in ("cpu", "reference"))
    assert_same_bits(got, want)


def test_a_filtered_row_does_not_depend_on_its_batch() -> None:
    z = _z(len(_FILTERS), 97)
    whole = process_logits(z, _FILTERS)
    for row, settings in enumerate(_FILTERS):
        assert_same_bits(process_logits(z[row : row + 1], [settings]), whole[row : row + 1])


def test_golden_distributions_come_from_the_compiled_filters_too() -> None:
    names = ("sample.temperature", "sample.top_p", "sample.top_k")
    rows = [
        RowSampling(temperature=float(t), top_p=float(p), top_k=int(k))
        for t, p, k in zip(*(golden(name) for name in names), strict=True)
    ]
    logits = golden("sample.logits")
    assert_same_bits(process_logits(logits, rows), process_logits(logits, rows, backend="reference"))


def test_top_p_keeps_the_token_that_crosses_the_mass() -> None:
    z = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    kept = process_logits(z, [RowSampling(top_p=0.6)])
    assert (~kept.isinf()).tolist() == [[True, True, False, False]]


def test_rows_that_change_nothing_cost_no_copy() -> None:
    z = _z(3, 50)
    assert process_logits(z, [RowSampling(), RowSampling(temperature=0.0, top_p=0.1, top_k=1), RowSampling()]) is z


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_bias_comes_before_penalties_and_the_mask_before_temperature(backend: str) -> None:
    z = torch.tensor([[1.0, -1.0, 2.0, 0.5]])
    row = RowSampling(
        temperature=2.0,
        repetition_penalty=2.0,
        frequency_penalty=0.25,
        presence_penalty=0.5,
        bias_ids=torch.tensor([0]),
        bias=torch.tensor([3.0]),
        output_ids=torch.tensor([0]),
        output_counts=torch.tensor([2], dtype=torch.int32),
        seen_ids=torch.tensor([0, 1]),
        allowed=torch.tensor([0b0111], dtype=torch.int32),
    )
    got = process_logits(z, [row], backend=backend)
    # (1 + 3) / 2 - 2 * 0.25 - 0.5 = 1; -1 * 2 = -2; then halved by the temperature.
    assert got.tolist() == [[0.5, -1.0, 1.0, -math.inf]]
    assert z.tolist() == [[1.0, -1.0, 2.0, 0.5]]


@pytest.mark.parametrize("vocab", [1, 31, 32, 97, 2500])
def test_compiled_edits_equal_the_reference(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    some = torch.randperm(vocab, generator=generator)[: 1 + vocab // 3]
    counts = torch.randint(1, 9, some.shape, generator=generator, dtype=torch.int32)
    whole = RowSampling(
        temperature=0.7,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.2,
        output_ids=some,
        output_counts=counts,
        seen_ids=torch.randperm(vocab, generator=generator)[: 1 + vocab // 2],
        bias_ids=torch.tensor([0, vocab - 1][: min(vocab, 2)]),
        bias=torch.tensor([1.5, -2.0][: min(vocab, 2)]),
        allowed=packed(torch.rand(vocab, generator=generator) < 0.5),
    )
    rows = [
        whole,
        RowSampling(),
        replace(whole, temperature=0.0, output_ids=None, output_counts=None),
        replace(whole, allowed=packed(torch.ones(vocab, dtype=torch.bool)), top_p=0.8),
        RowSampling(allowed=packed(torch.arange(vocab) == vocab - 1)),
        RowSampling(temperature=1e300, seen_ids=some, repetition_penalty=1e300),
    ]
    logits = normal(len(rows), vocab, seed=vocab, scale=5.0)
    kept = logits.clone()
    got, want = (process_logits(logits, rows, backend=name) for name in ("cpu", "reference"))
    assert_same_bits(got, want)
    assert_same_bits(logits, kept)
    assert_same_bits(process_logits(logits, rows, in_place=True), want)


def test_bits_of_a_mask_past_the_vocabulary_are_not_read() -> None:
    row = RowSampling(allowed=torch.tensor([-1 << 5], dtype=torch.int32))
    z = process_logits(torch.zeros(1, 7), [row])
    assert z.tolist() == [[-math.inf] * 5 + [0.0] * 2]


@pytest.mark.parametrize("vocab", [1, 64, 200])
def test_compiled_logprobs_equal_the_reference(vocab: int) -> None:
    z = _z(5, vocab)
    z[:, 0] = 1.0
    assert_same_bits(logprobs(z, backend="cpu"), logprobs(z, backend="reference"))


def test_logprobs_are_a_log_softmax() -> None:
    z = _z(5, 200)
    torch.testing.assert_close(logprobs(z), z.log_softmax(1), rtol=1e-5, atol=1e-5)


def test_choices_of_one_request_have_their_own_seeds() -> None:
    seeds = [choice_seed(12345, choice) for choice in range(8)]
    assert seeds[0] == 12345
    assert len(set(seeds)) == 8
    assert all(0 <= seed < 1 << 64 for seed in seeds)


@pytest.mark.parametrize("bad", [{"top_p": 0.0}, {"top_p": 1.5}, {"temperature": -1.0}, {"min_p": 2.0}])
def test_parameters_outside_their_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="need temperature"):
        process_logits(torch.zeros(1, 4), [replace(RowSampling(), **bad)])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "extreme", [{"temperature": 1e300}, {"repetition_penalty": 1e300}, {"repetition_penalty": 1e-300}]
)
@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.9}])
def test_extreme_parameters_never_let_a_masked_token_through(extreme: dict[str, Any], filters: dict[str, Any]) -> None:
    allowed = packed(torch.arange(64) >= 6)
    row = RowSampling(**extreme, **filters, allowed=allowed, seen_ids=torch.arange(64))
    logits = torch.zeros(1, 64)
    logits[0, ::3] = -1.0
    logits[0, 1::3] = 2.0
    for backend in ("cpu", "reference"):
        z = process_logits(logits, [row], backend=backend)
        assert not z.isnan().any()
        token = coupled_argmax(z, torch.tensor([5]), torch.tensor([0]), torch.tensor([False]), backend=backend)
        assert 6 <= int(token) < 64
