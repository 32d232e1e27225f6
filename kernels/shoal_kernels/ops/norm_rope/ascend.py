# mypy: ignore-errors
"""RMS norm with rotation and with the cast, on Ascend. Lowered, never run here.

One row per turn of a vector core. The sum of squares is a tree whose shape depends on the row's size only.
"""

import torch
from torch import Tensor

from shoal_kernels import ascend_host

_THREADS = 256


def rms_norm_kernel(*, d: int):
    """Y = bf16(X * rsqrt(mean(X^2) + eps) * W): X, Y bfloat16 [rows, d], W float32 [d]."""
    import tilelang.ascend.language as T

    from shoal_kernels import ascend_lib as lib

    rows = T.dynamic("rows")

    @T.prim_func
    def main(
        X: T.Tensor((rows, d), "bfloat16"),
        W: T.Tensor((d,), "float32"),
        Y: T.Tensor((rows, d), "bfloat16"),
        eps: T.float32,
    ):
        with T.Kernel(lib.VECTOR_CORES) as core:
            w = T.alloc_shared((d,), "float32")
            x = T.alloc_shared((1, d), "bfloat16")
            y = T.alloc_shared((1, d), "bfloat16")
            T.copy(W, w)
            for turn in T.Pipelined(T.ceildiv(rows - core, lib.VECTOR_CORES), num_stages=2):
                row = turn * lib.VECTOR_CORES + core
                T.copy(X[row : row + 1, :], x)
                with T.SimtVF(threads=_THREADS):
                    values = T.alloc_fragment((1, d), "float32")
                    squares = T.alloc_fragment((1, d), "float32")
                    total = T.alloc_fragment((1,), "float32")
                    for r, i in T.Parallel(1, d):
                        values[r, i] = lib.wide(x[r, i])
                        squares[r, i] = values[r, i] * values[r, i]
                    T.reduce_sum(squares, total, dim=1)
                    for r, i in T.Parallel(1, d):
                        factor = lib.f32(1.0) / T.sqrt(total[r] / lib.f32(d) + eps)
                        y[r, i] = lib.bf16((values[r, i] * factor) * w[i])
                T.copy(y, Y[row : row + 1, :])

    return main


def rms_norm_cast_kernel(*, d: int):
    """rms_norm, and its codes for FP8 linears: Y bfloat16 [rows, d], Q e4m3 [rows, d], S ue8m0 [rows, d / 32].

    The last axis of X, W, Y and Q is seen as [d / 32, 32].
    """
    import tilelang.ascend.language as T

    from shoal_kernels import ascend_lib as lib

    groups = d // 32
    rows = T.dynamic("rows")

    @T.prim_func
    def main(
        X: T.Tensor((rows, groups, 32), "bfloat16"),
        W: T.Tensor((groups, 32), "float32"),
        Y: T.Tensor((rows, groups, 32), "bfloat16"),
        Q: T.Tensor((rows, groups, 32), "float8_e4m3fn"),
        S: T.Tensor((rows, groups), "uint8"),
        eps: T.float32,
    ):
        with T.Kernel(lib.VECTOR_CORES) as core:
            w = T.alloc_shared((groups, 32), "float32")
            x = T.alloc_shared((groups, 32), "bfloat16")
            y = T.alloc_shared((groups, 32), "bfloat16")
            q = T.alloc_shared((groups, 32), "float8_e4m3fn")
            s = T.alloc_shared((groups,), "uint8")
            T.copy(W, w)
            for turn in T.Pipelined(T.ceildiv(rows - core, lib.VECTOR_CORES), num_stages=2):
                row = turn * lib.VECTOR_CORES + core
                T.copy(X[row, :, :], x)
                with T.SimtVF(threads=_THREADS):
                    values = T.alloc_fragment((groups, 32), "float32")
                    squares = T.alloc_fragment((groups, 32), "float32")
                    sums = T.alloc_fragment((groups,), "float32")
                    total = T.alloc_fragment((1,), "float32")
                    largest = T.alloc_fragment((groups,), "float32")
                    for g, i in T.Parallel(groups, 32):
                        values[g, i] = lib.wide(x[g, i])
                        squares[g, i] = values[g, i] * values[g, i]
                    T.reduce_sum(squares, sums, dim=1)
                    T.reduce_sum(sums, total, dim=0)
                    for g, i in T.Parallel(groups, 32):
                        factor = lib.f32(1.0) / T.sqrt(total[0] / lib.f32(d) + eps)
                        values[g, i] = lib.wide(lib.bf16((values[g, i] * factor) * w[g, i]))
                        y[g, i] = lib.bf16(values[g, i])
                    T.reduce_absmax(values, largest, dim=1)
                    for g in T.Parallel(groups):
                        s[g] = T.cast(lib.power_of_two_byte(largest[g], lib.Q8_FLOOR, lib.E4M3_MAX), "uint8")
                    for g, i in T.Parallel(groups, 32):
                        byte = lib.power_of_two_byte(largest[g], lib.Q8_FLOOR, lib.E4M3_MAX)
                        scaled = values[g, i] * lib.inverse_of_byte(byte)
                        q[g, i] = T.cast(lib.clamped(scaled, lib.E4M3_MAX), "float8_e4m3fn")
                T.copy(y, Y[row, :, :])
                T.copy(q, Q[row, :, :])
                T.copy(s, S[row, :])

    return main


