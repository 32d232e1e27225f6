"""Routed and shared experts: clamped SwiGLU between two linears."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal_kernels.checks import check_index, check_range, check_rows, check_values, check_wide
from shoal_kernels.formats import (
    WEIGHT_BLOCK,
    check_fp4_scale,
    check_fp8_scale,
    dequantise_fp4_weight,
    dequantise_fp8_weight,
)
from shoal_kernels.ops.experts.packing import pack_fp4, pack_fp8
from shoal_kernels.precision import Precision
from shoal_kernels.registry import resolve

Stored = tuple[Tensor, Tensor]
"""A weight as the checkpoint holds it: data, scales."""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Weights of the experts of one layer, prepared for `experts`, in one of two forms, by the static methods.

    Values (precisions that hold activations in float32 or float64), without scales:
    gate_up  float32 [E, D, 2*I], contiguous: w1 (gate) then w3 (up), transposed from the stored [I, D] each
    down     float32 [E, I, D], contiguous: w2, transposed from the stored [D, I]

    Bytes (`keep_bytes`), the stored bits in another order (see `packing`), w1 above w3:
    gate_up  int32 [E, ceil(D/256), words, 2*I, 16] with gate_up_scale uint8 [E, ceil(D/256), 2*I, 8]
    down     int32 [E, ceil(I/256), words, D, 16] with down_scale uint8 [E, ceil(I/256), D, 8]
    words    2 for FP4 and 4 for FP8
    """

    gate_up: Tensor
    down: Tensor
    gate_up_scale: Tensor | None = None
    down_scale: Tensor | None = None

    @staticmethod
    def from_fp4(
        w1: Sequence[Stored], w3: Sequence[Stored], w2: Sequence[Stored], *, keep_bytes: bool = False
    ) -> ExpertWeights:
        """(packed FP4 [out, in/2], ue8m0 scale [out, in/32]) of every expert, in expert order.

        With `keep_bytes` the work is done where the tensors are; ValueError for a scale above 2^1.
        """
        if keep_bytes:
            for pair in (*w1, *w3, *w2):
                check_fp4_scale(*pair)
            return ExpertWeights._from_bytes(w1, w3, w2, pack_fp4)
        prepared = [[dequantise_fp4_weight(*pair) for pair in part] for part in (w1, w3, w2)]
        return ExpertWeights._from_values(*prepared)

    @staticmethod
    def from_fp8(w1: Stored, w3: Stored, w2: Stored, *, keep_bytes: bool = False) -> ExpertWeights:
        """(e4m3 [out, in], ue8m0 scale per 32x32 block) of the shared expert.

        ValueError with `keep_bytes` for a scale above 2^7.
        """
        if keep_bytes:
            for pair in (w1, w3, w2):
                check_fp8_scale(*pair)
            if w1[0].shape[0] % WEIGHT_BLOCK:
                raise ValueError(f"the inner width must be a multiple of {WEIGHT_BLOCK}, got {w1[0].shape[0]}")
            return ExpertWeights._from_bytes([w1], [w3], [w2], pack_fp8)
        return ExpertWeights._from_values(*([dequantise_fp8_weight(*pair)] for pair in (w1, w3, w2)))

    @staticmethod
    def _from_values(w1: Sequence[Tensor], w3: Sequence[Tensor], w2: Sequence[Tensor]) -> ExpertWeights:
        _check_counts(w1, w3, w2)
        gate_up = torch.stack([torch.cat((gate, up)).t() for gate, up in zip(w1, w3, strict=True)]).contiguous()
        return ExpertWeights(gate_up, torch.stack([down.t() for down in w2]).contiguous())

    @staticmethod
    def _from_bytes(
        w1: Sequence[Stored],
        w3: Sequence[Stored],
        w2: Sequence[Stored],
        pack: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    ) -> ExpertWeights:
        _check_counts(w1, w3, w2)
        gate_up = [
            pack(*(torch.cat([part.view(torch.uint8) for part in parts]) for parts in zip(gate, up, strict=True)))
            for gate, up in zip(w1, w3, strict=True)
        ]
        down = [pack(data.view(torch.uint8), scale.view(torch.uint8)) for data, scale in w2]
        (words, scales), (down_words, down_scales) = (
            [torch.stack(parts) for parts in zip(*side, strict=True)] for side in (gate_up, down)
        )
        return ExpertWeights(words, down_words, scales, down_scales)

    @property
    def num_experts(self) -> int:
        """E."""
        return self.gate_up.shape[0]

    @property
    def keeps_bytes(self) -> bool:
        """Whether the weights are held as stored rather than as values."""
        return self.gate_up_scale is not None

    @property
    def dim(self) -> int:
        """D: size of an input and an output row."""
        return self.down.shape[3] if self.keeps_bytes else self.down.shape[2]

    @property
    def inner(self) -> int:
        """I: size of the activation between the two linears."""
        return self.gate_up.shape[3 if self.keeps_bytes else 2] // 2


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
    returns  [R, D] in the wide dtype, not rounded: every expert's output is rounded to bf16, their float32 sum is not
    raises   ValueError for shape, dtype or an id outside the experts
    exact    a row depends on itself only, however many rows an expert receives; all implementations on the host agree
             bit for bit. On an accelerator the sums over K have another fixed order: relative error against the host
             below 1e-2 of the row's norm
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
    if shared.keeps_bytes != expert_weights.keeps_bytes or shared.dim != expert_weights.dim:
        raise ValueError("shared must have the experts' form and row size")
    result: Tensor = resolve("moe", x.device.type, precision, backend)(
        x, ids, weights, expert_weights, shared, limit, precision
    )
    return result


def _check(x: Tensor, ids: Tensor, weights: Tensor, expert_weights: ExpertWeights, precision: Precision) -> None:
    if expert_weights.keeps_bytes != precision.keeps_bytes:
        raise ValueError(f"these weights were not prepared for precision {precision.name}")
    check_values("x", x, None, expert_weights.dim, precision=precision)
    check_rows("ids", ids, x.shape[0], None, dtype=torch.int32)
    check_wide("weights", weights, x.shape[0], ids.shape[1], precision=precision)
    check_range("k", ids.shape[1], 1, expert_weights.num_experts)
    check_index("ids", ids, 0, expert_weights.num_experts)


def _check_counts(w1: Sequence[object], w3: Sequence[object], w2: Sequence[object]) -> None:
    if not len(w1) == len(w2) == len(w3) >= 1:
        raise ValueError(f"every expert needs w1, w2 and w3, got {len(w1)}, {len(w2)}, {len(w3)}")
