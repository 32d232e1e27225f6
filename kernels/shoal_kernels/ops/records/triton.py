# mypy: ignore-errors
"""Triton encoding, decoding and moving of cache records: one record per program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal_kernels.paged_rows import PagedRows
from shoal_kernels.row_formats import RecordKind
from shoal_kernels.triton_lib import EXACT_OPTIONS, decode_ue8m0
from shoal_kernels.triton_rows import (
    MAIN,
    WINDOW,
    from_e2m1,
    from_e4m3,
    load_pairs,
    pairs_of,
    store_pairs,
    store_record,
)

_OPTIONS = {"num_warps": 1, **EXACT_OPTIONS}


@triton.jit
def _encode(values, values_stride, records, UNITS: tl.constexpr, DATA: tl.constexpr, KIND: tl.constexpr,
            DIM: tl.constexpr, PAIRS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    even, odd = load_pairs(values + row * values_stride, DIM, PAIRS)
    store_record(even, odd, records + row * UNITS, records + row * UNITS + DATA, KIND, DIM, PAIRS)


@triton.jit(do_not_specialize_on_alignment=["block_ids", "slots"])
def _write(values, values_stride, block_ids, slots, storage, block_units, data_offset, scale_offset,
           DATA_STEP: tl.constexpr, SCALE_STEP: tl.constexpr, KIND: tl.constexpr, DIM: tl.constexpr,
           PAIRS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    even, odd = load_pairs(values + row * values_stride, DIM, PAIRS)
    block, slot = storage + tl.load(block_ids + row) * block_units, tl.load(slots + row)
    data, scales = block + data_offset + slot * DATA_STEP, block + scale_offset + slot * SCALE_STEP
    store_record(even, odd, data, scales, KIND, DIM, PAIRS)


@triton.jit
def _decode(data, data_stride, scales, scales_stride, values, KIND: tl.constexpr, DIM: tl.constexpr,
            PAIRS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    GROUP: tl.constexpr = 8 if KIND == MAIN else 16
    GROUPS: tl.constexpr = PAIRS // GROUP
    group = tl.arange(0, GROUPS)
    byte = tl.load(scales + row * scales_stride + group, mask=group < DIM // (2 * GROUP), other=0)
    scale = tl.reshape(from_e4m3(byte) if KIND == MAIN else decode_ue8m0(byte), [GROUPS, 1])
    source = data + row * data_stride
    if KIND == WINDOW:
        i = tl.arange(0, 2 * PAIRS)
        both = from_e4m3(tl.load(source + i, mask=i < DIM, other=0))
        even, odd = tl.split(tl.reshape(both, [PAIRS, 2]))
    else:
        i = tl.arange(0, PAIRS)
        both = tl.load(source + i, mask=i < DIM // 2, other=0).to(tl.int32)
        even, odd = from_e2m1(both & 15), from_e2m1(both >> 4)
    even = tl.reshape(tl.reshape(even, [GROUPS, GROUP]) * scale, [PAIRS])
    odd = tl.reshape(tl.reshape(odd, [GROUPS, GROUP]) * scale, [PAIRS])
    store_pairs(values + row * DIM, even, odd, DIM, PAIRS)


@triton.jit(do_not_specialize_on_alignment=["targets", "sources"])
def _copy_rows(target, target_stride, targets, source, source_stride, sources, UNITS: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0)
    to, of = tl.load(targets + row) * target_stride, tl.load(sources + row) * source_stride
    for start in tl.static_range(0, UNITS, SIZE):
        unit = start + tl.arange(0, SIZE)
        tl.store(target + to + unit, tl.load(source + of + unit, mask=unit < UNITS), mask=unit < UNITS)


def _with_unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def encode_records(values: Tensor, kind: RecordKind) -> Tensor:
    """values bfloat16 [n, dim] -> uint8 [n, units]."""
    values, (count, dim) = _with_unit_stride(values), values.shape
    data = dim if kind is RecordKind.WINDOW else dim // 2
    units = data + dim // (16 if kind is RecordKind.MAIN else 32)
    records = torch.empty(count, units, dtype=torch.uint8, device=values.device)
    if count:
        _encode[(count,)](values, values.stride(0), records, units, data, kind.value, dim, pairs_of(dim), **_OPTIONS)
    return records


def decode_records(records: Tensor, kind: RecordKind, dim: int) -> Tensor:
    """uint8 [n, units] -> bfloat16 [n, dim]."""
    records = _with_unit_stride(records)
    data = dim if kind is RecordKind.WINDOW else dim // 2
    return decode_parts(records[:, :data], records[:, data:], kind, dim)


def decode_parts(data: Tensor, scales: Tensor, kind: RecordKind, dim: int) -> Tensor:
    """data uint8 [n, data units], scales uint8 [n, scale units] of records -> bfloat16 [n, dim]."""
    count = data.shape[0]
    values = torch.empty(count, dim, dtype=torch.bfloat16, device=data.device)
    if count:
        places = data, data.stride(0), scales, scales.stride(0)
        _decode[(count,)](*places, values, kind.value, dim, pairs_of(dim), **_OPTIONS)
    return values


def page_arguments(rows: PagedRows) -> tuple:
    """storage, block_units, data_offset, scale_offset, DATA_STEP, SCALE_STEP: where a kernel stores a record."""
    offset, per_block, data_units, scale_units, is_split = rows.layout
    steps = (data_units, scale_units) if is_split else (data_units + scale_units,) * 2
    scale_offset = offset + (per_block if is_split else 1) * data_units
    return rows.storage, rows.storage.stride(0), offset, scale_offset, *steps


def write_records(rows: PagedRows, block_ids: Tensor, slots: Tensor, values: Tensor) -> None:
    """values bfloat16 [n, dim] into the places (block_ids [n], slots [n])."""
    values, dim = _with_unit_stride(values), rows.format.dim
    if values.shape[0]:
        given = values, values.stride(0), block_ids.contiguous(), slots.contiguous()
        kind = rows.format.kind.value
        _write[(values.shape[0],)](*given, *page_arguments(rows), kind, dim, pairs_of(dim), **_OPTIONS)


def copy_rows(target: Tensor, targets: Tensor, source: Tensor, sources: Tensor) -> None:
    """target[targets[i]] = source[sources[i]]; rows are contiguous."""
    count, units = targets.shape[0], source.shape[1:].numel()
    if not count or not units:
        return
    tile = min(4096, triton.next_power_of_2(units))
    num_warps = 1 if units * source.element_size() <= 1024 else 4
    places = target, target.stride(0), targets.contiguous(), source, source.stride(0), sources.contiguous()
    _copy_rows[(count,)](*places, units, tile, num_warps=num_warps)
