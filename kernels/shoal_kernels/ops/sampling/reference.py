"""Plain torch filters and coupled arg-max."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal_kernels import arith
from shoal_kernels.ops.sampling.noise import FIXED_POINT, gumbel


def filter_logits(z: Tensor, top_p: Sequence[float], top_k: Sequence[int], min_p: Sequence[float]) -> Tensor:
    """z [R, V] after temperature -> [R, V] with the removed tokens at -inf."""
    result = torch.full_like(z, -torch.inf)
    for row in range(z.shape[0]):
        order = torch.sort(z[row], descending=True, stable=True).indices
        ranked = z[row, order]
        terms = arith.exp(z[row] - ranked[0])
        p = (terms / arith.tree_sum(terms))[order]
        keep = torch.ones_like(p, dtype=torch.bool)
        if top_p[row] < 1.0:
            mass = torch.round(p * FIXED_POINT).to(torch.int64)
            keep &= mass.cumsum(0) - mass <= math.floor(top_p[row] * FIXED_POINT)
        if top_k[row] > 0:
            keep[top_k[row] :] = False
        if min_p[row] > 0.0:
            keep &= p >= p[0] * min_p[row]
        result[row, order[keep]] = ranked[keep]
    return result


def coupled_argmax(z: Tensor, seeds: Tensor, positions: Tensor, is_greedy: Tensor) -> Tensor:
    """z [R, V] -> int64 [R]."""
    noise = gumbel(seeds, positions, z.shape[1])
    noisy = torch.where(is_greedy[:, None], z, z + noise)
    best = noisy.amax(1, keepdim=True)
    ids = torch.arange(z.shape[1], device=z.device)
    return torch.where(noisy == best, ids, z.shape[1]).amin(1)
