"""Plain torch encoding and decoding of cache records."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal_kernels import formats
from shoal_kernels.paged_rows import PagedRows
from shoal_kernels.row_formats import RecordKind

_ENCODE = {
    RecordKind.WINDOW: formats.encode_q8,
    RecordKind.MAIN: formats.encode_q4nv,
    RecordKind.INDEX: formats.encode_q4ue,
}
_DECODE = {
    RecordKind.WINDOW: formats.decode_q8,
    RecordKind.MAIN: formats.decode_q4nv,
    RecordKind.INDEX: formats.decode_q4ue,
}


def encode_records(values: Tensor, kind: RecordKind) -> Tensor:
    """values [n, dim] -> uint8 [n, units]."""
    return torch.cat(_ENCODE[kind](values), dim=-1)


def decode_records(records: Tensor, kind: RecordKind, dim: int) -> Tensor:
    """uint8 [n, units] -> float32 [n, dim]."""
    data_units = dim if kind is RecordKind.WINDOW else dim // 2
    return _DECODE[kind](records[:, :data_units].contiguous(), records[:, data_units:].contiguous())


def write_records(rows: PagedRows, block_ids: Tensor, slots: Tensor, values: Tensor) -> None:
    """values [n, dim] into the places (block_ids [n], slots [n])."""
    rows.write_bytes(block_ids, slots, encode_records(values, rows.format.kind))


def copy_rows(target: Tensor, targets: Tensor, source: Tensor, sources: Tensor) -> None:
    """target[targets[i]] = source[sources[i]]."""
    target.index_copy_(0, targets, source.index_select(0, sources))
