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
    edit_logits,
    filter_logits,
    inverse_temperatures,
    logprobs,
)
from torch import Tensor

from shoal_model.shipping import ship

__all__ = [
    "REMOVED",
    "RowChoice",
    "RowSampling",
    "SampleRow",
    "Sampled",
    "TokenLogprobs",
    "accept_length",
    "choice_seed",
    "model_logprobs",
    "sample",
]

REMOVED = -9999.0
"""Log-probability of a token that the mask or the filters removed."""
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
    """Log-probability of a token, and of the n likeliest ones, best first, ties to the lower id.

    Always n of them: behind the tokens that can be sampled come those that the filters removed, likeliest first, then
    those that the mask removed, by id; all of these have REMOVED.
    """

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


def sample(
    logits: Tensor, rows: Sequence[SampleRow], *, in_place: bool = False, wants_margins: bool = False
) -> Sampled:
    """Sample one token per row of logits [R, V] (taken to float32, which `in_place` allows to be written over).

    Log-probabilities are those of the processed distribution: what is sampled from, filters included. A row at
    temperature 0 takes the arg-max; its log-probabilities are those at temperature 1 after bias, penalties and mask.
    raises   ValueError for a parameter out of range
    """
    settings = [row.sampling for row in rows]
    taken = logits.to(torch.float32)
    edited = edit_logits(taken, settings, in_place=in_place)
    asked = {i: row.num_logprobs for i, row in enumerate(rows) if row.num_logprobs is not None}
    # Filters keep the order of what they keep, so the order before them also ranks what they remove.
    ranked = {i: _best(edited[i], count) for i, count in asked.items()}
    z = filter_logits(edited, settings, in_place=in_place or edited is not taken)
    choice = RowChoice.of(rows, logits.device)
    token_ids = coupled_argmax(z, choice.seeds, choice.positions, choice.is_greedy)
    margins = None
    if wants_margins and z.device.type == "cpu":
        margins = coupled_margins(z, choice.seeds, choice.positions, choice.is_greedy, token_ids)
    found: list[TokenLogprobs | None] = [None] * len(rows)
    if asked:
        table = logprobs(z[list(asked)])
        for values, i in zip(table, asked, strict=True):
            found[i] = _token_logprobs(values, token_ids[i : i + 1], ranked[i])
    return Sampled(token_ids, tuple(found), margins)


def model_logprobs(logits: Tensor, token_ids: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Log-probabilities of given tokens, one per row of logits [R, V], and of the `count` likeliest of each row.

    The model's own distribution: temperature 1, nothing edited or filtered.
    """
    z = logits.to(torch.float32)
    chosen = torch.tensor(token_ids, dtype=torch.int64).to(z.device)
    table = logprobs(z)
    return [_token_logprobs(table[i], chosen[i : i + 1], _best(z[i], count)) for i in range(z.shape[0])]


def accept_length(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """How many drafts stand: the leading ones equal to the token sampled from the row before them.

    sampled  tokens of the verify rows, at least len(drafts) of them; sampled[accept length] is emitted after the drafts
    """
    for i, draft in enumerate(drafts):
        if draft != sampled[i]:
            return i
    return len(drafts)


def _best(values: Tensor, count: int) -> Tensor:
    """Ids int64 [min(count, V)] of the largest values [V], best first, ties to the lower id."""
    count = min(count, values.shape[0])
    if not count:
        return torch.empty(0, dtype=torch.int64, device=values.device)
    least = values.topk(count).values[-1]
    above = (values > least).nonzero()[:, 0]
    order = torch.sort(values[above], descending=True, stable=True).indices
    return torch.cat([above[order], (values == least).nonzero()[: count - above.shape[0], 0]])


def _token_logprobs(values: Tensor, token: Tensor, best: Tensor) -> TokenLogprobs:
    ids = torch.cat([token, best])
    found = [max(value, REMOVED) for value in values[ids].tolist()]
    return TokenLogprobs(found[0], tuple(zip(best.tolist(), found[1:], strict=True)))


def _signed(seed: int) -> int:
    """The same 64 bits as a signed number, which is what a tensor can hold."""
    return seed - _SEED_RANGE if seed >= _SEED_RANGE >> 1 else seed
