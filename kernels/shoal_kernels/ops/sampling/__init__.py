"""Sampling: processed logits, counter-based Gumbel noise, and the token that wins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal_kernels import arith
from shoal_kernels.checks import check_rows
from shoal_kernels.ops.sampling.noise import choice_seed, gumbel, philox4x32
from shoal_kernels.precision import SERVED
from shoal_kernels.registry import resolve

__all__ = [
    "GREEDY_BELOW",
    "RowSampling",
    "choice_seed",
    "coupled_argmax",
    "gumbel",
    "inverse_temperatures",
    "logprobs",
    "philox4x32",
    "process_logits",
]

GREEDY_BELOW = 1e-5
_LARGEST_FACTOR = 1e30
"""Temperature and repetition penalty count as at most this, the penalty as at least its inverse: float32 holds both, so
that no product with a logit, or with the -inf of a masked one, is NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSampling:
    """How one row's logits become a distribution. The defaults change nothing.

    temperature         below 1e-5: arg-max, and no filter applies; above 1e30 as 1e30
    top_p               in (0, 1]; 1 is off
    top_k               tokens kept; 0 or less is off
    min_p               in [0, 1]: tokens less likely than min_p times the likeliest go; 0 is off
    repetition_penalty  over prompt and output; presence and frequency penalties over the output. Outside of
                        [1e-30, 1e30] as the nearer end
    bias_ids, bias      int64 [n], float32 [n]: added to the logits; ids are distinct
    output_counts       int32 [V]: how often each id stands in the output (in a draft: with the drafts before this row)
    prompt_seen         bool [V]: ids of the prompt, read by the repetition penalty only
    allowed             bool [V]: ids that may be sampled; at least one
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias_ids: Tensor | None = None
    bias: Tensor | None = None
    output_counts: Tensor | None = None
    prompt_seen: Tensor | None = None
    allowed: Tensor | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the token is the arg-max."""
        return self.temperature < GREEDY_BELOW

    @property
    def is_filtered(self) -> bool:
        """Whether top-p, top-k or min-p can remove a token."""
        return not self.is_greedy and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)

    @property
    def is_plain(self) -> bool:
        """No filter and no edit: the row may take the fused head."""
        return not (self.is_filtered or self.is_edited)

    @property
    def is_edited(self) -> bool:
        """Whether bias, penalties or a mask change the logits."""
        penalised = self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        return self.bias_ids is not None or self.allowed is not None or penalised


def process_logits(logits: Tensor, rows: Sequence[RowSampling], *, backend: str | None = None) -> Tensor:
    """Logits of the distribution that is sampled: bias, penalties, mask, temperature, then top-p, top-k and min-p.

    top-p looks at the full softmax after temperature: a token stays while the mass before it (descending, ties to the
    lower id) is at most top_p, in fixed point: round(p * 2^40) per token, so the order of summation does not matter.
    Tokens are also required to be among the top_k and at least min_p times the likeliest.

    logits   float32 [R, V], no NaN
    rows     one RowSampling per row
    returns  float32 [R, V], -inf where a token cannot be sampled; the input itself when no row changes anything
    raises   ValueError for shape or dtype, or a parameter outside its range
    exact    all implementations agree bit for bit; rows are independent
    source   mesh specification section 6, dspark specification section 10.5
    """
    check_rows("logits", logits, len(rows), None, dtype=torch.float32)
    for row in rows:
        _check_row(row, logits.shape[1])
    z = logits
    edited = [index for index, row in enumerate(rows) if row.is_edited]
    heated = [index for index, row in enumerate(rows) if not row.is_greedy and row.temperature != 1.0]
    filtered = [index for index, row in enumerate(rows) if row.is_filtered]
    if edited or heated or filtered:
        z = logits.clone()
    for index in edited:
        _edit(z[index], rows[index])
    if heated:
        # 1/T in float32, so that plain decode, draft and verify multiply by the same number.
        temperatures = [min(rows[index].temperature, _LARGEST_FACTOR) for index in heated]
        inverse = 1.0 / torch.tensor(temperatures, dtype=torch.float32)
        z[heated] = z[heated] * inverse.to(z.device)[:, None]
    if filtered:
        kept = resolve("filter_logits", logits.device.type, SERVED, backend)(
            z[filtered],
            [rows[index].top_p for index in filtered],
            [rows[index].top_k for index in filtered],
            [rows[index].min_p for index in filtered],
        )
        z[filtered] = kept
    return z


