"""Sampling: processed logits, counter-based Gumbel noise, and the token that wins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from shoal_kernels.checks import check_index, check_rows
from shoal_kernels.ops.sampling.noise import choice_seed, gumbel, philox4x32
from shoal_kernels.ops.sampling.reference import LARGEST_FACTOR
from shoal_kernels.precision import SERVED, SERVED_BF16, Precision
from shoal_kernels.registry import resolve

__all__ = [
    "GREEDY_BELOW",
    "RowSampling",
    "choice_seed",
    "coupled_argmax",
    "coupled_margins",
    "edit_logits",
    "filter_logits",
    "gumbel",
    "inverse_temperatures",
    "logprobs",
    "mask_words",
    "philox4x32",
    "process_logits",
]

GREEDY_BELOW = 1e-5


def mask_words(vocab: int) -> int:
    """Words of a mask over so many ids."""
    return -(-vocab // 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSampling:
    """How one row's logits become a distribution. The defaults change nothing.

    temperature         below 1e-5: arg-max, and no filter applies; above 1e30 as 1e30
    top_p               in (0, 1]; 1 is off
    top_k               tokens kept; 0 or less is off
    min_p               in [0, 1]: tokens less likely than min_p times the likeliest go; 0 is off
    repetition_penalty  over prompt and output; presence and frequency penalties over the output. Outside of
                        [1e-30, 1e30] as the nearer end
    bias_ids, bias      int64 [n], float32 [n]: added to the logits
    output_ids, output_counts    int64 [m], int32 [m]: the ids that stand in the output (in a draft: with the drafts
                        before this row), and how often; read by the presence and frequency penalties
    seen_ids            int64 [k]: the ids that stand in prompt or output, read by the repetition penalty
    allowed             int32 [ceil(V / 32)]: ids that may be sampled, bit i of word w for id 32 * w + i; at least one.
                        Bits of ids past V are not read
                        All lists of ids are distinct and in host memory, and so is `allowed`
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
    output_ids: Tensor | None = None
    output_counts: Tensor | None = None
    seen_ids: Tensor | None = None
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
    def is_edited(self) -> bool:
        """Whether bias, penalties or a mask change the logits."""
        penalised = self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        return self.bias_ids is not None or self.allowed is not None or penalised

    @property
    def is_plain(self) -> bool:
        """Whether the temperature is all there is: such a row needs no logits, see `ops.lm_head`."""
        return not self.is_edited and not self.is_filtered


def process_logits(
    logits: Tensor, rows: Sequence[RowSampling], *, in_place: bool = False, backend: str | None = None
) -> Tensor:
    """Logits of the distribution that is sampled: `edit_logits`, then `filter_logits`.

    returns  float32 [R, V], -inf where a token cannot be sampled; the input itself when no row changes anything
    raises, exact   as these two, whose other arguments these are
    """
    z = edit_logits(logits, rows, in_place=in_place, backend=backend)
    return filter_logits(z, rows, in_place=in_place or z is not logits, backend=backend)


def edit_logits(
    logits: Tensor, rows: Sequence[RowSampling], *, in_place: bool = False, backend: str | None = None
) -> Tensor:
    """Logits after bias, penalties, mask and temperature, in this order.

    logits   float32 [R, V], no NaN
    rows     one RowSampling per row
    in_place the input may be written over
    returns  float32 [R, V], -inf where the mask forbids a token; the input itself when no row changes anything
    raises   ValueError for shape or dtype, or a parameter outside its range
    exact    all implementations agree bit for bit; rows are independent
    source   mesh specification section 6, dspark specification section 10.5
    """
    check_rows("logits", logits, len(rows), None, dtype=torch.float32)
    for row in rows:
        _check_row(row, logits.shape[1])
    if not any(row.is_edited or (not row.is_greedy and row.temperature != 1.0) for row in rows):
        return logits
    kernel = resolve("edit_logits", logits.device.type, _numerics(logits, backend), backend)
    result: Tensor = kernel(logits, rows, inverse_temperatures(rows), in_place)
    return result


