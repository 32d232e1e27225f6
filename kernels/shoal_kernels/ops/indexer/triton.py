# mypy: ignore-errors
"""Triton indexer: scores go to scratch memory in bfloat16, and the best are found by counting.

Nothing is read back: lists are as long as the block table allows, and programs stop where their rows see no more.
"""

from __future__ import annotations

import functools

import torch

from shoal_kernels.ops.indexer import pick_triton, scores_hopper
from shoal_kernels.ops.indexer.row_groups import GROUP, find_groups, unite_candidates
from shoal_kernels.ops.indexer.scores_triton import TILE, score_groups
from shoal_kernels.ops.indexer.sort_keys import COARSE

_SCRATCH_BYTES = 512 << 20


@functools.cache
def _num_programs(device):
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _scorer(query, keys, size):
    """The fastest kernel for these static shapes on this device."""
    return scores_hopper.score_groups if scores_hopper.can_score(query, keys, size) else score_groups


def _score_all(query, weights, keys, block_table, row_seq, n_vis):
    """Scores bfloat16 [R, width] of the visible entries, and the largest of coarse blocks [R, width / 8]."""
    rows = query.shape[0]
    bound = block_table.shape[1] * keys.entries_per_block
    width = -(-bound // TILE) * TILE
    found = torch.empty(rows, width, dtype=torch.bfloat16, device=query.device)
    coarse = torch.empty(rows, width // COARSE, dtype=torch.bfloat16, device=query.device)
    if found.numel():
        groups = find_groups(row_seq, n_vis, bound, TILE)
        score = _scorer(query, keys, COARSE)
        score(query, weights, keys, block_table, row_seq, groups, found, coarse, _num_programs(query.device))
    return found, coarse


def indexer_scores(query, weights, keys, block_table, row_seq, n_vis, precision):
    """query [R, H, d], weights [R, H] -> [R, entries of the block table]."""
    bound = block_table.shape[1] * keys.entries_per_block
    found, _ = _score_all(*_contiguous(query, weights, keys, block_table, row_seq, n_vis))
    found = found[:, :bound]
    return torch.where(torch.arange(bound, device=query.device) < n_vis[:, None], found, -torch.inf)


def indexer_select(query, weights, keys, block_table, row_seq, n_vis, k, candidates, num_blocks, block_size, precision):
    """-> entries int32 [R, k], blocks int32 [R, num_blocks]."""
    arguments = query, weights, keys, block_table, row_seq, n_vis, k, candidates, num_blocks, block_size
    return choose(pick_triton.pick, unite_candidates, *arguments)


def choose(pick, unite, query, weights, keys, block_table, row_seq, n_vis, k, candidates, num_blocks, block_size):
    """`indexer_select` with functions that pick the best of lists of scores, as `pick_triton.pick`, and unite the
    candidates of rows, as `unite_candidates`."""
    rows, device = query.shape[0], query.device
    query, weights, keys, block_table, row_seq, n_vis = _contiguous(query, weights, keys, block_table, row_seq, n_vis)
    entries = torch.empty(rows, k, dtype=torch.int32, device=device)
    blocks = torch.empty(rows, num_blocks, dtype=torch.int32, device=device)
    bound = block_table.shape[1] * keys.entries_per_block
    if candidates is None:
        row_bytes = bound * 9 // 4 + 4 * k
    else:
        # Scores, a block with its places, and what finds them.
        row_bytes = candidates.shape[1] * (2 * block_size + 36) + 4 * (-(-bound // block_size))
    # Rows at a time, so that scratch is bounded; whole groups of a verify batch.
    row_bytes = max(1, row_bytes)
    tile = max(1, _SCRATCH_BYTES // row_bytes // GROUP) * GROUP
    for start in range(0, rows, tile):
        part = slice(start, start + tile)
        arguments = query[part], weights[part], keys, block_table, row_seq[part], n_vis[part]
        if candidates is None:
            _choose_of_all(pick, *arguments, entries[part], blocks[part], block_size)
        else:
            _choose_of_candidates(pick, unite, *arguments, candidates[part].contiguous(), block_size, entries[part])
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


def _choose_of_all(pick, query, weights, keys, block_table, row_seq, n_vis, entries, blocks, block_size):
    bound = block_table.shape[1] * keys.entries_per_block
    if entries.shape[0] == 0 or bound == 0:
        entries.fill_(-1)
        blocks.fill_(-1)
        return
    found, coarse = _score_all(query, weights, keys, block_table, row_seq, n_vis)
    count = -(-bound // COARSE)
    # The best entries lie in as many best coarse blocks.
    near = torch.empty(entries.shape[0], min(entries.shape[1], count), dtype=torch.int32, device=query.device)
    pick(pick_triton.COARSE_BLOCKS, coarse, near, n_vis, count, bound, size=COARSE, entries=found)
    places = near.shape[1] * COARSE
    pick(pick_triton.GATHERED, found, entries, n_vis, places, bound, size=COARSE, blocks=near)
    if blocks.shape[1]:
        count = -(-bound // block_size)
        if block_size != COARSE:
            coarse = pick_triton.block_scores(found, n_vis, count, bound, block_size)
        pick(pick_triton.BLOCKS, coarse, blocks, n_vis, count, bound, size=block_size)


def _choose_of_candidates(
    pick, unite, query, weights, keys, block_table, row_seq, n_vis, candidates, block_size, entries
):
    rows, listed = candidates.shape
    bound = block_table.shape[1] * keys.entries_per_block
    if rows == 0 or listed == 0 or bound == 0:
        entries.fill_(-1)
        return
    united = unite(candidates, block_size, row_seq, n_vis, bound)
    # Scores in the places of each row's own list; those of candidates that it does not see are never read.
    places = listed * block_size
    found = torch.empty(rows, places, dtype=torch.bfloat16, device=query.device)
    score = _scorer(query, keys, block_size)
    score(query, weights, keys, block_table, row_seq, united, found, found, _num_programs(query.device), block_size)
    pick(pick_triton.LISTED, found, entries, n_vis, places, bound, size=block_size, blocks=candidates)