def inverse_temperatures(rows: Sequence[RowSampling]) -> Tensor:
    """1/T as `process_logits` multiplies it, float32 [R] in host memory; 1 for greedy rows."""
    temperatures = [1.0 if row.is_greedy else min(row.temperature, _LARGEST_FACTOR) for row in rows]
    return 1.0 / torch.tensor(temperatures, dtype=torch.float32)


def coupled_argmax(
    z: Tensor, seeds: Tensor, positions: Tensor, is_greedy: Tensor, *, backend: str | None = None
) -> Tensor:
    """The token of every row: arg-max of z + Gumbel(seed, position), or of z; ties to the smaller id.

    z          float32 [R, V], processed logits; -inf cannot win
    seeds      int64 [R]: the bits of the unsigned 64-bit seed
    positions  int64 [R]: 0-based index of the token in the request's output
    is_greedy  bool [R]
    returns    int64 [R]
    exact      all implementations agree; the noise is the one of `gumbel`
    source     dspark specification, section 10.2
    """
    rows = z.shape[0]
    check_rows("z", z, rows, None, dtype=torch.float32)
    check_rows("seeds", seeds, rows, dtype=torch.int64)
    check_rows("positions", positions, rows, dtype=torch.int64)
    check_rows("is_greedy", is_greedy, rows, dtype=torch.bool)
    result: Tensor = resolve("coupled_argmax", z.device.type, SERVED, backend)(z, seeds, positions, is_greedy)
    return result


def logprobs(z: Tensor) -> Tensor:
    """Log-softmax of processed logits: float32 [R, V] -> float32 [R, V], -inf stays -inf.

    Fixed-order arithmetic, so the bits depend on the row alone. A row at temperature 0 gives the model's distribution.
    """
    check_rows("z", z, None, None, dtype=torch.float32)
    shifted = z - z.amax(-1, keepdim=True)
    return shifted - arith.log(arith.tree_sum(arith.exp(shifted)))[:, None]


def _check_row(row: RowSampling, vocab: int) -> None:
    if not row.temperature >= 0.0 or not 0.0 < row.top_p <= 1.0 or not 0.0 <= row.min_p <= 1.0:
        raise ValueError(
            f"need temperature >= 0, 0 < top_p <= 1, 0 <= min_p <= 1; got {row.temperature}, {row.top_p}, {row.min_p}"
        )
    if not row.repetition_penalty > 0.0:
        raise ValueError(f"repetition_penalty must be positive, got {row.repetition_penalty}")
    if (row.bias_ids is None) != (row.bias is None):
        raise ValueError("bias_ids and bias come together")
    for name, tensor in (
        ("output_counts", row.output_counts),
        ("prompt_seen", row.prompt_seen),
        ("allowed", row.allowed),
    ):
        if tensor is not None and tensor.shape != (vocab,):
            raise ValueError(f"{name} must be [{vocab}], got {list(tensor.shape)}")


def _edit(z: Tensor, row: RowSampling) -> None:
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
        factor = min(max(row.repetition_penalty, 1.0 / _LARGEST_FACTOR), _LARGEST_FACTOR)
        penalty = torch.tensor(factor, dtype=torch.float32, device=z.device)
        z.copy_(torch.where(seen, torch.where(z > 0.0, z / penalty, z * penalty), z))
    if counts is not None:
        if row.frequency_penalty != 0.0:
            z -= counts.to(torch.float32) * row.frequency_penalty
        if row.presence_penalty != 0.0:
            z -= (counts > 0).to(torch.float32) * row.presence_penalty
    if row.allowed is not None:
        z.masked_fill_(~row.allowed, -torch.inf)
