"""Compiled pair pooling."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal_kernels.arith_nb import bf16, exp
from shoal_kernels.jit import kernel
from shoal_kernels.precision import Precision


@kernel("void(f4[:, :, ::1], f4[:, :, ::1], f4[:, ::1])")
def _pool(score: Any, value: Any, out: Any) -> None:
    for r in range(out.shape[0]):
        s0, s1, v0, v1, target = score[0, r], score[1, r], value[0, r], value[1, r], out[r]
        for c in range(target.shape[0]):
            largest = s0[c] if s0[c] > s1[c] else s1[c]
            first, second = exp(s0[c] - largest), exp(s1[c] - largest)
            total = first + second
            target[c] = bf16((first / total) * v0[c] + (second / total) * v1[c])


def pool_pairs(score: Tensor, value: Tensor, precision: Precision) -> Tensor:
    """score, value [2, R, d] -> [R, d]."""
    out = torch.empty(score.shape[1:])
    _pool(score.contiguous().numpy(), value.contiguous().numpy(), out.numpy())
    return out
