"""Core attention: one softmax over a row's window and its selected compressed entries."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal_kernels.checks import check_index, check_rows, check_values
from shoal_kernels.ops.norm_rope import RopeTable
from shoal_kernels.paged_rows import PagedRows
from shoal_kernels.precision import Precision
from shoal_kernels.registry import resolve
from shoal_kernels.row_formats import window_format


def sparse_attention(
    query: Tensor,
    window: Tensor,
    window_index: Tensor,
    sink: Tensor,
    scale: float,
    positions: Tensor,
    table: RopeTable,
    *,
    entries: PagedRows | None = None,
    block_table: Tensor | None = None,
    row_seq: Tensor | None = None,
    topk: Tensor | None = None,
    cast_out: bool = False,
    precision: Precision,
    backend: str | None = None,
) -> Tensor:
    """o = bf16(inverse RoPE(bf16(sum e^(s_t - m) k_t / (sum e^(s_t - m) + e^(sink - m))))), s_t = (q . k_t) * scale.

    A row's key list is its window rows, then its selected entries, both in ascending position; keys are the values.
    q . k runs over the dims ascending, the weighted sum over the list ascending, the denominator is a pairwise tree
    over the list, m is the largest of all s_t and the sink.

    query         [R, H, d] in the precision's dtype
    window        [B, d] values, or uint8 [B, units] records of window_format(d), shared by the rows; records where the
                  precision keeps bytes
    window_index  int32 [R, W]: rows of `window` in position order, -1 padded at the end
    sink          float32 [H]
    positions     int64 [R], for the inverse rotation with `table`
    entries, block_table int32 [S, max_blocks], row_seq int32 [R], topk int32 [R, K] (entry ids ascending, -1 padded at
                  the end): the compressed entries; all four or none
    cast_out      Q8 the output (`cast_q8`): the operand of the linear that follows
    returns       [R, H, d]; zeros for a row with an empty list
    raises        ValueError for shape, dtype, an index outside what it points into
    exact         a row depends on its own query and key list only; all implementations on the host agree bit for bit.
                  An accelerator cuts the list into tiles of fixed size, from the start of each of its two parts, rounds
                  weights to bfloat16 and adds in another fixed order: relative error against the host below 1e-2 of
                  the norm of a row's head, before the cast
    source        specification of the model, section 7.5
    """
    check_values("query", query, None, None, None, precision=precision)
    rows, heads, dim = query.shape
    check_rows("window_index", window_index, rows, None, dtype=torch.int32)
    check_rows("sink", sink, heads, dtype=torch.float32)
    check_rows("positions", positions, rows, dtype=torch.int64)
    if precision.keeps_bytes:
        check_rows("window", window, None, window_format(dim, precision).units, dtype=torch.uint8)
    else:
        if window.dtype == torch.uint8 and precision.cast_cache:
            window = window_format(dim, precision).decode(window)
        check_values("window", window, None, dim, precision=precision)
    check_index("window_index", window_index, -1, window.shape[0])
    if entries is not None:
        _check_entries(entries, block_table, row_seq, topk, rows, dim)
    cos_sin = table.cos_sin(positions, precision.wide)
    attend = resolve("sparse_attention", query.device.type, precision, backend)
    arguments = query, window, window_index, sink, scale, positions, cos_sin, entries, block_table, row_seq, topk
    result: Tensor = attend(*arguments, precision, cast_out)
    return result


def _check_entries(
    entries: PagedRows, block_table: Tensor | None, row_seq: Tensor | None, topk: Tensor | None, rows: int, dim: int
) -> None:
    if block_table is None or row_seq is None or topk is None:
        raise ValueError("entries need block_table, row_seq and topk")
    check_rows("block_table", block_table, None, None, dtype=torch.int32)
    check_rows("row_seq", row_seq, rows, dtype=torch.int32)
    check_rows("topk", topk, rows, None, dtype=torch.int32)
    if entries.format.dim != dim:
        raise ValueError(f"entries hold {entries.format.dim} dims, the query {dim}")
    check_index("row_seq", row_seq, 0, block_table.shape[0])
    check_index("block_table", block_table, -1, entries.storage.shape[0])
    check_index("topk", topk, -1, block_table.shape[1] * entries.entries_per_block)
