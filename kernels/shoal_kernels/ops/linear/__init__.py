"""Linear layers with FP8 or bfloat16 weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shoal_kernels.checks import check_values
from shoal_kernels.formats import WEIGHT_BLOCK, check_fp8_scale, dequantise_fp8_weight
from shoal_kernels.precision import Precision
from shoal_kernels.registry import resolve

# ue8m0 byte of 2^7.
_LARGEST_SCALE = 134


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A weight prepared for `linear`, in one of two forms. Build it with the static methods.

    Values (precisions that hold activations in float32 or float64):
    data        float32 [groups, K, N], contiguous, transposed from the stored [groups * N, K]; scale is None
    Bytes (`keep_bytes`, for precisions that keep bytes), as stored:
    data        uint8 [groups * N, K] of e4m3 with scale uint8 [ceil(groups * N / 32), ceil(K / 32)] of ue8m0, or
                bfloat16 [groups * N, K] without a scale

    groups      blocks on the diagonal: input group g meets output group g only
    quantised   the stored weight is FP8, so the input of the linear is cast to Q8
    """

    data: Tensor
    quantised: bool
    scale: Tensor | None = None
    groups: int = 1

    def __post_init__(self) -> None:
        if self.data.dim() == 2 and self.quantised != (self.scale is not None):
            raise ValueError("a weight kept as bytes has a scale exactly where it is FP8")

    @staticmethod
    def from_fp8(data: Tensor, scale: Tensor, *, groups: int = 1, keep_bytes: bool = False) -> LinearWeight:
        """data uint8/e4m3 [groups * N, K], scale ue8m0 bytes [ceil(groups * N / 32), ceil(K / 32)].

        groups > 1 is the block-diagonal linear of attention's output: input group g meets rows g * N .. of the weight.
        Kept as bytes, a scale may be 2^7 at most (ValueError), so that e4m3 bytes become bfloat16 by one product; the
        bytes of NaN are not looked for and stand for 480 there.
        """
        check_groups(data, groups)
        if keep_bytes:
            check_fp8_scale(data, scale)
            if scale.device.type != "meta" and scale.numel() and int(scale.view(torch.uint8).max()) > _LARGEST_SCALE:
                raise ValueError("the scales of an FP8 weight that is kept as bytes must be 2^7 at most")
            stored = data.view(torch.uint8).contiguous(), True, scale.view(torch.uint8).contiguous()
            return LinearWeight(*stored, groups)
        return LinearWeight._from_values(dequantise_fp8_weight(data, scale), groups, quantised=True)

    @staticmethod
    def from_bf16(weight: Tensor, *, groups: int = 1, keep_bytes: bool = False) -> LinearWeight:
        """weight bfloat16 (or float32) [groups * N, K]. Its input is not cast."""
        check_groups(weight, groups)
        if keep_bytes:
            return LinearWeight(weight.to(torch.bfloat16).contiguous(), False, None, groups)
        return LinearWeight._from_values(weight.to(torch.float32), groups, quantised=False)

    @staticmethod
    def concat(parts: Sequence[LinearWeight]) -> LinearWeight:
        """One weight whose output is the outputs of `parts` side by side. ValueError unless K and kind agree."""
        first = parts[0]
        if any(
            part.quantised != first.quantised
            or part.keeps_bytes != first.keeps_bytes
            or part.groups != 1
            or part.in_features != first.in_features
            for part in parts
        ):
            raise ValueError("concatenated weights need one input size, one kind of storage and one group")
        if not first.keeps_bytes:
            return LinearWeight(torch.cat([part.data for part in parts], dim=-1).contiguous(), first.quantised)
        data = torch.cat([part.data for part in parts])
        scales = [part.scale for part in parts if part.scale is not None]
        if scales and any(part.out_features % WEIGHT_BLOCK for part in parts[:-1]):
            raise ValueError(f"FP8 weights are joined at multiples of {WEIGHT_BLOCK} rows")
        return LinearWeight(data, first.quantised, torch.cat(scales) if scales else None)

    @staticmethod
    def _from_values(weight: Tensor, groups: int, *, quantised: bool) -> LinearWeight:
        data = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1]).transpose(1, 2).contiguous()
        return LinearWeight(data, quantised, None, groups)

    @property
    def keeps_bytes(self) -> bool:
        """Whether `data` is the stored weight rather than its values."""
        return self.data.dim() == 2

    @property
    def depth(self) -> int:
        """K: size of one group's input."""
        return self.data.shape[1]

    @property
    def in_features(self) -> int:
        """Size of the input row, all groups together."""
        return self.groups * self.depth

    @property
    def out_features(self) -> int:
        """Size of the output row, all groups together."""
        return self.data.shape[0] if self.keeps_bytes else self.data.shape[0] * self.data.shape[2]


def check_groups(weight: Tensor, groups: int) -> None:
    """Require weight [groups * out, in]."""
    if weight.dim() != 2 or weight.shape[0] % groups:
        raise ValueError(f"weight must be [groups * out, in] with {groups} groups, got {list(weight.shape)}")


def linear(
    x: Tensor,
    weight: LinearWeight,
    *,
    out: Literal["bf16", "f32"] = "bf16",
    cast: bool = True,
    precision: Precision,
    backend: str | None = None,
) -> Tensor:
    """Rows times a weight, accumulated in float32 over K ascending.

    x        [R, K] in the precision's dtype; R may be 0
    cast     Q8 the input if the weight is FP8 and the precision casts activations; False: the caller has done it
    out      "bf16": the result is rounded to bfloat16 values if the precision rounds; "f32": it is not
    returns  [R, N] in the precision's dtype, or its wide dtype for "f32"
    raises   ValueError for shape or dtype; BackendUnavailable if `backend` cannot run here
    exact    a row depends on itself only; all implementations on the host agree bit for bit. On an accelerator the sum
             over K has another fixed order: relative error against the host below 1e-2 of the row's norm (bf16 output)
    source   specification of the model, sections 3.3 and 4
    """
    check_values("x", x, None, weight.in_features, precision=precision)
    if out not in ("bf16", "f32"):
        raise ValueError(f"out must be bf16 or f32, got {out!r}")
    cast = cast and weight.quantised and precision.cast_activations
    if weight.keeps_bytes != precision.keeps_bytes:
        raise ValueError(f"this weight was not prepared for precision {precision.name}")
    if cast and weight.depth % 32:
        raise ValueError(f"a Q8 input needs a size that is a multiple of 32, got {weight.depth}")
    result: Tensor = resolve("linear", x.device.type, precision, backend)(x, weight, cast, out == "bf16", precision)
    return result
