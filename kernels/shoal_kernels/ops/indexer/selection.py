"""Top-k by (score, then lower index) on scores that are already there. NaN ranks last, -0 equals 0."""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST_BF16 = 3.3895313892515355e38


def top_entries(
    scores: Tensor, n_vis: Tensor, k: int, *, candidates: Tensor | None = None, block_size: int = 8
) -> Tensor:
    """scores [R, T], n_vis int64 [R] -> int32 [R, k]: ids of the min(k, n_vis) best entries, ascending, -1 padded.

    candidates int32 [R, C] (block ids, -1 padded) restricts the choice to entries of those blocks.
    """
    rows, total = scores.shape
    ids = torch.arange(total, device=scores.device)
    visible = ids[None, :] < n_vis[:, None]
    if candidates is not None:
        num_blocks = -(-total // block_size)
        chosen = torch.zeros(rows, num_blocks + 1, dtype=torch.bool, device=scores.device)
        inside = (candidates >= 0) & (candidates < num_blocks)
        chosen.scatter_(1, torch.where(inside, candidates, num_blocks).to(torch.int64), True)
        visible = visible & chosen[:, ids // block_size]
    return _best(scores, visible, k)


def top_blocks(scores: Tensor, n_vis: Tensor, num_blocks: int, block_size: int) -> Tensor:
    """scores [R, T], n_vis int64 [R] -> int32 [R, num_blocks]: best entry blocks, ascending, -1 padded.

    A block's score is its largest visible score, at most the largest finite bfloat16; the last visible block is kept.
    """
    rows, total = scores.shape
    count = -(-total // block_size)
    ids = torch.arange(count * block_size, device=scores.device)
    padded = torch.nn.functional.pad(scores, (0, count * block_size - total), value=-torch.inf)
    padded = torch.where((ids[None, :] < n_vis[:, None]) & (padded == padded), padded, -torch.inf)
    best = padded.reshape(rows, count, block_size).amax(-1).clamp_max(_LARGEST_BF16)
    block_ids = torch.arange(count, device=scores.device)
    last = (n_vis - 1) // block_size
    best = torch.where(block_ids[None, :] == last[:, None], torch.inf, best)
    return _best(best, block_ids[None, :] <= last[:, None], num_blocks)


def _best(scores: Tensor, allowed: Tensor, k: int) -> Tensor:
    total = scores.shape[1]
    clean = torch.where(scores == scores, scores + 0.0, -torch.inf)
    # Two stable sorts: by score, then allowed before not allowed. So an allowed -inf still ranks before any other.
    order = torch.sort(clean, dim=1, descending=True, stable=True).indices
    order = torch.gather(order, 1, torch.sort(torch.gather(~allowed, 1, order), dim=1, stable=True).indices)
    width = min(k, total)
    ids = order[:, :width]
    ids = torch.where(torch.gather(allowed, 1, ids), ids, total)
    ids = torch.sort(ids, dim=1).values
    ids = torch.where(ids < total, ids, -1).to(torch.int32)
    return torch.nn.functional.pad(ids, (0, k - width), value=-1)
