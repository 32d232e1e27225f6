"""Compiled encoding and decoding of cache records."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal_kernels.jit import kernel
from shoal_kernels.paged_rows import PagedRows
from shoal_kernels.records_nb import MAIN, WINDOW, decode_index, decode_main, decode_window, encode_record, find_record
from shoal_kernels.row_formats import RecordKind


@kernel("void(f4[:, ::1], i8, u1[:, ::1])")
def _encode(values: Any, kind: Any, records: Any) -> None:
    for r in range(values.shape[0]):
        encode_record(values[r], kind, records[r])


@kernel("void(u1[:, ::1], i8, f4[:, ::1])")
def _decode(records: Any, kind: Any, values: Any) -> None:
    dim = values.shape[1]
    data_units = dim if kind == WINDOW else dim // 2
    for r in range(values.shape[0]):
        data, scales = records[r, :data_units], records[r, data_units:]
        if kind == WINDOW:
            decode_window(data, scales, values[r])
        elif kind == MAIN:
            decode_main(data, scales, values[r])
        else:
            decode_index(data, scales, values[r])


@kernel("void(f4[:, ::1], i8, i8[::1], i8[::1], i8[::1], u1[:, ::1])")
def _write(values: Any, kind: Any, layout: Any, block_ids: Any, slots: Any, storage: Any) -> None:
    record = np.empty(layout[2] + layout[3], np.uint8)
    for r in range(values.shape[0]):
        encode_record(values[r], kind, record)
        block = storage[block_ids[r]]
        data, data_end, scales, scales_end = find_record(layout, slots[r])
        block[data:data_end] = record[: layout[2]]
        block[scales:scales_end] = record[layout[2] :]


def encode_records(values: Tensor, kind: RecordKind) -> Tensor:
    """values [n, dim] -> uint8 [n, units]."""
    dim = values.shape[1]
    units = dim + dim // 32 if kind is RecordKind.WINDOW else dim // 2 + dim // (16 if kind is RecordKind.MAIN else 32)
    records = torch.empty(values.shape[0], units, dtype=torch.uint8)
    _encode(values.contiguous().numpy(), kind.value, records.numpy())
    return records


def decode_records(records: Tensor, kind: RecordKind, dim: int) -> Tensor:
    """uint8 [n, units] -> float32 [n, dim]."""
    values = torch.empty(records.shape[0], dim)
    _decode(records.contiguous().numpy(), kind.value, values.numpy())
    return values


def write_records(rows: PagedRows, block_ids: Tensor, slots: Tensor, values: Tensor) -> None:
    """values [n, dim] into the places (block_ids [n], slots [n])."""
    _write(
        values.contiguous().numpy(),
        rows.format.kind.value,
        np.array(rows.layout),
        block_ids.contiguous().numpy(),
        slots.contiguous().numpy(),
        rows.storage.numpy(),
    )
