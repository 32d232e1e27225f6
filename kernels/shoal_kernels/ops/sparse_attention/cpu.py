"""Compiled attention: a row's keys are gathered and dequantised once for all heads."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal_kernels.arith_nb import bf16, exp, power_of_two, tree_sum
from shoal_kernels.gemm_nb import gemm, transpose
from shoal_kernels.jit import kernel
from shoal_kernels.norm_rope_nb import rotate
from shoal_kernels.ops.cast import cast_q8
from shoal_kernels.paged_rows import PagedRows
from shoal_kernels.precision import Precision
from shoal_kernels.records_nb import decode_main, find_record
from shoal_kernels.threads import for_row_ranges

_ROWS_PER_THREAD = 4


@kernel(
    "void(f4[:, :, ::1], f4[:, ::1], i4[:, ::1], f4[::1], f8, i8[::1], f4[:, ::1],"
    "u1[:, ::1], i8[::1], i4[:, ::1], i4[::1], i4[:, ::1], f4[:, :, ::1])"
)
def _attend(
    query: Any,
    window: Any,
    window_index: Any,
    sink: Any,
    scale: Any,
    positions: Any,
    cos_sin: Any,
    storage: Any,
    layout: Any,
    table: Any,
    row_seq: Any,
    topk: Any,
    out: Any,
) -> None:
    rows, heads, dim = query.shape
    most = window_index.shape[1] + topk.shape[1]
    scratch = np.empty(power_of_two(most), np.float32)
    factor = np.float32(scale)
    for r in range(rows):
        near = 0
        while near < window_index.shape[1] and window_index[r, near] >= 0:
            near += 1
        far = 0
        while far < topk.shape[1] and topk[r, far] >= 0:
            far += 1
        count = near + far
        values = np.empty((count, dim), np.float32)
        for i in range(near):
            values[i] = window[window_index[r, i]]
        for i in range(far):
            block = storage[table[row_seq[r], topk[r, i] // layout[1]]]
            data, data_end, scales, scales_end = find_record(layout, topk[r, i] % layout[1])
            decode_main(block[data:data_end], block[scales:scales_end], values[near + i])
        keys = np.empty((dim, count), np.float32)
        transpose(values, keys)
        scores = np.empty((heads, count), np.float32)
        gemm(query[r], keys, scores)
        gain = np.empty(heads, np.float32)
        for h in range(heads):
            row = scores[h]
            bound = sink[h]
            for i in range(count):
                row[i] = row[i] * factor
                bound = row[i] if row[i] > bound else bound
            for i in range(count):
                row[i] = exp(row[i] - bound)
                scratch[i] = row[i]
            gain[h] = tree_sum(scratch, count) + exp(sink[h] - bound)
        gemm(scores, values, out[r])
        for h in range(heads):
            target = out[r, h]
            for d in range(dim):
                target[d] = bf16(target[d] / gain[h])
            rotate(target, cos_sin[positions[r]], True, target)


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
    rows = query.shape[0]
    out = torch.empty(query.shape)
    if entries is None or block_table is None or row_seq is None or topk is None:
        storage, layout = np.empty((1, 1), np.uint8), np.ones(5, np.int64)
        table, sequence = np.empty((1, 1), np.int32), np.zeros(rows, np.int32)
        selected = np.empty((rows, 0), np.int32)
    else:
        storage, layout = entries.storage.numpy(), np.array(entries.layout)
        table, sequence = block_table.contiguous().numpy(), row_seq.contiguous().numpy()
        selected = topk.contiguous().numpy()
    q, keys, index = query.contiguous().numpy(), window.contiguous().numpy(), window_index.contiguous().numpy()
    sinks, places, angles, target = (
        sink.contiguous().numpy(),
        positions.contiguous().numpy(),
        cos_sin.numpy(),
        out.numpy(),
    )

    def body(first: int, last: int) -> None:
        part = slice(first, last)
        _attend(
            q[part],
            keys,
            index[part],
            sinks,
            scale,
            places[part],
            angles,
            storage,
            layout,
            table,
            sequence[part],
            selected[part],
            target[part],
        )

    for_row_ranges(rows, body, _ROWS_PER_THREAD)
    return cast_q8(out, precision=precision) if cast_out else out
