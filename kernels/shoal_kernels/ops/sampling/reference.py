"""Plain torch filters and coupled arg-max."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal_kernels import arith
from shoal_kernels.ops.sampling.noise import FIXED_POINT, gumbel

if TYPE_CHECKING:
    from shoal_kernels.ops.sampling import RowSampling

LARGEST_FACTOR = 1e30
"""Temperature and repetition penalty count as at most this, the penalty as at least its inverse: float32 holds both, so
that no product with a logit, or with the -inf of a masked one, is NaN."""


def edit_logits(logits: Tensor, rows: Sequence[RowSampling], inverse_temperature: Tensor) -> Tensor:
    """logits [R, V] -> a new [R, V] after bias, penalties, mask and temperature."""
    z = logits.clone()
    for index, row in enumerate(rows):
        if row.is_edited:
            _edit_row(z[index], row)
    heated = [index for index, row in enumerate(rows) if not row.is_greedy and row.temperature != 1.0]
    if heated:
        z[heated] = z[heated] * inverse_temperature[heated].to(z.device)[:, None]
    return z


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


def coupled_margins(z: Tensor, seeds: Tensor, positions: Tensor, is_greedy: Tensor, tokens: Tensor) -> Tensor:
    """z [R, V], tokens int64 [R] -> float32 [R]."""
    noisy = torch.where(is_greedy[:, None], z, z + gumbel(seeds, positions, z.shape[1]))
    best = noisy.gather(1, tokens[:, None])[:, 0]
    others = noisy.scatter(1, tokens[:, None], -torch.inf)
    return best - others.amax(1)


def logprobs(z: Tensor) -> Tensor:
    """z [R, V] -> log-softmax [R, V]."""
    shifted = z - z.amax(-1, keepdim=True)
    return shifted - arith.log(arith.tree_sum(arith.exp(shifted)))[:, None]


def _edit_row(z: Tensor, row: RowSampling) -> None:
    """Apply bias, penalties and mask to one row in place."""
    if row.bias_ids is not None and row.bias is not None:
        z[row.bias_ids] += row.bias
    counts = row.output_counts
    if row.repetition_penalty != 1.0 and (counts is not None or row.prompt_seen is not None):
        seen = torch.zeros_like(z, dtype=torch.bool)
        if counts is not None:
            seen |= counts > 0
        if row.prompt_seen is not None:
            seen |= row.prompt_seen
        factor = min(max(row.repetition_penalty, 1.0 / LARGEST_FACTOR), LARGEST_FACTOR)
        penalty = torch.tensor(factor, dtype=torch.float32, device=z.device)
        z.copy_(torch.where(seen, torch.where(z > 0.0, z / penalty, z * penalty), z))
    if counts is not None:
        if row.frequency_penalty != 0.0:
            z -= counts.to(torch.float32) * row.frequency_penalty
        if row.presence_penalty != 0.0:
            z -= (counts > 0).to(torch.float32) * row.presence_penalty
    if row.allowed is not None:
        z.masked_fill_(~row.allowed, -torch.inf)
