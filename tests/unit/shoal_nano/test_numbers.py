"""Casts and noise against published values."""

from __future__ import annotations

import numpy as np
import torch
from shoal_nano import quantise
from shoal_nano.noise import gumbel, philox4x32
from shoal_nano.released import decode, encode


def test_e2m1_ties_go_to_the_even_code() -> None:
    given = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 9.0, -2.5])
    wanted = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0, -2.0])
    assert torch.equal(quantise.round_e2m1(given), wanted)


def test_fp4_bytes_of_one_to_thirty_two_are_the_published_ones() -> None:
    data, scale = encode(torch.arange(1.0, 33.0)[None], "fp4")
    assert scale is not None
    assert scale.view(torch.uint8).item() == 130
    assert data.view(torch.uint8).flatten().tolist() == [
        0,
        17,
        33,
        34,
        34,
        51,
        67,
        68,
        68,
        68,
        85,
        85,
        85,
        101,
        102,
        102,
    ]


def test_q8_of_one_to_thirty_two_rounds_the_last_four_as_published() -> None:
    assert quantise.q8(torch.arange(1.0, 33.0))[-4:].tolist() == [28.0, 30.0, 32.0, 32.0]


def test_straight_through_passes_the_gradient_unchanged() -> None:
    x = torch.randn(4, 64, requires_grad=True)
    (quantise.fp4_weight(x) * 3).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 3.0))


def test_stored_bytes_decode_to_the_value_training_used() -> None:
    w = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    for storage, cast in (("fp8", quantise.fp8_weight), ("fp4", quantise.fp4_weight), ("fp8_rows", quantise.fp8_rows)):
        assert torch.equal(decode(*encode(w, storage), storage), cast(w)), storage


def test_philox_meets_its_known_answer() -> None:
    out = philox4x32(0, np.zeros((1, 4), np.uint32))[0]
    assert [hex(x) for x in out] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]


def test_gumbel_noise_differs_by_position_and_repeats_by_seed() -> None:
    assert np.array_equal(gumbel(5, 1, 64), gumbel(5, 1, 64))
    assert not np.array_equal(gumbel(5, 1, 64), gumbel(5, 2, 64))
