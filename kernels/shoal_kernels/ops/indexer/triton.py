# mypy: ignore-errors
"""Triton indexer: scores become 16-bit sort keys in scratch memory, and the best are found by counting.

Nothing is read back: lists are as long as the block table allows, and programs stop where their rows see no more.
"""

from __future__ import annotations

import functools

import torch

from shoal_kernels.ops.indexer import pick_triton as picking
from shoal_kernels.ops.indexer.row_groups import GROUP, find_groups
from shoal_kernels.ops.indexer.scores_triton import TILE, score_candidates, score_groups
from shoal_kernels.ops.indexer.sort_keys import COARSE, scores_of_keys

_SCRATCH_BYTES = 512 << 20


@functools.cache
def _num_programs(device):
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _keys_of_all(query, weights, keys, block_table, row_seq, n_vis):
    """Sort keys int16 [R, width] of the visible entries, and of coarse blocks [R, width / 8]."""
    rows = query.shape[0]
    bound = block_table.shape[1] * keys.entries_per_block
    width = -(-bound // TILE) * TILE
    found = torch.empty(rows, width, dtype=torch.int16, device=query.device)
    coarse = torch.empty(rows, width // COARSE, dtype=torch.int16, device=query.device)
    if found.numel():
        groups = find_groups(row_seq, n_vis, bound, TILE)
        programs = _num_programs(query.device)
        score_groups(query, weights, keys, block_table, row_seq, n_vis, groups, found, coarse, programs)
    return found, coarse


def indexer_scores(query, weights, keys, block_table, row_seq, n_vis, precision):
    """query [R, H, d], weights [R, H] -> [R, entries of the block table]."""
    bound = block_table.shape[1] * keys.entries_per_block
    found, _ = _keys_of_all(*_contiguous(query, weights, keys, block_table, row_seq, n_vis))
    found.masked_fill_(torch.arange(found.shape[1], device=query.device) >= n_vis[:, None], 0)
    out = torch.empty(query.shape[0], bound, dtype=query.dtype, device=query.device)
    scores_of_keys(found, out.view(torch.int16), bound)
    return out


def indexer_select(query, weights, keys, block_table, row_seq, n_vis, k, candidates, num_blocks, block_size, precision):
    """-> entries int32 [R, k], blocks int32 [R, num_blocks]."""
    rows, device = query.shape[0], query.device
    query, weights, keys, block_table, row_seq, n_vis = _contiguous(query, weights, keys, block_table, row_seq, n_vis)
    entries = torch.empty(rows, k, dtype=torch.int32, device=device)
    blocks = torch.empty(rows, num_blocks, dtype=torch.int32, device=device)
    if candidates is None:
        length = block_table.shape[1] * keys.entries_per_block
    else:
        candidates, length = candidates.contiguous(), candidates.shape[1] * block_size
    # Rows at a time, so that scratch is bounded; whole groups of a verify batch.
    tile = max(1, _SCRATCH_BYTES // (max(length, 1) * 9 // 4 + 4 * k) // GROUP) * GROUP
    for start in range(0, rows, tile):
        part = slice(start, start + tile)
        arguments = query[part], weights[part], keys, block_table, row_seq[part], n_vis[part]
        if candidates is None:
            _choose_of_all(*arguments, entries[part], blocks[part], block_size)
        else:
            _choose_of_candidates(*arguments, candidates[part], block_size, entries[part])
    return entries, blocks


def _contiguous(query, weights, keys, block_table, row_seq, n_vis):
    return (
        query.contiguous(),
        weights.contiguous(),
        keys,
        block_table.contiguous(),
        row_seq.contiguous(),
        n_vis.contiguous(),
    )


def _choose_of_all(query, weights, keys, block_table, row_seq, n_vis, entries, blocks, block_size):
    bound = block_table.shape[1] * keys.entries_per_block
    found, coarse = _keys_of_all(query, weights, keys, block_table, row_seq, n_vis)
    num_coarse = -(-bound // COARSE)
    # The best entries lie in as many best coarse blocks.
    near = torch.empty(entries.shape[0], min(entries.shape[1], num_coarse), dtype=torch.int32, device=query.device)
    if num_coarse == 0:
        entries.fill_(-1)
        blocks.fill_(-1)
        return
    picking.pick(picking.DENSE, coarse, near, num_coarse, size=COARSE, n_vis=n_vis)
    picking.pick(picking.GATHERED, found, entries, near.shape[1] * COARSE, size=COARSE, blocks=near)
    if blocks.shape[1]:
        count = -(-bound // block_size)
        if block_size != COARSE:
            coarse = picking.block_keys(found, n_vis, count, bound, block_size)
        picking.pick(picking.BLOCKS, coarse, blocks, count, size=block_size, n_vis=n_vis)


def _choose_of_candidates(query, weights, keys, block_table, row_seq, n_vis, candidates, block_size, entries):
    rows, listed = candidates.shape
    length = listed * block_size
    if rows == 0 or length == 0 or block_table.shape[1] == 0:
        entries.fill_(-1)
        return
    width = -(-length // TILE) * TILE
    found = torch.empty(rows, width, dtype=torch.int16, device=query.device)
    score_candidates(query, weights, keys, block_table, row_seq, n_vis, candidates, block_size, found)
    picking.pick(picking.LISTED, found, entries, length, size=block_size, blocks=candidates)
