"""Compiled linear for precision SERVED."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from shoal_kernels.arith_nb import bf16, q8_row
from shoal_kernels.gemm_nb import gemm
from shoal_kernels.jit import kernel
from shoal_kernels.precision import Precision
from shoal_kernels.threads import for_row_ranges

if TYPE_CHECKING:
    from shoal_kernels.ops.linear import LinearWeight


@kernel("void(f4[:, ::1], f4[:, :, ::1], b1, b1, f4[:, ::1])")
def _linear(x: Any, data: Any, cast: Any, round_out: Any, out: Any) -> None:
    groups, depth, columns = data.shape
    rows = x.shape[0]
    if groups == 1 and not cast:
        gemm(x, data[0], out)
    else:
        part = np.empty((rows, depth), np.float32)
        result = np.empty((rows, columns), np.float32)
        for group in range(groups):
            for r in range(rows):
                source = x[r, group * depth : (group + 1) * depth]
                if cast:
                    q8_row(source, part[r])
                else:
                    part[r] = source
            gemm(part, data[group], result)
            for r in range(rows):
                out[r, group * columns : (group + 1) * columns] = result[r]
    if round_out:
        for r in range(rows):
            row = out[r]
            for n in range(row.shape[0]):
                row[n] = bf16(row[n])


def linear(x: Tensor, weight: LinearWeight, cast: bool, round_out: bool, precision: Precision) -> Tensor:
    """x [R, G*K], values [G, K, N] -> [R, G*N]."""
    out = torch.empty(x.shape[0], weight.out_features)
    source, data, target = x.contiguous().numpy(), weight.data.numpy(), out.numpy()
    for_row_ranges(
        x.shape[0], lambda first, last: _linear(source[first:last], data, cast, round_out, target[first:last])
    )
    return out
