"""Matrix product in the fixed order of `arith.matmul`, blocked so that weights are read once per few rows."""

from __future__ import annotations

from typing import Any

from shoal_kernels.arith_nb import ZERO
from shoal_kernels.jit import inline, kernel

_COLUMNS = 512
_ROWS = 8
_LINE = 16


@inline
def transpose(x: Any, out: Any) -> None:
    """out[d, n] = x[n, d], a cache line of the output at a time."""
    rows, columns = x.shape
    for first in range(0, rows, _LINE):
        last = min(first + _LINE, rows)
        for d in range(columns):
            line = out[d, first:last]
            for i in range(line.shape[0]):
                line[i] = x[first + i, d]


@kernel("void(f4[:, ::1], f4[:, ::1], f4[:, ::1])")
def gemm(x: Any, w: Any, out: Any) -> None:
    """out[R, N] = x[R, K] @ w[K, N], K ascending. Blocks of rows and columns only choose the order of memory accesses:

    every output element adds its products one after another, four per pass over the accumulators.
    """
    rows, depth = x.shape
    columns = w.shape[1]
    for first in range(0, columns, _COLUMNS):
        last = min(first + _COLUMNS, columns)
        for row_0 in range(0, rows, _ROWS):
            row_1 = min(row_0 + _ROWS, rows)
            for r in range(row_0, row_1):
                target = out[r, first:last]
                for n in range(target.shape[0]):
                    target[n] = ZERO
            k = 0
            while k + 4 <= depth:
                w0, w1, w2, w3 = w[k, first:last], w[k + 1, first:last], w[k + 2, first:last], w[k + 3, first:last]
                r = row_0
                while r + 2 <= row_1:
                    a0, a1, a2, a3 = x[r, k], x[r, k + 1], x[r, k + 2], x[r, k + 3]
                    b0, b1, b2, b3 = x[r + 1, k], x[r + 1, k + 1], x[r + 1, k + 2], x[r + 1, k + 3]
                    upper, lower = out[r, first:last], out[r + 1, first:last]
                    for n in range(upper.shape[0]):
                        upper[n] = (((upper[n] + a0 * w0[n]) + a1 * w1[n]) + a2 * w2[n]) + a3 * w3[n]
                        lower[n] = (((lower[n] + b0 * w0[n]) + b1 * w1[n]) + b2 * w2[n]) + b3 * w3[n]
                    r += 2
                if r < row_1:
                    a0, a1, a2, a3 = x[r, k], x[r, k + 1], x[r, k + 2], x[r, k + 3]
                    upper = out[r, first:last]
                    for n in range(upper.shape[0]):
                        upper[n] = (((upper[n] + a0 * w0[n]) + a1 * w1[n]) + a2 * w2[n]) + a3 * w3[n]
                k += 4
            while k < depth:
                w0 = w[k, first:last]
                for r in range(row_0, row_1):
                    a0 = x[r, k]
                    upper = out[r, first:last]
                    for n in range(upper.shape[0]):
                        upper[n] = upper[n] + a0 * w0[n]
                k += 1
