"""Linear layers with FP8 or bfloat16 weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shoal_kernels.checks import check_values
from shoal_kernels.formats import dequantise_fp8_weight
from shoal_kernels.precision import Precision
from shoal_kernels.registry import resolve


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A weight prepared for `linear`. Build it with the class methods.

    data       float32 [groups, K, N], contiguous, transposed from the stored [out, in]; values are exact in bfloat16
    quantised  the stored weight is FP8, so the input of the linear is cast to Q8
    """

    data: Tensor
    quantised: bool

    @staticmethod
    def from_fp8(data: Tensor, scale: Tensor, *, groups: int = 1) -> LinearWeight:
        """data uint8/e4m3 [groups * N, K], scale ue8m0 bytes [ceil(groups * N / 32), ceil(K / 32)].

        groups > 1 is the block-diagonal linear of attention's output: input group g meets rows g * N .. of the weight.
        """
        return LinearWeight._prepare(dequantise_fp8_weight(data, scale), groups, quantised=True)

    @staticmethod
    def from_bf16(weight: Tensor, *, groups: int = 1) -> LinearWeight:
        """weight bfloat16 (or float32) [groups * N, K]. Its input is not cast."""
        return LinearWeight._prepare(weight.to(torch.float32), groups, quantised=False)

    @staticmethod
    def concat(parts: Sequence[LinearWeight]) -> LinearWeight:
        """One weight whose output is the outputs of `parts` side by side. ValueError unless K and kind agree."""
        first = parts[0]
        if any(
            part.quantised != first.quantised or part.groups != 1 or part.in_features != first.in_features
            for part in parts
        ):
            raise ValueError("concatenated weights need one input size, one kind of storage and one group")
        return LinearWeight(torch.cat([part.data for part in parts], dim=-1).contiguous(), first.quantised)

    @staticmethod
    def _prepare(weight: Tensor, groups: int, *, quantised: bool) -> LinearWeight:
        if weight.dim() != 2 or weight.shape[0] % groups:
            raise ValueError(f"weight must be [groups * out, in] with {groups} groups, got {list(weight.shape)}")
        data = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1]).transpose(1, 2).contiguous()
        return LinearWeight(data, quantised)

    @property
    def groups(self) -> int:
        """Number of independent blocks on the diagonal."""
        return self.data.shape[0]

    @property
    def in_features(self) -> int:
        """Size of the input row, all groups together."""
        return self.data.shape[0] * self.data.shape[1]

    @property
    def out_features(self) -> int:
        """Size of the output row, all groups together."""
        return self.data.shape[0] * self.data.shape[2]


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
    returns  [R, N] in the precision's dtype
    raises   ValueError for shape or dtype; BackendUnavailable if `backend` cannot run here
    exact    all implementations agree bit for bit; a row depends on itself only
    source   specification of the model, sections 3.3 and 4
    """
    check_values("x", x, None, weight.in_features, precision=precision)
    cast = cast and weight.quantised and precision.cast_activations
    if cast and weight.data.shape[1] % 32:
        raise ValueError(f"a Q8 input needs a size that is a multiple of 32, got {weight.data.shape[1]}")
    result: Tensor = resolve("linear", x.device.type, precision, backend)(
        x, weight.data, cast, out == "bf16", precision
    )
    return result
