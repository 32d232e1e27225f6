"""The head and the Markov loop as the operations they are made of."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal_kernels.ops.linear import LinearWeight, linear
from shoal_kernels.ops.sampling import coupled_argmax
from shoal_kernels.precision import Precision


def lm_head_argmax(
    hidden: Tensor,
    head: LinearWeight,
    inverse_temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    is_greedy: Tensor,
    precision: Precision,
) -> Tensor:
    """hidden [R, D] -> int64 [R]."""
    logits = linear(hidden, head, out="f32", precision=precision).to(torch.float32)
    return _choose(logits, inverse_temperature, seeds, positions, is_greedy)


def markov_loop(
    base_logits: Tensor,
    hidden: Tensor,
    previous: Tensor,
    markov_embed: Tensor,
    markov_head: LinearWeight,
    confidence: LinearWeight,
    inverse_temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    is_greedy: Tensor,
    width: int,
    precision: Precision,
) -> tuple[Tensor, Tensor]:
    """base_logits [n, B, V] -> tokens int64 [n, width], confidence logits [n, width]."""
    tokens, chances = [], []
    for j in range(width):
        embedded = torch.nn.functional.embedding(previous, markov_embed).to(precision.dtype)
        bias = linear(embedded, markov_head, out="f32", precision=precision)
        seen = torch.cat([hidden[:, j], embedded], dim=1)
        chances.append(linear(seen, confidence, out="f32", precision=precision)[:, 0])
        logits = (base_logits[:, j] + bias).to(torch.float32)
        previous = _choose(logits, inverse_temperature, seeds, positions + j, is_greedy)
        tokens.append(previous)
    return torch.stack(tokens, dim=1), torch.stack(chances, dim=1)


def _choose(
    logits: Tensor,
    inverse_temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    is_greedy: Tensor,
) -> Tensor:
    z = torch.where(is_greedy[:, None], logits, logits * inverse_temperature[:, None])
    return coupled_argmax(z, seeds, positions, is_greedy)
