"""Arguments that a kernel would read past, or fail at without a word, are a ValueError that names them."""

from __future__ import annotations

import pytest
import torch
from shoal_kernels import SERVED, SERVED_BF16
from shoal_kernels.ops.cast import cast_q4ue, cast_q8
from shoal_kernels.ops.engram import gate
from shoal_kernels.ops.experts import ExpertWeights, experts, moe
from shoal_kernels.ops.hyper_connections import MixWeight, mix
from shoal_kernels.ops.linear import LinearWeight, linear
from shoal_kernels.ops.router import route
from shoal_kernels.ops.sampling import RowSampling, process_logits


def _fp8(out: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    scale = torch.full((out // 32, size // 32), 120, dtype=torch.uint8)
    return torch.ones(out, size, dtype=torch.uint8), scale


def _weights(dim: int, *, keep_bytes: bool) -> ExpertWeights:
    return ExpertWeights.from_fp8(_fp8(32, dim), _fp8(32, dim), _fp8(dim, 32), keep_bytes=keep_bytes)


@pytest.mark.parametrize(("dim", "keep_bytes"), [(64, True), (96, False)])
def test_a_shared_expert_of_another_form_or_size_is_refused(dim: int, keep_bytes: bool) -> None:
    x, ids, weights = torch.zeros(2, 64), torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1)
    shared = _weights(dim, keep_bytes=keep_bytes)
    with pytest.raises(ValueError, match="shared"):
        moe(x, ids, weights, _weights(64, keep_bytes=False), shared, 7.0, precision=SERVED)


def test_a_row_without_experts_is_refused() -> None:
    ids, weights = torch.zeros(2, 0, dtype=torch.int32), torch.ones(2, 0)
    with pytest.raises(ValueError, match="k must be"):
        experts(torch.zeros(2, 64), ids, weights, _weights(64, keep_bytes=False), 7.0, precision=SERVED)


@pytest.mark.parametrize("cast", [cast_q8, cast_q4ue])
@pytest.mark.parametrize("x", [torch.zeros(2, 32), torch.zeros((), dtype=torch.bfloat16)])
def test_a_cast_wants_rows_of_the_precisions_dtype(cast: type[object], x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="x must be"):
        cast(x, precision=SERVED_BF16)  # type: ignore[call-arg]


def test_a_bias_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="bias"):
        route(torch.zeros(2, 8), torch.zeros(3), 2, 1.0, precision=SERVED)


def test_more_choices_than_a_kernel_sums_are_refused() -> None:
    triton = pytest.importorskip("shoal_kernels.ops.router.triton")
    with pytest.raises(ValueError, match="64 experts at most"):
        triton.route(torch.zeros(2, 384), torch.zeros(2, 384), 65, 1.0)


def test_streams_without_an_axis_are_refused() -> None:
    weight = MixWeight.prepare(torch.zeros(24, 128), torch.ones(3), torch.zeros(24))
    with pytest.raises(ValueError, match="streams"):
        mix(torch.zeros(4, 32), weight, iterations=1, eps=1e-6, rms_eps=1e-6, precision=SERVED)


@pytest.mark.parametrize(
    "row",
    [
        RowSampling(bias_ids=torch.tensor([8]), bias=torch.ones(1)),
        RowSampling(bias_ids=torch.tensor([-1]), bias=torch.ones(1)),
        RowSampling(bias_ids=torch.tensor([1, 2]), bias=torch.ones(1)),
        RowSampling(presence_penalty=1.0, output_counts=torch.ones(1, dtype=torch.int32)),
        RowSampling(presence_penalty=1.0, output_ids=torch.tensor([1]), output_counts=torch.ones(1)),
        RowSampling(presence_penalty=1.0, output_ids=torch.tensor([8]), output_counts=torch.ones(1, dtype=torch.int32)),
        RowSampling(repetition_penalty=2.0, seen_ids=torch.tensor([8])),
        RowSampling(allowed=torch.ones(8, dtype=torch.int32)),
        RowSampling(allowed=torch.ones(1, dtype=torch.bool)),
    ],
)
def test_edits_outside_the_vocabulary_or_of_another_dtype_are_refused(row: RowSampling) -> None:
    with pytest.raises(ValueError, match=r"bias|output_|seen_ids|allowed"):
        process_logits(torch.zeros(1, 8), [row])


def test_a_linear_refuses_an_output_it_does_not_know_and_bytes_without_a_scale() -> None:
    weight = LinearWeight.from_bf16(torch.zeros(8, 32))
    with pytest.raises(ValueError, match="out must be"):
        linear(torch.zeros(1, 32), weight, out="f16", precision=SERVED)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="scale"):
        LinearWeight(torch.zeros(8, 32, dtype=torch.uint8), True)
    with pytest.raises(ValueError, match="streams"):
        gate(
            torch.zeros(2, 8), torch.zeros(2, 40), torch.zeros(4, 8), torch.zeros(2, dtype=torch.bool), precision=SERVED
        )
