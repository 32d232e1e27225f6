"""The head and the Markov loop as the operations they are made of."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal_kernels.ops.linear import LinearWeight, linear
from shoal_kernels.ops.sampling import coupled_argmax, coupled_margins
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
    z = _processed(logits, inverse_temperature, is_greedy)
    return coupled_argmax(z, seeds, positions, is_greedy)


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
) -> tuple[Tensor, Tensor, Tensor]:
    """base_logits [n, B, V] -> tokens int64 [n, width], confidence logits [n, width], margins float32 [n, width]."""
    tokens, chances, margins = [], [], []
    for j in range(width):
        embedded = torch.nn.functional.embedding(previous, markov_embed).to(precision.dtype)
        bias = linear(embedded, markov_head, out="f32", precision=precision)
        seen = torch.cat([hidden[:, j], embedded], dim=1)
        chances.append(linear(seen, confidence, out="f32", precision=precision)[:, 0])
        logits = (base_logits[:, j] + bias).to(torch.float32)
        z = _processed(logits, inverse_temperature, is_greedy)
        previous = coupled_argmax(z, seeds, positions + j, is_greedy)
        tokens.append(previous)
        margins.append(_margins(z, seeds, positions + j, is_greedy, previous))
    return torch.stack(tokens, dim=1), torch.stack(chances, dim=1), torch.stack(margins, dim=1)


def _processed(logits: Tensor, inverse_temperature: Tensor, is_greedy: Tensor) -> Tensor:
    return torch.where(is_greedy[:, None], logits, logits * inverse_temperature[:, None])


def _margins(z: Tensor, seeds: Tensor, positions: Tensor, is_greedy: Tensor, tokens: Tensor) -> Tensor:
    if z.device.type != "cpu":
        return torch.full(z.shape[:1], torch.nan, dtype=torch.float32, device=z.device)
    return coupled_margins(z, seeds, positions, is_greedy, tokens)
