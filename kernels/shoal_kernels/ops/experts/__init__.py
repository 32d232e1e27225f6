"""Routed and shared experts: clamped SwiGLU between two linears."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal_kernels.checks import check_index, check_rows, check_values
from shoal_kernels.formats import dequantise_fp4_weight, dequantise_fp8_weight
from shoal_kernels.precision import Precision
from shoal_kernels.registry import resolve


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Weights of the experts of one layer, prepared for `experts`. Build it with the class methods.

    gate_up  float32 [E, D, 2*I], contiguous: w1 (gate) then w3 (up), transposed from the stored [I, D] each
    down     float32 [E, I, D], contiguous: w2, transposed from the stored [D, I]
    """

    gate_up: Tensor
    down: Tensor

    @staticmethod
    def from_fp4(
        w1: Sequence[tuple[Tensor, Tensor]], w3: Sequence[tuple[Tensor, Tensor]], w2: Sequence[tuple[Tensor, Tensor]]
    ) -> ExpertWeights:
        """(packed FP4 [out, in/2], ue8m0 scale [out, in/32]) of every expert, in expert order."""
        prepared = [[dequantise_fp4_weight(*pair) for pair in part] for part in (w1, w3, w2)]
        return ExpertWeights._prepare(*prepared)

    @staticmethod
    def from_fp8(w1: tuple[Tensor, Tensor], w3: tuple[Tensor, Tensor], w2: tuple[Tensor, Tensor]) -> ExpertWeights:
        """(e4m3 [out, in], ue8m0 scale per 32x32 block) of the shared expert."""
        return ExpertWeights._prepare(*([dequantise_fp8_weight(*pair)] for pair in (w1, w3, w2)))

    @staticmethod
    def _prepare(w1: Sequence[Tensor], w3: Sequence[Tensor], w2: Sequence[Tensor]) -> ExpertWeights:
        if not len(w1) == len(w2) == len(w3) >= 1:
            raise ValueError(f"every expert needs w1, w2 and w3, got {len(w1)}, {len(w2)}, {len(w3)}")
        gate_up = torch.stack([torch.cat((gate, up)).t() for gate, up in zip(w1, w3, strict=True)]).contiguous()
        return ExpertWeights(gate_up, torch.stack([down.t() for down in w2]).contiguous())

    @property
    def num_experts(self) -> int:
        """E."""
        return self.gate_up.shape[0]


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    expert_weights: ExpertWeights,
    limit: float,
    *,
    precision: Precision,
    backend: str | None = None,
) -> Tensor:
    """Sum of the chosen experts' outputs per row, in ascending expert id.

    x        [R, D], not cast yet (Q8 is applied here)
    ids      int32 [R, k], distinct per row; weights [R, k]: the routing weights, applied before the down projection
    limit    clamp of gate (above) and up (both sides)
    returns  [R, D], not rounded: every expert's output is rounded to bf16, their float32 sum is not
    raises   ValueError for shape, dtype or an id outside the experts
    exact    all implementations agree bit for bit; a row depends on itself only
    source   specification of the model, section 9
    """
    _check(x, ids, weights, expert_weights, precision)
    result: Tensor = resolve("experts", x.device.type, precision, backend)(
        x, ids, weights, expert_weights, limit, precision
    )
    return result


def moe(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    expert_weights: ExpertWeights,
    shared: ExpertWeights,
    limit: float,
    *,
    precision: Precision,
    backend: str | None = None,
) -> Tensor:
    """bf16(experts(x) + the shared expert's bf16 output): the whole feed-forward sub-layer behind the router.

    As `experts`; `shared` holds one expert, used by every row with weight 1 -> [R, D].
    """
    _check(x, ids, weights, expert_weights, precision)
    if shared.num_experts != 1:
        raise ValueError(f"shared must hold one expert, got {shared.num_experts}")
    result: Tensor = resolve("moe", x.device.type, precision, backend)(
        x, ids, weights, expert_weights, shared, limit, precision
    )
    return result


def _check(x: Tensor, ids: Tensor, weights: Tensor, expert_weights: ExpertWeights, precision: Precision) -> None:
    check_values("x", x, None, expert_weights.down.shape[2], precision=precision)
    check_rows("ids", ids, x.shape[0], None, dtype=torch.int32)
    check_values("weights", weights, x.shape[0], ids.shape[1], precision=precision)
    check_index("ids", ids, 0, expert_weights.num_experts)
