"""From hidden rows to tokens without storing logits: the LM head with its arg-max, and the draft's Markov loop."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal_kernels.checks import check_index, check_range, check_rows, check_values, check_wide
from shoal_kernels.ops.linear import LinearWeight
from shoal_kernels.precision import Precision
from shoal_kernels.registry import resolve

__all__ = ["MarkovDraft", "lm_head_argmax", "markov_loop"]


@dataclass(frozen=True, slots=True)
class MarkovDraft:
    """Draft tokens of n sequences and, for each, the logit of the chance that it stands if those before it do.

    margins   by how much each token won over the next one; on an accelerator over the best of the other tiles of the
              vocabulary, and NaN where only one tile, or no noise, was at hand
    """

    token_ids: Tensor  # int64 [n, width]
    confidence_logits: Tensor  # [n, width] in the precision's wide dtype
    margins: Tensor  # float32 [n, width]


def lm_head_argmax(
    hidden: Tensor,
    head: LinearWeight,
    inverse_temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    is_greedy: Tensor,
    *,
    precision: Precision,
    backend: str | None = None,
) -> Tensor:
    """The token of every hidden row: arg-max of logits / T + Gumbel(seed, position), or of the logits.

    Ties go to the smaller id. For rows whose sampling is plain (`RowSampling.is_plain`); others need their logits.

    hidden               [R, D] in the precision's dtype, after the last norm; R may be 0
    head                 bfloat16 weight [V, D]
    inverse_temperature  float32 [R], see `inverse_temperatures`; not read where greedy
    seeds, positions     int64 [R], is_greedy bool [R]: as in `coupled_argmax`
    returns              int64 [R]
    raises               ValueError for shape or dtype; BackendUnavailable if `backend` cannot run here
    exact                a row depends on itself only. The token is that of `linear` with float32 output,
                         `process_logits` and `coupled_argmax` on the same device, whatever the number of rows. An
                         accelerator sums over K in another order than the host: where the two best values lie nearer
                         than that difference, the token may be the other one
    source               dspark specification, section 10.2
    """
    rows = hidden.shape[0]
    check_values("hidden", hidden, None, head.in_features, precision=precision)
    _check_head(head, precision)
    _check_sampling(rows, inverse_temperature, seeds, positions, is_greedy)
    result: Tensor = resolve("lm_head_argmax", hidden.device.type, precision, backend)(
        hidden, head, inverse_temperature, seeds, positions, is_greedy, precision
    )
    return result


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
    *,
    width: int,
    precision: Precision,
    backend: str | None = None,
) -> MarkovDraft:
    """Draft tokens of n plain sequences, each position biased by the token before it, and their confidence logits.

    Position j has logits base_logits[:, j] + markov_head(embed[token j - 1]); its token is the one of `coupled_argmax`
    at output index positions + j. Sequences whose sampling is not plain go step by step through their logits instead.

    base_logits           wide [n, B, V], the last axis contiguous
    hidden                [n, B, D] in the precision's dtype, before the norm
    previous              int64 [n] below V: the token before draft position 0
    markov_embed          bfloat16 or float32 [V, M]
    markov_head           bfloat16 weight [V, M]
    confidence            bfloat16 weight [1, D + M]: of hidden | embedding of the token before
    inverse_temperature, seeds, positions, is_greedy
                          [n], as in `lm_head_argmax`; positions is the output index of draft position 0
    width                 draft positions wanted, 1 .. B
    raises                ValueError for shape or dtype; BackendUnavailable if `backend` cannot run here
    exact                 a sequence depends on itself only; on the host the bits of the same steps one by one. On an
                          accelerator sums have another fixed order, see `lm_head_argmax`; confidence logits differ by
                          less than 1e-5 of the sum of magnitudes
    source                specification of the model, section 10; dspark specification, section 10.2
    """
    count, size = base_logits.shape[:2]
    rank = markov_head.in_features
    check_wide("base_logits", base_logits, None, None, markov_head.out_features, precision=precision)
    check_values("hidden", hidden, count, size, confidence.in_features - rank, precision=precision)
    check_rows("previous", previous, count, dtype=torch.int64)
    check_index("previous", previous, 0, markov_head.out_features)
    if markov_embed.shape != (markov_head.out_features, rank):
        raise ValueError(f"markov_embed must be {[markov_head.out_features, rank]}, got {list(markov_embed.shape)}")
    _check_head(markov_head, precision)
    _check_head(confidence, precision)
    _check_sampling(count, inverse_temperature, seeds, positions, is_greedy)
    check_range("width", width, 1, size)
    tokens, logits, margins = resolve("markov_loop", hidden.device.type, precision, backend)(
        base_logits,
        hidden,
        previous,
        markov_embed,
        markov_head,
        confidence,
        inverse_temperature,
        seeds,
        positions,
        is_greedy,
        width,
        precision,
    )
    return MarkovDraft(tokens, logits, margins)


def _check_head(head: LinearWeight, precision: Precision) -> None:
    if head.quantised or head.groups != 1 or head.keeps_bytes != precision.keeps_bytes:
        raise ValueError(f"a head is one bfloat16 weight prepared for precision {precision.name}")


def _check_sampling(
    rows: int, inverse_temperature: Tensor, seeds: Tensor, positions: Tensor, is_greedy: Tensor
) -> None:
    check_rows("inverse_temperature", inverse_temperature, rows, dtype=torch.float32)
    check_rows("seeds", seeds, rows, dtype=torch.int64)
    check_rows("positions", positions, rows, dtype=torch.int64)
    check_rows("is_greedy", is_greedy, rows, dtype=torch.bool)
