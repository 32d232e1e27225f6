"""How Engram finds its table rows: primes, offsets and multipliers of each layer.

Source: v41-flash specification, sections 6.2 and 6.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shoal_model.config import EngramConfig
from shoal_model.errors import CheckpointError

_SEED_FACTOR = 10007
_INT64_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngramHash:
    """The hash of one Engram layer. A column is one n-gram size (2..max, slow) and head (fast)."""

    layer: int
    multipliers: NDArray[np.int64]
    """[max_ngram_size] odd; entry s belongs to the token s places back."""
    primes: NDArray[np.int64]
    """[columns] rows of each column's part of the table."""
    offsets: NDArray[np.int64]
    """[columns] first row of each column's part; the exclusive prefix sum of `primes`."""

    @property
    def rows(self) -> int:
        return int(self.primes.sum())


def build_hashes(engram: EngramConfig, path: str | Path = "config.json") -> tuple[EngramHash, ...]:
    """The hash of every Engram layer, in order of `engram.layer_ids`.

    Raises CheckpointError (about `path`) if a layer's primes do not sum to its `engram_num_embeddings`: then every
    lookup would hit another row than in training.
    """
    primes = search_primes(engram)
    hashes = []
    for layer, layer_primes, rows in zip(engram.layer_ids, primes, engram.num_embeddings, strict=True):
        offsets = np.cumsum(layer_primes) - layer_primes
        built = EngramHash(
            layer=layer, multipliers=_multipliers(layer, engram), primes=layer_primes, offsets=offsets.astype(np.int64)
        )
        if built.rows != rows:
            raise CheckpointError(
                path, f"text_config.engram_num_embeddings of layer {layer} must be {built.rows}, got {rows}"
            )
        hashes.append(built)
    return tuple(hashes)


def search_primes(engram: EngramConfig) -> tuple[NDArray[np.int64], ...]:
    """[columns] primes per Engram layer.

    Order: layer, n-gram size, head. For each layer and size the search restarts at `vocab_size` and goes upward,
    passing over primes handed out before, so in effect one ascending run of primes is dealt out.
    """
    found: list[NDArray[np.int64]] = []
    candidate = engram.vocab_size
    for _ in engram.layer_ids:
        column_primes: list[int] = []
        while len(column_primes) < engram.columns:
            if _is_prime(candidate):
                column_primes.append(candidate)
            candidate += 1
        found.append(np.array(column_primes, dtype=np.int64))
    return tuple(found)


def _multipliers(layer: int, engram: EngramConfig) -> NDArray[np.int64]:
    # The bound keeps compressed id times multiplier inside int64.
    bound = max(1, _INT64_MAX // engram.compressed_vocab_size // 2)
    drawn = np.random.default_rng(_SEED_FACTOR * layer).integers(0, bound, size=engram.max_ngram_size, dtype=np.int64)
    return drawn * 2 + 1


def _is_prime(number: int) -> bool:
    if number < 4:
        return number > 1
    return number % 2 == 1 and all(number % divisor for divisor in range(3, isqrt(number) + 1, 2))