def filter_logits(
    z: Tensor, rows: Sequence[RowSampling], *, in_place: bool = False, backend: str | None = None
) -> Tensor:
    """Logits after temperature, without the tokens that top-p, top-k and min-p remove.

    top-p looks at the full softmax after temperature: a token stays while the mass before it (descending, ties to the
    lower id) is at most top_p, in fixed point: round(p * 2^40) per token, so the order of summation does not matter.
    Tokens are also required to be among the top_k and at least min_p times the likeliest.

    z        float32 [R, V], no NaN: what `edit_logits` returns for these rows
    in_place the input may be written over
    returns  float32 [R, V], -inf where a token is removed; the input itself when no row is filtered
    raises   ValueError for shape or dtype
    exact    all implementations agree bit for bit; rows are independent
    source   mesh specification section 6, dspark specification section 10.5
    """
    check_rows("z", z, len(rows), None, dtype=torch.float32)
    filtered = [index for index, row in enumerate(rows) if row.is_filtered]
    if not filtered:
        return z
    chosen = [rows[index] for index in filtered]
    kernel = partial(
        resolve("filter_logits", z.device.type, _numerics(z, backend), backend),
        top_p=[row.top_p for row in chosen],
        top_k=[row.top_k for row in chosen],
        min_p=[row.min_p for row in chosen],
    )
    if len(filtered) == len(rows):
        return kernel(z)  # type: ignore[no-any-return]
    at = torch.tensor(filtered).to(z.device, non_blocking=True)
    kept = kernel(z.index_select(0, at))
    return (z if in_place else z.clone()).index_copy_(0, at, kept)


def inverse_temperatures(rows: Sequence[RowSampling]) -> Tensor:
    """float32 [R] in host memory: what a row's logits are multiplied by, 1 where it is greedy.

    1/T is taken in float32, so that plain decode, draft and verify multiply by the same number.
    """
    temperatures = [1.0 if row.is_greedy else min(row.temperature, LARGEST_FACTOR) for row in rows]
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
    kernel = resolve("coupled_argmax", z.device.type, _numerics(z, backend), backend)
    result: Tensor = kernel(z, seeds, positions, is_greedy)
    return result


def coupled_margins(
    z: Tensor, seeds: Tensor, positions: Tensor, is_greedy: Tensor, tokens: Tensor, *, backend: str | None = None
) -> Tensor:
    """By how much the token of every row won: its z + Gumbel(seed, position), or z, minus the largest of the others.

    z, seeds, positions, is_greedy  as in `coupled_argmax`; tokens int64 [R]: what it gave for them
    returns  float32 [R], at least 0; infinite where no other token can be sampled
    exact    all implementations agree; there is one on the host only
    source   dspark specification, section 10.4
    """
    rows = z.shape[0]
    check_rows("z", z, rows, None, dtype=torch.float32)
    check_rows("tokens", tokens, rows, dtype=torch.int64)
    result: Tensor = resolve("coupled_margins", z.device.type, _numerics(z, backend), backend)(
        z, seeds, positions, is_greedy, tokens
    )
    return result


def logprobs(z: Tensor, *, backend: str | None = None) -> Tensor:
    """Log-softmax of processed logits: float32 [R, V] -> float32 [R, V], -inf stays -inf.

    Fixed-order arithmetic, so the bits depend on the row alone. A row at temperature 0 gives the model's distribution.
    """
    check_rows("z", z, None, None, dtype=torch.float32)
    result: Tensor = resolve("logprobs", z.device.type, _numerics(z, backend), backend)(z)
    return result


def _numerics(z: Tensor, backend: str | None) -> Precision:
    """Logits are float32 in all precisions; this one names where the kernels run."""
    return SERVED if z.device.type == "cpu" and backend in (None, "cpu", "reference") else SERVED_BF16


def _check_row(row: RowSampling, vocab: int) -> None:
    if not row.temperature >= 0.0 or not 0.0 < row.top_p <= 1.0 or not 0.0 <= row.min_p <= 1.0:
        raise ValueError(
            f"need temperature >= 0, 0 < top_p <= 1, 0 <= min_p <= 1; got {row.temperature}, {row.top_p}, {row.min_p}"
        )
    if not row.repetition_penalty > 0.0:
        raise ValueError(f"repetition_penalty must be positive, got {row.repetition_penalty}")
    if (row.bias_ids is None) != (row.bias is None):
        raise ValueError("bias_ids and bias come together")
    if row.bias_ids is not None and row.bias is not None:
        check_rows("bias_ids", row.bias_ids, None, dtype=torch.int64)
        check_rows("bias", row.bias, row.bias_ids.shape[0], dtype=torch.float32)
        check_index("bias_ids", row.bias_ids, 0, vocab)
    if (row.output_ids is None) != (row.output_counts is None):
        raise ValueError("output_ids and output_counts come together")
    if row.output_ids is not None and row.output_counts is not None:
        check_rows("output_ids", row.output_ids, None, dtype=torch.int64)
        check_rows("output_counts", row.output_counts, row.output_ids.shape[0], dtype=torch.int32)
        check_index("output_ids", row.output_ids, 0, vocab)
    if row.seen_ids is not None:
        check_rows("seen_ids", row.seen_ids, None, dtype=torch.int64)
        check_index("seen_ids", row.seen_ids, 0, vocab)
    if row.allowed is not None:
        check_rows("allowed", row.allowed, mask_words(vocab), dtype=torch.int32)
