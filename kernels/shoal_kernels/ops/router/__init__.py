"""Choice of experts."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal_kernels.checks import check_range, check_rows, check_wide
from shoal_kernels.precision import Precision
from shoal_kernels.registry import resolve


def route(
    logits: Tensor, bias: Tensor, k: int, scale: float, *, precision: Precision, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """The k experts of every row and their weights. Score s = sqrt(softplus(logit)).

    logits   [R, E] in the precision's wide dtype
    bias     float32 [E], or [R, E] where rows differ (image tokens); moves the choice, never the weights
    k        1 <= k <= E, and at most 64 on an accelerator
    returns  ids int32 [R, k], largest s + bias first, on a tie the smaller id;
             weights [R, k] in the wide dtype = s / (sum of the chosen s + 1e-20) * scale
    raises   ValueError for shape, dtype or k
    exact    all implementations agree bit for bit
    source   specification of the model, section 9
    """
    check_wide("logits", logits, None, None, precision=precision)
    experts = logits.shape[1]
    check_range("k", k, 1, experts)
    if bias.dim() == 1:
        check_rows("bias", bias, experts, dtype=torch.float32)
        bias = bias.expand(logits.shape[0], experts)
    check_rows("bias", bias, logits.shape[0], experts, dtype=torch.float32)
    ids, weights = resolve("route", logits.device.type, precision, backend)(logits, bias, k, scale)
    return ids, weights
