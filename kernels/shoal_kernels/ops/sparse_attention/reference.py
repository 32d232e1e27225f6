"""Plain torch attention over gathered keys."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal_kernels import arith
from shoal_kernels.ops.cast import cast_q8
from shoal_kernels.ops.norm_rope.reference import rope
from shoal_kernels.paged_rows import PagedRows
from shoal_kernels.precision import Precision


def sparse_attention(
    query: Tensor,
    window: Tensor,
    window_index: Tensor,
    sink: Tensor,
    scale: float,
    positions: Tensor,
    cos_sin: Tensor,
    entries: PagedRows | None,
    block_table: Tensor | None,
    row_seq: Tensor | None,
    topk: Tensor | None,
    precision: Precision,
    cast_out: bool,
) -> Tensor:
    """query [R, H, d] -> [R, H, d]."""
    valid = window_index >= 0
    keys = _gather(window, window_index, valid)
    if entries is not None and block_table is not None and row_seq is not None and topk is not None:
        selected = topk >= 0
        safe = topk.clamp_min(0).to(torch.int64)
        blocks = block_table[row_seq.to(torch.int64)[:, None], safe // entries.entries_per_block].to(torch.int64)
        flat = entries.read(blocks.flatten(), (safe % entries.entries_per_block).flatten())
        records = flat.reshape(*topk.shape, entries.format.dim)
        keys = torch.cat((keys, torch.where(selected[..., None], records, 0.0)), dim=1)
        valid = torch.cat((valid, selected), dim=1)
    # Close the gap between the two lists, so that the tree below sees the row's own list and nothing else.
    order = torch.sort(~valid, dim=1, stable=True).indices
    valid = torch.gather(valid, 1, order)
    keys = torch.gather(keys, 1, order[..., None].expand_as(keys))  # [R, n, d]

    scores = arith.matmul(query, keys.transpose(1, 2)[:, None]) * scale  # [R, H, n]
    scores = torch.where(valid[:, None, :], scores, -torch.inf)
    bound = sink.to(query.dtype).expand(query.shape[0], -1)
    if scores.shape[2]:
        bound = torch.maximum(scores.amax(-1), bound)
    terms = torch.where(valid[:, None, :], arith.exp(scores - bound[..., None]), 0.0)
    total = arith.matmul(terms, keys[:, None])  # [R, H, d]
    out = total / (arith.tree_sum(terms) + arith.exp(sink - bound))[..., None]
    out = rope(precision.bf16(out), positions, cos_sin, True, precision)
    return cast_q8(out, precision=precision) if cast_out else out


def _gather(window: Tensor, index: Tensor, valid: Tensor) -> Tensor:
    if window.shape[0] == 0:
        return torch.zeros(*index.shape, window.shape[1], dtype=window.dtype, device=window.device)
    return torch.where(valid[..., None], window[index.clamp_min(0).to(torch.int64)], 0.0)