def rms_norm_rope_kernel(*, d: int, rope: int):
    """rms_norm, then the last `rope` values rotated in pairs by the row's position: the window KV and the index key.

    X, Y bfloat16 [rows, d], W float32 [d], P int64 [rows], CS float32 [length, rope]: cosines, then sines
    """
    import tilelang.ascend.language as T

    from shoal_kernels import ascend_lib as lib

    kept, pairs = d - rope, rope // 2
    rows, length = T.dynamic("rows"), T.dynamic("length")

    @T.prim_func
    def main(
        X: T.Tensor((rows, d), "bfloat16"),
        W: T.Tensor((d,), "float32"),
        P: T.Tensor((rows,), "int64"),
        CS: T.Tensor((length, rope), "float32"),
        Y: T.Tensor((rows, d), "bfloat16"),
        eps: T.float32,
    ):
        with T.Kernel(lib.VECTOR_CORES) as core:
            w = T.alloc_shared((d,), "float32")
            x = T.alloc_shared((1, d), "bfloat16")
            z = T.alloc_shared((1, d), "float32")
            y = T.alloc_shared((1, d), "bfloat16")
            angle = T.alloc_shared((1, rope), "float32")
            T.copy(W, w)
            for turn in T.Pipelined(T.ceildiv(rows - core, lib.VECTOR_CORES), num_stages=2):
                row = turn * lib.VECTOR_CORES + core
                position = P[row]
                T.copy(X[row : row + 1, :], x)
                T.copy(CS[position : position + 1, :], angle)
                with T.SimtVF(threads=128):
                    values = T.alloc_fragment((1, d), "float32")
                    squares = T.alloc_fragment((1, d), "float32")
                    total = T.alloc_fragment((1,), "float32")
                    for r, i in T.Parallel(1, d):
                        values[r, i] = lib.wide(x[r, i])
                        squares[r, i] = values[r, i] * values[r, i]
                    T.reduce_sum(squares, total, dim=1)
                    for r, i in T.Parallel(1, d):
                        factor = lib.f32(1.0) / T.sqrt(total[r] / lib.f32(d) + eps)
                        z[r, i] = lib.wide(lib.bf16((values[r, i] * factor) * w[i]))
                with T.SimtVF(threads=128):
                    for r, i in T.Parallel(1, kept):
                        y[r, i] = lib.bf16(z[r, i])
                    for r, i in T.Parallel(1, pairs):
                        even, odd = z[r, kept + 2 * i], z[r, kept + 2 * i + 1]
                        y[r, kept + 2 * i] = lib.bf16(even * angle[r, i] - odd * angle[r, pairs + i])
                        y[r, kept + 2 * i + 1] = lib.bf16(even * angle[r, pairs + i] + odd * angle[r, i])
                T.copy(y, Y[row : row + 1, :])

    return main


def rms_norm(x: Tensor, weight: Tensor, eps: float, precision) -> Tensor:
    """x [R, D], weight [D] -> [R, D]."""
    y = torch.empty_like(x)
    ascend_host.run(rms_norm_kernel, (x, weight, y, eps), d=x.shape[1])
    return y


def rms_norm_rope(x: Tensor, weight: Tensor, eps: float, positions: Tensor, cos_sin: Tensor, precision) -> Tensor:
    """x [R, D], weight [D], cos_sin [length, 2F] -> [R, D]."""
    y = torch.empty_like(x)
    tensors = (x, weight, positions, cos_sin, y, eps)
    ascend_host.run(rms_norm_rope_kernel, tensors, d=x.shape[1], rope=cos_sin.shape[1])
    return y
