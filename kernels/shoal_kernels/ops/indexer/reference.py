"""Plain torch indexer."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal_kernels import arith
from shoal_kernels.ops.indexer.selection import top_blocks, top_entries
from shoal_kernels.paged_rows import PagedRows
from shoal_kernels.precision import Precision

_TILE_ROWS = 16


def indexer_scores(
    query: Tensor,
    weights: Tensor,
    keys: PagedRows,
    block_table: Tensor,
    row_seq: Tensor,
    n_vis: Tensor,
    precision: Precision,
) -> Tensor:
    """query [R, H, d], weights [R, H] -> [R, max(n_vis)]."""
    total = int(n_vis.max()) if n_vis.numel() else 0
    result = torch.full((query.shape[0], total), -torch.inf, dtype=query.dtype, device=query.device)
    for sequence in torch.unique(row_seq).tolist():
        rows = torch.nonzero(row_seq == sequence).flatten()
        ids = torch.arange(int(n_vis[rows].max()), device=query.device)
        blocks = block_table[sequence, ids // keys.entries_per_block].to(torch.int64)
        values = keys.read(blocks, ids % keys.entries_per_block).t()  # [d, T]
        score = torch.zeros(rows.shape[0], ids.shape[0], dtype=query.dtype, device=query.device)
        for head in range(query.shape[1]):
            dots = arith.matmul(query[rows, head], values)  # [r, T]
            score = score + weights[rows, head, None] * torch.where(dots > 0.0, dots, 0.0)
        visible = ids[None, :] < n_vis[rows, None]
        result[rows, : ids.shape[0]] = torch.where(visible, precision.bf16(score), -torch.inf)
    return result


def indexer_select(
    query: Tensor,
    weights: Tensor,
    keys: PagedRows,
    block_table: Tensor,
    row_seq: Tensor,
    n_vis: Tensor,
    k: int,
    candidates: Tensor | None,
    num_blocks: int,
    block_size: int,
    precision: Precision,
) -> tuple[Tensor, Tensor]:
    """-> entries int32 [R, k], blocks int32 [R, num_blocks]."""
    rows = query.shape[0]
    entries = torch.empty(rows, k, dtype=torch.int32, device=query.device)
    blocks = torch.empty(rows, num_blocks, dtype=torch.int32, device=query.device)
    for start in range(0, rows, _TILE_ROWS):
        tile = slice(start, start + _TILE_ROWS)
        score = indexer_scores(query[tile], weights[tile], keys, block_table, row_seq[tile], n_vis[tile], precision)
        chosen = None if candidates is None else candidates[tile]
        entries[tile] = top_entries(score, n_vis[tile], k, candidates=chosen, block_size=block_size)
        if num_blocks:
            blocks[tile] = top_blocks(score, n_vis[tile], num_blocks, block_size)
    return entries, blocks
