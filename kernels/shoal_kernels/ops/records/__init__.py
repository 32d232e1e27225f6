"""Encoding, decoding and moving of cache records. RowFormat and PagedRows hold the contracts of the first three.

encode_records  values [n, dim] float32 -> uint8 [n, units]: data, then scales
decode_records  uint8 [n, units] -> values [n, dim] float32
write_records   PagedRows, block ids int64 [n], slots int64 [n], values [n, dim]: encode and store
exact           all implementations agree bit for bit; on an accelerator values are bfloat16
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal_kernels.checks import check_index, check_rows
from shoal_kernels.precision import Precision
from shoal_kernels.registry import resolve


def copy_rows(
    target: Tensor,
    targets: Tensor,
    source: Tensor,
    sources: Tensor,
    *,
    precision: Precision,
    backend: str | None = None,
) -> None:
    """target[targets[i]] = source[sources[i]]: how rows of a step enter the rings.

    target, source    [P, ...] and [Q, ...] of one dtype and row shape, each row contiguous; they may be one buffer as
                      long as no row is both read and written
    targets, sources  int64 [n]; targets are distinct
    raises            ValueError for shape or dtype, or for a row outside
    exact             a copy
    """
    if target.shape[1:] != source.shape[1:] or target.dtype != source.dtype:
        raise ValueError(f"rows {source.dtype} {list(source.shape)} do not fit {target.dtype} {list(target.shape)}")
    if not (target[:1].is_contiguous() and source[:1].is_contiguous()):
        raise ValueError("rows must be contiguous")
    check_rows("targets", targets, None, dtype=torch.int64)
    check_rows("sources", sources, targets.shape[0], dtype=torch.int64)
    check_index("targets", targets, 0, target.shape[0])
    check_index("sources", sources, 0, source.shape[0])
    resolve("copy_rows", target.device.type, precision, backend)(target, targets, source, sources)
