"""Compiled router."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal_kernels.arith_nb import INF, power_of_two, softplus, tree_sum
from shoal_kernels.jit import kernel

_FLOOR = np.float32(1e-20)


@kernel("void(f4[:, ::1], f4[:, ::1], f8, i4[:, ::1], f4[:, ::1])")
def _route(logits: Any, bias: Any, scale: Any, ids: Any, weights: Any) -> None:
    rows, experts = logits.shape
    k = ids.shape[1]
    score, biased = np.empty(experts, np.float32), np.empty(experts, np.float32)
    scratch, is_left = np.empty(power_of_two(k), np.float32), np.empty(experts, np.bool_)
    for r in range(rows):
        z, b = logits[r], bias[r]
        for e in range(experts):
            score[e] = np.sqrt(softplus(z[e]))
            biased[e] = score[e] + b[e]
        for e in range(experts):
            # NaN ranks first, as a sort has it: whatever the row holds, k different experts are chosen.
            biased[e] = biased[e] if biased[e] == biased[e] else INF
            is_left[e] = True
        for place in range(k):
            best = -1
            for e in range(experts):
                if is_left[e] and (best < 0 or biased[e] > biased[best]):
                    best = e
            ids[r, place] = best
            is_left[best] = False
            scratch[place] = score[best]
        total = tree_sum(scratch, k) + _FLOOR
        for place in range(k):
            weights[r, place] = score[ids[r, place]] / total * np.float32(scale)


def route(logits: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    """logits, bias [R, E] -> ids int32 [R, k], weights [R, k]."""
    rows = logits.shape[0]
    ids, weights = torch.empty(rows, k, dtype=torch.int32), torch.empty(rows, k)
    _route(logits.contiguous().numpy(), bias.contiguous().numpy(), scale, ids.numpy(), weights.numpy())
    return ids, weights
