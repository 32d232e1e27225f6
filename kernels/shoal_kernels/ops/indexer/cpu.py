"""Compiled indexer: scores become 16-bit sort keys, and a radix count finds the k best.

A sort key orders bfloat16 scores as unsigned integers: 0 is "not allowed", -inf is the smallest allowed key.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal_kernels.arith_nb import INF, ZERO, bf16
from shoal_kernels.gemm_nb import gemm, transpose
from shoal_kernels.jit import bits_of, inline, kernel
from shoal_kernels.paged_rows import PagedRows
from shoal_kernels.precision import Precision
from shoal_kernels.records_nb import decode_index, find_record
from shoal_kernels.threads import for_row_ranges

_CHUNK = 1024
_TILE_KEYS = 1 << 22
_LARGEST_BF16_KEY, _LAST_BLOCK_KEY = np.uint16(0xFF7F), np.uint16(0xFFFF)


@inline
def _sort_key(score: Any) -> Any:
    rounded = bf16(score) + ZERO
    rounded = rounded if rounded == rounded else -INF
    bits = (bits_of(rounded) >> 16) & 0xFFFF
    return np.uint16(bits ^ 0xFFFF if bits & 0x8000 else bits | 0x8000)


@inline
def _load_keys(storage: Any, layout: Any, blocks: Any, ids: Any, scratch: Any, out: Any) -> None:
    """out[:, i] = decoded index key of entry ids[i]."""
    for i in range(ids.shape[0]):
        block = storage[blocks[ids[i] // layout[1]]]
        data, data_end, scales, scales_end = find_record(layout, ids[i] % layout[1])
        decode_index(block[data:data_end], block[scales:scales_end], scratch[i])
    transpose(scratch[: ids.shape[0]], out)


@inline
def _score(query: Any, weights: Any, dots: Any, total: Any) -> None:
    """total[t] = sum over heads of w * relu(dot)."""
    for t in range(total.shape[0]):
        total[t] = ZERO
    for h in range(weights.shape[0]):
        w, row = weights[h], dots[h]
        for t in range(total.shape[0]):
            dot = row[t]
            total[t] = total[t] + w * (dot if dot > ZERO else ZERO)


@kernel("void(f4[:, :, ::1], f4[:, ::1], u1[:, ::1], i8[::1], i4[:, ::1], i4[::1], i8[::1], u2[:, ::1])")
def _keys_of_all(
    query: Any, weights: Any, storage: Any, layout: Any, table: Any, row_seq: Any, n_vis: Any, out: Any
) -> None:
    """Sort keys of every visible entry; consecutive rows of one sequence share the decoded keys."""
    rows, heads, dim = query.shape
    scratch = np.empty((_CHUNK, dim), np.float32)
    total = np.empty(_CHUNK, np.float32)
    first = 0
    while first < rows:
        last, longest = first, 0
        while last < rows and row_seq[last] == row_seq[first]:
            longest = max(longest, n_vis[last])
            last += 1
        group = query[first:last].reshape(((last - first) * heads, dim))
        for start in range(0, longest, _CHUNK):
            count = min(_CHUNK, longest - start)
            keys = np.empty((dim, count), np.float32)
            _load_keys(storage, layout, table[row_seq[first]], np.arange(start, start + count), scratch, keys)
            dots = np.empty((group.shape[0], count), np.float32)
            gemm(group, keys, dots)
            for r in range(first, last):
                at = (r - first) * heads
                part = total[:count]
                _score(query[r], weights[r], dots[at : at + heads], part)
                for t in range(count):
                    out[r, start + t] = _sort_key(part[t]) if start + t < n_vis[r] else np.uint16(0)
        for r in range(first, last):
            for t in range(longest, out.shape[1]):
                out[r, t] = np.uint16(0)
        first = last


@kernel(
    "void(f4[:, :, ::1], f4[:, ::1], u1[:, ::1], i8[::1], i4[:, ::1], i4[::1], i8[::1], i4[:, ::1], i8, u2[:, ::1])"
)
def _keys_of_candidates(
    query: Any,
    weights: Any,
    storage: Any,
    layout: Any,
    table: Any,
    row_seq: Any,
    n_vis: Any,
    candidates: Any,
    block_size: Any,
    out: Any,
) -> None:
    """Sort keys of the visible entries of each row's candidate blocks; every other entry gets 0."""
    rows, heads, dim = query.shape
    scratch = np.empty((_CHUNK, dim), np.float32)
    total = np.empty(_CHUNK, np.float32)
    ids = np.empty(candidates.shape[1] * block_size, np.int64)
    for r in range(rows):
        for t in range(out.shape[1]):
            out[r, t] = np.uint16(0)
        listed = 0
        for c in range(candidates.shape[1]):
            if candidates[r, c] >= 0:
                start = np.int64(candidates[r, c]) * block_size
                for t in range(start, min(start + block_size, n_vis[r])):
                    ids[listed] = t
                    listed += 1
        for start in range(0, listed, _CHUNK):
            part_ids = ids[start : min(start + _CHUNK, listed)]
            count = part_ids.shape[0]
            keys = np.empty((dim, count), np.float32)
            _load_keys(storage, layout, table[row_seq[r]], part_ids, scratch, keys)
            dots = np.empty((heads, count), np.float32)
            gemm(query[r], keys, dots)
            _score(query[r], weights[r], dots, total[:count])
            for t in range(count):
                out[r, part_ids[t]] = _sort_key(total[t])


