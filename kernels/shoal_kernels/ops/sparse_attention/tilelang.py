# mypy: ignore-errors
"""Attention on Hopper and Blackwell for the released sizes; other sizes go to the Triton kernel."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from shoal_kernels.ops.sparse_attention import hopper, tilelang_sm100
from shoal_kernels.ops.sparse_attention import triton as general
from shoal_kernels.ops.sparse_attention.tilelang_parts import DIM, HEADS, LOG2E
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
    """query [R, H, d], window records [B, units] -> [R, H, d]."""
    rows = query.shape[0]
    if not _serves(query, window_index, cos_sin, entries) or window.shape[0] == 0:
        arguments = query, window, window_index, sink, scale, positions, cos_sin, entries, block_table, row_seq, topk
        return general.sparse_attention(*arguments, precision, cast_out)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if rows == 0:
        return out
    near = window_index.contiguous()
    has_entries = entries is not None and topk.shape[1] > 0
    if has_entries:
        lists = entries.storage, block_table.contiguous(), row_seq.contiguous(), topk.contiguous()
        places = entries.entries_per_block, entries.offset, entries.format.units
    else:
        lists, places = (window, near, near.view(-1)[:rows], near), (1, 0, 0)
    sms, frequencies = _multiprocessors(query.device), cos_sin.shape[1] // 2
    query, window, sink, positions = query.contiguous(), window.contiguous(), sink.contiguous(), positions.contiguous()
    # Keys are held times 2^-10; weights are powers of two.
    factor = scale * LOG2E * 1024.0
    if is_blackwell(query.device):
        attend = tilelang_sm100.kernel(frequencies, has_entries, cast_out)
        attend(query, window, near, sink, positions, cos_sin, *lists, out, factor, *places)
    else:
        attend = hopper.kernel(sms, frequencies, has_entries, cast_out, hopper.parts(rows, sms))
        attend(query, window, near, sink, positions, cos_sin, *lists, out, factor, *places)
    return out


@functools.cache
def is_blackwell(device: torch.device) -> bool:
    """Whether the device has tensor memory: tcgen05 instead of wgmma."""
    return torch.cuda.get_device_capability(device)[0] == 10


def _serves(query: Tensor, window_index: Tensor, cos_sin: Tensor, entries: PagedRows | None) -> bool:
    """Whether the kernel is made for these static sizes."""
    sizes = query.shape[1:] == (HEADS, DIM) and window_index.shape[1] > 0
    if entries is not None and (entries.page_split or entries.offset % 16 or entries.storage.shape[1] % 16):
        return False
    return sizes and cos_sin.shape[1] % 16 == 0 and cos_sin.shape[1] <= 64


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
