# mypy: ignore-errors
"""Attention of one row per program, keys gathered as stored bytes and dequantised on the way to the tensor cores.

Dims are split into even and odd ones, q . k = q_even . k_even + q_odd . k_odd: a byte of an FP4 record holds one of
each, a rotated pair is one of each, so nothing is interleaved before the output is stored.

The list is walked in tiles of `TILE` keys with an online softmax that starts at the sink. Tiles are counted from the
start of the window and from the start of the entries, whatever the widths of the two index tensors: an empty tile
would change no bit and is skipped.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal_kernels.paged_rows import PagedRows
from shoal_kernels.precision import Precision
from shoal_kernels.triton_lib import cast_q8, decode_ue8m0, dot, round_bf16

LOG2E = 1.4426950408889634
_LOWEST = tl.constexpr(-1e30)


@triton.jit
def _decode_e4m3(byte):
    """e4m3 byte (int32) -> float32: the fields placed in a float32, whose exponent bias is 120 more."""
    bits = ((byte & 0x80) << 24) | ((byte & 0x7F) << 20)
    # 2^120 in one factor; the product is exact, subnormals included.
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def _decode_e2m1(code):
    """e2m1 code (int32, bits above the fourth ignored) -> float32."""
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def _online(even, odd, valid, q_even, q_odd, acc_even, acc_odd, peak, total, factor):
    """One tile of keys (bf16 [TILE, HALF] twice): softmax state and sums moved on."""
    scores = dot(q_even, tl.trans(even), tl.zeros((q_even.shape[0], even.shape[0]), tl.float32))
    scores = dot(q_odd, tl.trans(odd), scores) * factor  # [HEADS, TILE], in powers of two
    scores = tl.where(valid[None, :], scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1))
    shrink = tl.exp2(peak - higher)
    terms = tl.exp2(scores - higher[:, None])
    total = total * shrink + tl.sum(terms, 1)
    weights = round_bf16(terms)
    acc_even = dot(weights, even, acc_even * shrink[:, None])
    acc_odd = dot(weights, odd, acc_odd * shrink[:, None])
    return acc_even, acc_odd, higher, total


@triton.jit
def _attend(
    query,
    window,
    window_index,
    sink,
    positions,
    cos_sin,
    storage,
    block_table,
    row_seq,
    topk,
    out,
    factor,
    near_width,
    far_width,
    near_stride,
    far_stride,
    table_stride,
    block_units,
    data_offset,
    data_stride,
    scale_offset,
    scale_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    FREQUENCIES: tl.constexpr,
    ENTRIES_PER_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    HAS_ENTRIES: tl.constexpr,
    CAST_OUT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, PADDED_HEADS)
    pairs = tl.arange(0, HALF)
    keys = tl.arange(0, TILE)
    is_head, is_pair = heads < HEADS, pairs < DIM // 2
    held = is_head[:, None] & is_pair[None, :]
    q_at = query + (row * HEADS + heads[:, None]) * DIM + 2 * pairs[None, :]
    q_even = tl.load(q_at, mask=held, other=0.0)
    q_odd = tl.load(q_at + 1, mask=held, other=0.0)
    first = tl.load(sink + heads, mask=is_head, other=0.0) * 1.4426950408889634
    peak = tl.maximum(first, _LOWEST)
    total = tl.exp2(first - peak)
    acc_even = tl.zeros((PADDED_HEADS, HALF), tl.float32)
    acc_odd = tl.zeros((PADDED_HEADS, HALF), tl.float32)

    for start in range(0, near_width, TILE):
        places = start + keys
        ids = tl.load(window_index + row * near_stride + places, mask=places < near_width, other=-1)
        valid = ids >= 0
        if tl.max(ids, 0) >= 0:
            shown = valid[:, None] & is_pair[None, :]
            base = window + tl.maximum(ids, 0).to(tl.int64)[:, None] * (DIM + DIM // 32)
            low = tl.load(base + 2 * pairs[None, :], mask=shown, other=0).to(tl.int32)
            high = tl.load(base + 2 * pairs[None, :] + 1, mask=shown, other=0).to(tl.int32)
            gain = decode_ue8m0(tl.load(base + DIM + pairs[None, :] // 16, mask=shown, other=0))
            even, odd = (_decode_e4m3(low) * gain).to(tl.bfloat16), (_decode_e4m3(high) * gain).to(tl.bfloat16)
            acc_even, acc_odd, peak, total = _online(
                even, odd, valid, q_even, q_odd, acc_even, acc_odd, peak, total, factor
            )

    if HAS_ENTRIES:
        blocks = block_table + tl.load(row_seq + row).to(tl.int64) * table_stride
        for start in range(0, far_width, TILE):
            places = start + keys
            ids = tl.load(topk + row * far_stride + places, mask=places < far_width, other=-1)
            valid = ids >= 0
            if tl.max(ids, 0) >= 0:
                shown = valid[:, None] & is_pair[None, :]
                safe = tl.maximum(ids, 0)
                block = tl.load(blocks + safe // ENTRIES_PER_BLOCK, mask=valid, other=0).to(tl.int64)
                slot = safe % ENTRIES_PER_BLOCK
                base = storage + block * block_units
                data = base + data_offset + slot * data_stride
                gains = base + scale_offset + slot * scale_stride
                both = tl.load(data[:, None] + pairs[None, :], mask=shown, other=0).to(tl.int32)
                gain = _decode_e4m3(tl.load(gains[:, None] + pairs[None, :] // 8, mask=shown, other=0).to(tl.int32))
                even, odd = (
                    (_decode_e2m1(both) * gain).to(tl.bfloat16),
                    (_decode_e2m1(both >> 4) * gain).to(tl.bfloat16),
                )
                acc_even, acc_odd, peak, total = _online(
                    even, odd, valid, q_even, q_odd, acc_even, acc_odd, peak, total, factor
                )

    even = round_bf16(acc_even / total[:, None]).to(tl.float32)
    odd = round_bf16(acc_odd / total[:, None]).to(tl.float32)
    position = tl.load(positions + row)
    frequency = pairs - (DIM // 2 - FREQUENCIES)
    turned = (frequency >= 0) & is_pair
    angle = cos_sin + position * (2 * FREQUENCIES) + tl.maximum(frequency, 0)
    cos = tl.load(angle, mask=turned, other=1.0)[None, :]
    sin = tl.load(angle + FREQUENCIES, mask=turned, other=0.0)[None, :]
    values = tl.interleave(even * cos + odd * sin, odd * cos - even * sin)
    dims = tl.arange(0, 2 * HALF)
    values = round_bf16(values)
    if CAST_OUT:
        groups = tl.reshape(values.to(tl.float32), (PADDED_HEADS, 2 * HALF // 32, 32))
        values = tl.reshape(cast_q8(groups, 2), (PADDED_HEADS, 2 * HALF)).to(tl.bfloat16)
    out_at = out + (row * HEADS + heads[:, None]) * DIM + dims[None, :]
    tl.store(out_at, values, mask=is_head[:, None] & (dims < DIM)[None, :])


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
    """query [R, H, d], window records [B, units] -> [R, H, d]."""
    rows, heads, dim = query.shape
    out = torch.empty((rows, heads, dim), dtype=query.dtype, device=query.device)
    if rows == 0:
        return out
    query, window = query.contiguous(), window.contiguous()
    near = window_index if window_index.stride(1) == 1 else window_index.contiguous()
    if entries is None:
        storage, table, sequence, far = window, near, near, near
        far_width, entries_per_block, places = 0, 1, (0, 0, 0, 0)
    else:
        storage, table, sequence = entries.storage, block_table.contiguous(), row_seq.contiguous()
        far = topk if topk.stride(1) == 1 else topk.contiguous()
        far_width, entries_per_block, places = far.shape[1], entries.entries_per_block, record_places(entries)
    half = triton.next_power_of_2(dim // 2)
    tile = 64 if half > 128 else 16
    _attend[(rows,)](
        query,
        window,
        near,
        sink.contiguous(),
        positions.contiguous(),
        cos_sin,
        storage,
        table,
        sequence,
        far,
        out,
        scale * LOG2E,
        near.shape[1],
        far_width,
        near.stride(0),
        far.stride(0),
        table.stride(0),
        storage.shape[1],
        *places,
        HEADS=heads,
        DIM=dim,
        PADDED_HEADS=max(16, triton.next_power_of_2(heads)),
        HALF=half,
        FREQUENCIES=cos_sin.shape[1] // 2,
        ENTRIES_PER_BLOCK=entries_per_block,
        TILE=tile,
        HAS_ENTRIES=entries is not None,
        CAST_OUT=cast_out,
        num_warps=8 if half > 128 else 4,
    )
    return out


def record_places(entries: PagedRows) -> tuple[int, int, int, int]:
    """data_offset, data_stride, scale_offset, scale_stride: where the parts of slot s of a block begin."""
    offset, count, data, scales, page_split = entries.layout
    if page_split:
        return offset, data, offset + count * data, scales
    return offset, data + scales, offset + data, data + scales