@inline
def _pick(keys: Any, histogram: Any, out: Any) -> None:
    """out = positions of the out.size largest non-zero keys, ties to the lower position, ascending, -1 padded."""
    k = out.shape[0]
    histogram[:] = 0
    allowed = 0
    for t in range(keys.shape[0]):
        histogram[keys[t] >> 8] += 1
        allowed += 1 if keys[t] else 0
    threshold, ties = 1, 1 << 62
    if allowed > k:
        above, high = 0, 255
        while above + histogram[high] < k:
            above += histogram[high]
            high -= 1
        histogram[:] = 0
        for t in range(keys.shape[0]):
            if keys[t] >> 8 == high:
                histogram[keys[t] & 0xFF] += 1
        low = 255
        while above + histogram[low] < k:
            above += histogram[low]
            low -= 1
        threshold, ties = (high << 8) | low, k - above
    count = 0
    for t in range(keys.shape[0]):
        if keys[t] > threshold:
            out[count] = t
            count += 1
        elif keys[t] == threshold and ties > 0:
            out[count] = t
            count += 1
            ties -= 1
    for t in range(count, k):
        out[t] = -1


@kernel("void(u2[:, ::1], i8[::1], i8, i4[:, ::1], i4[:, ::1])")
def _pick_rows(keys: Any, n_vis: Any, block_size: Any, entries: Any, blocks: Any) -> None:
    histogram = np.empty(256, np.int64)
    best = np.empty(keys.shape[1] // block_size + 1, np.uint16)
    for r in range(keys.shape[0]):
        row = keys[r, : n_vis[r]]
        _pick(row, histogram, entries[r])
        if blocks.shape[1]:
            count = (n_vis[r] + block_size - 1) // block_size
            for b in range(count):
                largest = np.uint16(0)
                for t in range(b * block_size, min((b + 1) * block_size, n_vis[r])):
                    largest = row[t] if row[t] > largest else largest
                largest = largest if largest < _LARGEST_BF16_KEY else _LARGEST_BF16_KEY
                best[b] = _LAST_BLOCK_KEY if b == count - 1 else largest
            _pick(best[:count], histogram, blocks[r])


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
    rows = query.shape[0]
    found = np.zeros((rows, int(n_vis.max()) if rows else 0), dtype=np.uint16)
    _keys_of_all(
        query.contiguous().numpy(),
        weights.contiguous().numpy(),
        keys.storage.numpy(),
        np.array(keys.layout),
        block_table.contiguous().numpy(),
        row_seq.contiguous().numpy(),
        n_vis.contiguous().numpy(),
        found,
    )
    codes = found.astype(np.int32)
    bits = np.where(codes & 0x8000, codes & 0x7FFF, codes ^ 0xFFFF) << 16
    values = torch.from_numpy(bits.astype(np.int32)).view(torch.float32)
    return torch.where(torch.from_numpy(codes) == 0, -torch.inf, values)


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
    entries = torch.empty(rows, k, dtype=torch.int32)
    blocks = torch.empty(rows, num_blocks, dtype=torch.int32)
    total = int(n_vis.max()) if rows else 0
    q, w, storage, layout = (
        query.contiguous().numpy(),
        weights.contiguous().numpy(),
        keys.storage.numpy(),
        np.array(keys.layout),
    )
    table, sequence = block_table.contiguous().numpy(), row_seq.contiguous().numpy()
    visible = n_vis.contiguous().numpy()
    chosen = None if candidates is None else candidates.contiguous().numpy()
    entries_out, blocks_out = entries.numpy(), blocks.numpy()
    tile = max(1, _TILE_KEYS // max(total, 1))

    def body(first: int, last: int) -> None:
        for start in range(first, last, tile):
            part = slice(start, min(start + tile, last))
            found = np.empty((part.stop - start, total), dtype=np.uint16)
            if chosen is None:
                _keys_of_all(q[part], w[part], storage, layout, table, sequence[part], visible[part], found)
            else:
                _keys_of_candidates(
                    q[part],
                    w[part],
                    storage,
                    layout,
                    table,
                    sequence[part],
                    visible[part],
                    chosen[part],
                    block_size,
                    found,
                )
            _pick_rows(found, visible[part], block_size, entries_out[part], blocks_out[part])

    for_row_ranges(rows, body)
    return entries, blocks
