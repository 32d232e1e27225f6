"""Which roundings a forward pass applies: none, those of the cache only, or all that serving applies."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """One numeric mode of the model.

    name              stable spelling, part of the numerics identity
    dtype             dtype of every activation held in memory
    cast_cache        Q8 on window and draft KV, Q4nv on main KV, Q4ue on index keys and index queries
    cast_activations  Q8 on the input of every FP8 and FP4 linear
    round_bf16        activations are rounded to bfloat16 values wherever the model holds them in bfloat16

    `dtype` is torch.bfloat16 on accelerators: there rounded values are also held in 16 bits, and weights and window
    rows stay in the bytes of the checkpoint and of the cache.
    """

    name: str
    dtype: torch.dtype
    cast_cache: bool
    cast_activations: bool
    round_bf16: bool

    @property
    def wide(self) -> torch.dtype:
        """Dtype of what is never rounded to bfloat16: mixing coefficients, routing weights, raw scores, logits."""
        return torch.float32 if self.dtype == torch.bfloat16 else self.dtype

    @property
    def keeps_bytes(self) -> bool:
        """Whether weights and window rows are held as released bytes, not as dequantised values."""
        return self.dtype == torch.bfloat16

    def bf16(self, x: Tensor) -> Tensor:
        """`x` with every value rounded to bfloat16 (nearest, ties to even), as `dtype`; or `x` if not rounding."""
        return x.to(torch.bfloat16).to(self.dtype) if self.round_bf16 else x


EXACT = Precision(name="exact", dtype=torch.float64, cast_cache=False, cast_activations=False, round_bf16=False)
KV = Precision(name="kv", dtype=torch.float32, cast_cache=True, cast_activations=False, round_bf16=False)
SERVED = Precision(name="served", dtype=torch.float32, cast_cache=True, cast_activations=True, round_bf16=True)
SERVED_BF16 = Precision(
    name="served_bf16", dtype=torch.bfloat16, cast_cache=True, cast_activations=True, round_bf16=True
)
"""The roundings of SERVED on an accelerator."""
