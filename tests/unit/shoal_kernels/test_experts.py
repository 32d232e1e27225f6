"""experts and moe: compiled bits equal the reference's, however many rows an expert received."""

from __future__ import annotations

import pytest
import torch
from shoal_kernels import SERVED
from shoal_kernels.ops.experts import ExpertWeights, experts, moe
from unit.shoal_kernels.parity import ROW_COUNTS, assert_rows_independent, assert_same_bits, normal, values

_EXPERTS, _DIM, _INNER = 5, 64, 32


def _fp4(out: int, size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (out, size // 2), generator=generator).to(torch.uint8).view(torch.int8)
    return packed, torch.randint(121, 125, (out, size // 32), generator=generator, dtype=torch.uint8)


def _fp8(out: int, size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    data = normal(out, size, seed=seed).to(torch.float8_e4m3fn)
    return data, torch.full((out // 32, size // 32), 124, dtype=torch.uint8)


def _weights() -> tuple[ExpertWeights, ExpertWeights]:
    gate, up, down = (
        [_fp4(*shape, seed=base + expert) for expert in range(_EXPERTS)]
        for shape, base in (((_INNER, _DIM), 0), ((_INNER, _DIM), 10), ((_DIM, _INNER), 20))
    )
    shared = ExpertWeights.from_fp8(_fp8(_INNER, _DIM, 1), _fp8(_INNER, _DIM, 2), _fp8(_DIM, _INNER, 3))
    return ExpertWeights.from_fp4(gate, up, down), shared


def _routing(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    ids = torch.stack([torch.randperm(_EXPERTS, generator=generator)[:2] for _ in range(rows)] or [torch.zeros(2)])
    return ids[:rows].to(torch.int32), torch.rand(rows, 2, generator=generator)


@pytest.mark.parametrize("rows", ROW_COUNTS)
def test_experts_have_the_bits_of_the_reference(rows: int) -> None:
    routed, shared = _weights()
    x, (ids, weights) = values(rows, _DIM, seed=rows), _routing(rows)
    for name in ("experts", "moe"):
        got, want = (
            experts(x, ids, weights, routed, 10.0, precision=SERVED, backend=backend)
            if name == "experts"
            else moe(x, ids, weights, routed, shared, 10.0, precision=SERVED, backend=backend)
            for backend in ("cpu", "reference")
        )
        assert_same_bits(got, want)


def test_rows_do_not_depend_on_their_batch() -> None:
    (routed, shared), (ids, weights), x = _weights(), _routing(70), values(70, _DIM, seed=1)
    assert_rows_independent(
        lambda rows: moe(x[rows], ids[rows], weights[rows], routed, shared, 10.0, precision=SERVED), 70
    )


def test_the_order_of_the_chosen_experts_does_not_matter() -> None:
    (routed, _), (ids, weights), x = _weights(), _routing(9), values(9, _DIM, seed=1)
    flipped = experts(x, ids.flip(1), weights.flip(1), routed, 10.0, precision=SERVED)
    assert_same_bits(flipped, experts(x, ids, weights, routed, 10.0, precision=SERVED))


def test_a_shared_part_of_two_experts_is_refused() -> None:
    routed, _ = _weights()
    with pytest.raises(ValueError, match="shared must hold one expert, got 5"):
        moe(torch.zeros(0, _DIM), *_routing(0), routed, routed, 10.0, precision=SERVED)
