# mypy: ignore-errors
"""Indexer with the choice in TileLang; scores are those of the Triton backend."""

from __future__ import annotations

from shoal_kernels.ops.indexer import triton as general
from shoal_kernels.ops.indexer.pick_tilelang import pick
from shoal_kernels.ops.indexer.unite_tilelang import unite_candidates

indexer_scores = general.indexer_scores


def indexer_select(query, weights, keys, block_table, row_seq, n_vis, k, candidates, num_blocks, block_size, precision):
    """-> entries int32 [R, k], blocks int32 [R, num_blocks]."""
    arguments = query, weights, keys, block_table, row_seq, n_vis, k, candidates, num_blocks, block_size
    return general.choose(pick, unite_candidates, *arguments)
