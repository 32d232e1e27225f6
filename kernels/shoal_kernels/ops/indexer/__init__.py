"""The indexer: which compressed entries a row attends to."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal_kernels.checks import check_index, check_range, check_rows, check_values
from shoal_kernels.ops.indexer.selection import top_blocks, top_entries
from shoal_kernels.paged_rows import PagedRows
from shoal_kernels.precision import Precision
from shoal_kernels.registry import resolve

__all__ = ["candidate_blocks", "scores", "select", "select_with_candidates", "top_blocks", "top_entries"]


def scores(
    query: Tensor,
    weights: Tensor,
    keys: PagedRows,
    block_table: Tensor,
    row_seq: Tensor,
    n_vis: Tensor,
    *,
    precision: Precision,
    backend: str | None = None,
) -> Tensor:
    """Score of every visible entry: bf16(sum over heads ascending of w[h] * relu(q[h] . key)).

    query        [R, H, d] in the precision's dtype, rotated and cast (`cast_q4ue`)
    weights      [R, H] in the precision's dtype
    keys         index-key section of the owner layer
    block_table  int32 [S, max_blocks]: block ids of each sequence in position order; unused tail entries: any id or -1
    row_seq      int32 [R]: row of block_table
    n_vis        int64 [R]: visible entries 0 .. n_vis - 1
    returns      [R, max(n_vis)] in the precision's dtype; -inf at and beyond n_vis. In SERVED_BF16, which reads nothing
                 back from an accelerator, [R, entries that the block table can hold]
    raises       ValueError for shape, dtype, a block table too short for n_vis, a sequence or a block that is not there
    exact        all implementations on a host agree bit for bit. Those on an accelerator sum in another fixed order and
                 may multiply in e4m3: they are within 2^-7 of a score's sum over heads of |w * relu(q . key)|, plus
                 2^-9 of the sum of |w| times the largest magnitudes of q and key. A row depends on its own query and
                 visible keys only, to the bit
    source       specification of the model, section 7.4
    """
    _check(query, weights, keys, block_table, row_seq, n_vis, precision)
    result: Tensor = resolve("indexer_scores", query.device.type, precision, backend)(
        query, weights, keys, block_table, row_seq, n_vis, precision
    )
    return result


def select(
    query: Tensor,
    weights: Tensor,
    keys: PagedRows,
    block_table: Tensor,
    row_seq: Tensor,
    n_vis: Tensor,
    k: int,
    *,
    candidates: Tensor | None = None,
    candidate_block_size: int = 8,
    precision: Precision,
    backend: str | None = None,
) -> Tensor:
    """The min(k, n_vis) visible entries with the largest score, ties to the lowest id.

    Arguments and errors as `scores`, and:
    candidates  int32 [R, C] ids of entry blocks of `candidate_block_size`, ascending, -1 padded at the end: only
                entries inside them are scored; None: all visible entries
    returns     int32 [R, k] entry ids ascending, -1 padded at the end
    exact       the choice is exact on the scores of the backend, so all on a host agree; scratch memory is bounded by a
                tile of rows times the longest n_vis
    """
    _check(query, weights, keys, block_table, row_seq, n_vis, precision)
    check_range("k", k, 1, 1 << 30)
    if candidates is not None:
        check_rows("candidates", candidates, query.shape[0], None, dtype=torch.int32)
        check_range("candidate_block_size", candidate_block_size, 1, 1 << 20)
    entries, _ = resolve("indexer_select", query.device.type, precision, backend)(
        query, weights, keys, block_table, row_seq, n_vis, k, candidates, 0, candidate_block_size, precision
    )
    result: Tensor = entries
    return result


def select_with_candidates(
    query: Tensor,
    weights: Tensor,
    keys: PagedRows,
    block_table: Tensor,
    row_seq: Tensor,
    n_vis: Tensor,
    k: int,
    num_blocks: int,
    block_size: int,
    *,
    precision: Precision,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """`select` over all entries and `candidate_blocks` of the same scores: the candidate source layer.

    returns  entries int32 [R, k], blocks int32 [R, num_blocks]; both ascending, -1 padded at the end
    """
    _check(query, weights, keys, block_table, row_seq, n_vis, precision)
    check_range("k", k, 1, 1 << 30)
    check_range("num_blocks", num_blocks, 1, 1 << 30)
    check_range("block_size", block_size, 1, 1 << 20)
    entries, blocks = resolve("indexer_select", query.device.type, precision, backend)(
        query, weights, keys, block_table, row_seq, n_vis, k, None, num_blocks, block_size, precision
    )
    return entries, blocks


def candidate_blocks(
    query: Tensor,
    weights: Tensor,
    keys: PagedRows,
    block_table: Tensor,
    row_seq: Tensor,
    n_vis: Tensor,
    num_blocks: int,
    block_size: int,
    *,
    precision: Precision,
    backend: str | None = None,
) -> Tensor:
    """The num_blocks best blocks of block_size entries: by largest visible score; the last visible block always stays.

    returns  int32 [R, num_blocks], ascending, -1 padded at the end; ties to the lowest block
    """
    _, blocks = select_with_candidates(
        query,
        weights,
        keys,
        block_table,
        row_seq,
        n_vis,
        1,
        num_blocks,
        block_size,
        precision=precision,
        backend=backend,
    )
    return blocks


def _check(
    query: Tensor,
    weights: Tensor,
    keys: PagedRows,
    block_table: Tensor,
    row_seq: Tensor,
    n_vis: Tensor,
    precision: Precision,
) -> None:
    rows = query.shape[0]
    check_values("query", query, rows, None, keys.format.dim, precision=precision)
    check_values("weights", weights, rows, query.shape[1], precision=precision)
    check_rows("block_table", block_table, None, None, dtype=torch.int32)
    check_rows("row_seq", row_seq, rows, dtype=torch.int32)
    check_rows("n_vis", n_vis, rows, dtype=torch.int64)
    check_index("row_seq", row_seq, 0, block_table.shape[0])
    check_index("block_table", block_table, -1, keys.storage.shape[0])
    # As with indices, an accelerator is not asked: its kernels clamp n_vis to the block table.
    if n_vis.device.type == "cpu" and rows and int(n_vis.max()) > block_table.shape[1] * keys.entries_per_block:
        raise ValueError(f"n_vis {int(n_vis.max())} exceeds the block table of {block_table.shape[1]} blocks")
