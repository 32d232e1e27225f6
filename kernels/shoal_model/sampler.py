"""From logits to tokens: one path for plain rows, draft rows and verify rows. Source: dspark.md section 10.2.

The token of output index t is a function of the processed logits, the seed and t alone; whether the row was a plain, a
draft or a verify row cannot be seen from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from shoal_kernels.ops.sampling import (
    RowSampling,
    choice_seed,
    coupled_argmax,
    coupled_margins,
    inverse_temperatures,
    logprobs,
    process_logits,
)
from torch import Tensor

from shoal_model.shipping import ship

__all__ = [
    "RowChoice",
    "RowSampling",
    "SampleRow",
    "Sampled",
    "TokenLogprobs",
    "accept_length",
    "choice_seed",
    "sample",
]

_SEED_RANGE = 1 << 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """How one row is sampled.

    seed          unsigned 64-bit seed of the choice
    output_index  0-based index of the token in the choice's output
    num_logprobs  None: no log-probabilities; n: that of the token and of the n likeliest
    """

    sampling: RowSampling
    seed: int
    output_index: int
    num_logprobs: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.seed < _SEED_RANGE:
            raise ValueError(f"seed must be an unsigned 64-bit number, got {self.seed}")
        if self.output_index < 0 or (self.num_logprobs is not None and self.num_logprobs < 0):
            raise ValueError(
                f"output_index {self.output_index} and num_logprobs {self.num_logprobs} must not be negative"
            )


@dataclass(frozen=True, slots=True)
class RowChoice:
    """What decides the tokens of R rows besides their logits, where no row edits or filters them."""

    inverse_temperature: Tensor  # float32 [R], 1 where greedy
    seeds: Tensor  # int64 [R], the bits of the unsigned seed
    positions: Tensor  # int64 [R], output indices
    is_greedy: Tensor  # bool [R]

    @classmethod
    def of(cls, rows: Sequence[SampleRow], device: torch.device) -> RowChoice:
        """On the device, in one copy."""
        choice = cls(
            inverse_temperature=inverse_temperatures([row.sampling for row in rows]),
            seeds=torch.tensor([_signed(row.seed) for row in rows], dtype=torch.int64),
            positions=torch.tensor([row.output_index for row in rows], dtype=torch.int64),
            is_greedy=torch.tensor([row.sampling.is_greedy for row in rows], dtype=torch.bool),
        )
        return ship(choice, device)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of a token, and of the likeliest ones, best first, ties to the lower id."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens of a batch of rows; `logprobs[i]` is None where row i did not ask.

    margins   on the host, where asked for: by how much each token won over the next one
    """

    token_ids: Tensor  # int64 [R]
    logprobs: tuple[TokenLogprobs | None, ...]
    margins: Tensor | None = None  # float32 [R]


def sample(logits: Tensor, rows: Sequence[SampleRow], *, wants_margins: bool = False) -> Sampled:
    """Sample one token per row of logits [R, V] (taken to float32). Raises ValueError for a parameter out of range.

    Log-probabilities are those of the processed distribution; at temperature 0, of the model's.
    """
    z = process_logits(logits.to(torch.float32), [row.sampling for row in rows])
    choice = RowChoice.of(rows, logits.device)
    token_ids = coupled_argmax(z, choice.seeds, choice.positions, choice.is_greedy)
    margins = None
    if wants_margins and z.device.type == "cpu":
        margins = coupled_margins(z, choice.seeds, choice.positions, choice.is_greedy, token_ids)
    return Sampled(token_ids, _logprobs(z, token_ids, rows), margins)


def accept_length(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """How many drafts stand: the leading ones equal to the token sampled from the row before them.

    sampled  tokens of the verify rows, at least len(drafts) of them; sampled[accept length] is emitted after the drafts
    """
    for i, draft in enumerate(drafts):
        if draft != sampled[i]:
            return i
    return len(drafts)


def _logprobs(z: Tensor, token_ids: Tensor, rows: Sequence[SampleRow]) -> tuple[TokenLogprobs | None, ...]:
    asked = [i for i, row in enumerate(rows) if row.num_logprobs is not None]
    result: list[TokenLogprobs | None] = [None] * len(rows)
    if not asked:
        return tuple(result)
    table = logprobs(z[asked])
    for at, i in enumerate(asked):
        count = min(rows[i].num_logprobs or 0, table.shape[1])
        values, ids = torch.sort(table[at], descending=True, stable=True)
        top = zip(ids[:count].tolist(), values[:count].tolist(), strict=True)
        result[i] = TokenLogprobs(
            float(table[at, token_ids[i]]), tuple((token, value) for token, value in top if value > -torch.inf)
        )
    return tuple(result)


def _signed(seed: int) -> int:
    """The same 64 bits as a signed number, which is what a tensor can hold."""
    return seed - _SEED_RANGE if seed >= _SEED_RANGE >> 1 else seed
