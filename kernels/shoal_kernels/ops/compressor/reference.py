"""Plain torch pair pooling."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal_kernels import arith
from shoal_kernels.precision import Precision


def pool_pairs(score: Tensor, value: Tensor, precision: Precision) -> Tensor:
    """score, value [2, R, d] -> [R, d]."""
    largest = torch.where(score[0] > score[1], score[0], score[1])
    first, second = arith.exp(score[0] - largest), arith.exp(score[1] - largest)
    total = first + second
    return precision.bf16((first / total) * value[0] + (second / total) * value[1])
