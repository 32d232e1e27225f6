"""Engram's table layout and hash.

source  v41-flash.md sections 6.1 to 6.3
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal_nano.config import NanoConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EngramLayout:
    """primes and offsets [tables, columns], multipliers [tables, 4], all int64; rows per table."""

    primes: Tensor
    offsets: Tensor
    multipliers: Tensor
    rows: list[int]


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


def engram_layout(config: NanoConfig) -> EngramLayout:
    """Primes by the released search order, and the hash multipliers, which depend on the compressed vocabulary size."""
    taken: set[int] = set()
    primes = []
    for _ in config.engram_layer_ids:
        for _ in range(config.engram_max_ngram_size - 1):
            current = config.engram_vocab_size - 1
            for _ in range(config.engram_n_heads):
                current += 1
                while current in taken or not _is_prime(current):
                    current += 1
                taken.add(current)
                primes.append(current)
    table = torch.tensor(primes).view(len(config.engram_layer_ids), -1)
    bound = max(1, (2**63 - 1) // config.engram_compressed_vocab_size // 2)
    multipliers = [
        np.random.default_rng(10007 * layer).integers(0, bound, size=config.engram_max_ngram_size, dtype=np.int64) * 2 + 1
        for layer in config.engram_layer_ids
    ]
    return EngramLayout(
        primes=table,
        offsets=table.cumsum(1) - table,
        multipliers=torch.from_numpy(np.stack(multipliers)),
        rows=table.sum(1).tolist(),
    )


def engram_rows(config: NanoConfig, layout: EngramLayout, compressed: Tensor, ids: Tensor, start: Tensor) -> list[Tensor]:
    """Table rows of every token, one int64 [B, T, columns] per Engram layer.

    compressed  int64[V] compressed id of each token
    ids, start  int64[B, T]; tokens before `start` count as the pad token
    """
    pad = int(compressed[config.engram_pad_token_id])
    position = torch.arange(ids.shape[1], device=ids.device)
    mine = compressed[ids]
    back = []
    for s in range(config.engram_max_ngram_size):
        shifted = torch.roll(mine, s, 1)
        back.append(torch.where(position - s >= start, shifted, pad))
    result = []
    heads = config.engram_n_heads
    for e in range(len(config.engram_layer_ids)):
        roll = back[0] * layout.multipliers[e, 0]
        columns = []
        for s in range(1, config.engram_max_ngram_size):
            roll = roll ^ (back[s] * layout.multipliers[e, s])
            part = slice((s - 1) * heads, s * heads)
            columns.append(roll[..., None] % layout.primes[e, part] + layout.offsets[e, part])
        result.append(torch.cat(columns, -1))
    return result
