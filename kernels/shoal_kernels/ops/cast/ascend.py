# mypy: ignore-errors
"""Casts of activations on Ascend: codes and scales, as the products read them. Lowered, never run here."""

import torch
from torch import Tensor

from shoal_kernels import ascend_host

_THREADS = 256


def q8_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """x bfloat16 [R, d] -> e4m3 codes [R, d], ue8m0 scales [R, d / 32]."""
    rows, d = x.shape
    codes = torch.empty(rows, d, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(rows, d // 32, dtype=torch.uint8, device=x.device)
    grouped = (x.view(rows, d // 32, 32), codes.view(rows, d // 32, 32), scale)
    ascend_host.run(cast_q8, grouped, d=d)
    return codes, scale


def cast_q8(*, d: int):
    """X bfloat16 [rows, d] -> Y e4m3 [rows, d], S ue8m0 [rows, d / 32], d a multiple of 32.

    The last axis is seen as [d / 32, 32]. The cast to e4m3 is the device's, nearest even, of values within +-448.
    """
    import tilelang.ascend.language as T

    from shoal_kernels import ascend_lib as lib

    groups = d // 32
    rows = T.dynamic("rows")

    @T.prim_func
    def main(
        X: T.Tensor((rows, groups, 32), "bfloat16"),
        Y: T.Tensor((rows, groups, 32), "float8_e4m3fn"),
        S: T.Tensor((rows, groups), "uint8"),
    ):
        with T.Kernel(lib.VECTOR_CORES) as core:
            x = T.alloc_shared((groups, 32), "bfloat16")
            y = T.alloc_shared((groups, 32), "float8_e4m3fn")
            s = T.alloc_shared((groups,), "uint8")
            for turn in T.Pipelined(T.ceildiv(rows - core, lib.VECTOR_CORES), num_stages=2):
                row = turn * lib.VECTOR_CORES + core
                T.copy(X[row, :, :], x)
                with T.SimtVF(threads=_THREADS):
                    values = T.alloc_fragment((groups, 32), "float32")
                    largest = T.alloc_fragment((groups,), "float32")
                    for g, i in T.Parallel(groups, 32):
                        values[g, i] = lib.wide(x[g, i])
                    T.reduce_absmax(values, largest, dim=1)
                    for g in T.Parallel(groups):
                        s[g] = T.cast(lib.power_of_two_byte(largest[g], lib.Q8_FLOOR, lib.E4M3_MAX), "uint8")
                    for g, i in T.Parallel(groups, 32):
                        byte = lib.power_of_two_byte(largest[g], lib.Q8_FLOOR, lib.E4M3_MAX)
                        scaled = values[g, i] * lib.inverse_of_byte(byte)
                        y[g, i] = T.cast(lib.clamped(scaled, lib.E4M3_MAX), "float8_e4m3fn")
                T.copy(y, Y[row, :, :])
                T.copy(s, S[row, :])

    return main


def cast_q4ue(*, d: int):
    """X bfloat16 [rows, d] -> Y packed e2m1 [rows, d / 2], S ue8m0 [rows, d / 32]: the index query, heads as rows."""
    import tilelang.ascend.language as T

    from shoal_kernels import ascend_lib as lib

    groups, block = d // 32, 32
    rows = T.dynamic("rows")

    @T.prim_func
    def main(
        X: T.Tensor((rows, groups, 32), "bfloat16"),
        Y: T.Tensor((rows, groups, 16), "uint8"),
        S: T.Tensor((rows, groups), "uint8"),
    ):
        with T.Kernel(lib.VECTOR_CORES) as core:
            x = T.alloc_shared((block, groups, 32), "bfloat16")
            y = T.alloc_shared((block, groups, 16), "uint8")
            s = T.alloc_shared((block, groups), "uint8")
            for turn in T.Pipelined(T.ceildiv(T.ceildiv(rows, block) - core, lib.VECTOR_CORES), num_stages=2):
                top = (turn * lib.VECTOR_CORES + core) * block
                T.copy(X[top : top + block, :, :], x)
                with T.SimtVF(threads=_THREADS):
                    values = T.alloc_fragment((block, groups, 32), "float32")
                    largest = T.alloc_fragment((block, groups), "float32")
                    for r, g, i in T.Parallel(block, groups, 32):
                        values[r, g, i] = lib.wide(x[r, g, i])
                    T.reduce_absmax(values, largest, dim=2)
                    for r, g in T.Parallel(block, groups):
                        s[r, g] = T.cast(lib.power_of_two_byte(largest[r, g], lib.Q4UE_FLOOR, lib.E2M1_MAX), "uint8")
                with T.SimtVF(threads=_THREADS):
                    for r, g, i in T.Parallel(block, groups, 16):
                        inverse = lib.inverse_of_byte(lib.integer(s[r, g]))
                        low = lib.e2m1_code(lib.wide(x[r, g, 2 * i]) * inverse)
                        high = lib.e2m1_code(lib.wide(x[r, g, 2 * i + 1]) * inverse)
                        y[r, g, i] = T.cast(low | (high << 4), "uint8")
                T.copy(y, Y[top : top + block, :, :])
                T.copy(s, S[top : top + block, :])

    return main
