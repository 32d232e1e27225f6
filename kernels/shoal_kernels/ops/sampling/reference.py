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


def repetition_factor(penalty: float) -> float:
    """What the repetition penalty counts as."""
    return min(max(penalty, 1.0 / LARGEST_FACTOR), LARGEST_FACTOR)


def unpacked(words: Tensor, vocab: int) -> Tensor:
    """A packed mask as bool [V]."""
    bits = (words[:, None] >> torch.arange(32, dtype=torch.int32, device=words.device)) & 1
    return bits.flatten()[:vocab].to(torch.bool)


def edit_logits(
    logits: Tensor, rows: Sequence[RowSampling], inverse_temperature: Tensor, in_place: bool = False
) -> Tensor:
    """logits [R, V] -> [R, V] after bias, penalties, mask and temperature."""
    z = logits if in_place else logits.clone()
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
    if row.repetition_penalty != 1.0 and row.seen_ids is not None:
        factor = repetition_factor(row.repetition_penalty)
        penalty = torch.tensor(factor, dtype=torch.float32, device=z.device)
        seen = z[row.seen_ids]
        z[row.seen_ids] = torch.where(seen > 0.0, seen / penalty, seen * penalty)
    if row.output_ids is not None and row.output_counts is not None:
        if row.frequency_penalty != 0.0:
            z[row.output_ids] -= row.output_counts.to(torch.float32) * row.frequency_penalty
        if row.presence_penalty != 0.0:
            z[row.output_ids] -= row.presence_penalty
    if row.allowed is not None:
        z.masked_fill_(~unpacked(row.allowed, z.shape[0]), -torch.inf)
