"""Plain torch router."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal_kernels import arith


def route(logits: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    """logits, bias [R, E] -> ids int32 [R, k], weights [R, k]."""
    score = arith.sqrt(arith.softplus(logits))
    order = torch.sort(score + bias, dim=1, descending=True, stable=True).indices
    ids = order[:, :k]
    chosen = torch.gather(score, 1, ids)
    weights = chosen / (arith.tree_sum(chosen)[:, None] + 1e-20) * scale
    return ids.to(torch.int32), weights
