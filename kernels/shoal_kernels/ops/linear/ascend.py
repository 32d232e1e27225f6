# mypy: ignore-errors
"""Linears on Ascend: an FP8 product with a scale per row and 32 of K, and a bfloat16 one. Lowered, never run here.

The unit that multiplies ("Cube") takes e4m3 codes and ue8m0 scales as they are. A stored scale stands for a block of 32
by 32; `expand_scale` writes it once per row, which is the form this unit reads. The sum over K is one float32
accumulator, K ascending in steps that depend on the weight only.

Builders take static sizes and give a TileLang function whose number of rows is dynamic. Annotations are evaluated when
a kernel is built, so this file does not postpone them.
"""

import torch
from torch import Tensor

from shoal_kernels import ascend_host
from shoal_kernels.ops.cast import ascend as cast_ascend

_TILE_K = 256


def expand_scale(scale: Tensor, out_features: int) -> Tensor:
    """ue8m0 [ceil(N / 32), K / 32] -> [N, K / 32], contiguous: done once, when a weight is prepared."""
    return scale.repeat_interleave(32, dim=0)[:out_features].contiguous()


def _columns(n: int) -> int:
    for tile in (256, 128, 64, 32, 16):
        if n % tile == 0:
            return tile
    raise ValueError(f"the output size must be a multiple of 16, got {n}")


def fp8_linear(*, k: int, n: int, groups: int = 1, out: str = "bfloat16"):
    """Y[r, n] = sum over k of value(X[r, k]) * value(W[n, k]).

    X   e4m3 [rows, groups * k] with XS ue8m0 [rows, groups * k / 32], read as pairs; made by `cast.ascend.cast_q8`
    W   e4m3 [n, k] with WS ue8m0 [n, k / 32], read as pairs; n counts all groups, group g is rows g * n / groups ..
    Y   [rows, n] bfloat16 or float32
    """
    import tilelang.ascend.language as T

    from shoal_kernels.ascend_lib import CUBE_CORES, ROW_TILE

    if k % _TILE_K or n % groups:
        raise ValueError(f"this kernel needs K in steps of {_TILE_K} and whole groups, got {k} and {n} / {groups}")
    tile_n = _columns(n // groups)
    tiles, steps, pairs, per_group = n // tile_n, k // _TILE_K, _TILE_K // 64, n // groups // tile_n
    rows = T.dynamic("rows")

    @T.prim_func
    def main(
        X: T.Tensor((rows, groups * k), "float8_e4m3fn"),
        XS: T.Tensor((rows, groups * k // 64), "uint16"),
        W: T.Tensor((n, k), "float8_e4m3fn"),
        WS: T.Tensor((n, k // 64), "uint16"),
        Y: T.Tensor((rows, n), out),
    ):
        with T.Kernel(CUBE_CORES) as core:
            total = T.alloc_l0c((ROW_TILE, tile_n), "float32")
            x = T.alloc_l1((ROW_TILE, _TILE_K), "float8_e4m3fn")
            w = T.alloc_l1((tile_n, _TILE_K), "float8_e4m3fn")
            xs = T.alloc_l1((ROW_TILE, pairs), "uint16")
            ws = T.alloc_l1((tile_n, pairs), "uint16")
            for turn in T.serial(T.ceildiv(T.ceildiv(rows, ROW_TILE) * tiles - core, CUBE_CORES)):
                tile = turn * CUBE_CORES + core
                top = tile // tiles * ROW_TILE
                column = tile % tiles
                left = column // per_group * steps
                for step in T.Pipelined(steps, num_stages=2):
                    at = left + step
                    T.copy(X[top : top + ROW_TILE, at * _TILE_K : (at + 1) * _TILE_K], x)
                    T.copy(XS[top : top + ROW_TILE, at * pairs : (at + 1) * pairs], xs)
                    T.copy(W[column * tile_n : (column + 1) * tile_n, step * _TILE_K : (step + 1) * _TILE_K], w)
                    T.copy(WS[column * tile_n : (column + 1) * tile_n, step * pairs : (step + 1) * pairs], ws)
                    T.gemm_blockscaled(x, w, total, xs, ws, transpose_B=True, clear_accum=(step == 0))
                T.copy(total, Y[top : top + ROW_TILE, column * tile_n : (column + 1) * tile_n])

    return main


def bf16_linear(*, k: int, n: int, out: str = "bfloat16"):
    """Y[r, n] = sum over k of X[r, k] * W[n, k]: X bfloat16 [rows, k], W bfloat16 [n, k], Y bfloat16 or float32."""
    import tilelang.ascend.language as T

    from shoal_kernels.ascend_lib import CUBE_CORES, ROW_TILE

    if k % _TILE_K:
        raise ValueError(f"this kernel needs K in steps of {_TILE_K}, got {k}")
    tile_n = _columns(n)
    tiles, steps = n // tile_n, k // _TILE_K
    rows = T.dynamic("rows")

    @T.prim_func
    def main(X: T.Tensor((rows, k), "bfloat16"), W: T.Tensor((n, k), "bfloat16"), Y: T.Tensor((rows, n), out)):
        with T.Kernel(CUBE_CORES) as core:
            total = T.alloc_l0c((ROW_TILE, tile_n), "float32")
            x = T.alloc_l1((ROW_TILE, _TILE_K), "bfloat16")
            w = T.alloc_l1((tile_n, _TILE_K), "bfloat16")
            for turn in T.serial(T.ceildiv(T.ceildiv(rows, ROW_TILE) * tiles - core, CUBE_CORES)):
                tile = turn * CUBE_CORES + core
                top = tile // tiles * ROW_TILE
                column = tile % tiles
                for step in T.Pipelined(steps, num_stages=2):
                    T.copy(X[top : top + ROW_TILE, step * _TILE_K : (step + 1) * _TILE_K], x)
                    T.copy(W[column * tile_n : (column + 1) * tile_n, step * _TILE_K : (step + 1) * _TILE_K], w)
                    T.gemm(x, w, total, transpose_B=True, clear_accum=(step == 0))
                T.copy(total, Y[top : top + ROW_TILE, column * tile_n : (column + 1) * tile_n])

    return main


def linear(x: Tensor, weight, cast: bool, round_out: bool, precision) -> Tensor:
    """x [R, K], LinearWeight in bytes -> [R, N]. A row that is cast already is cast again to the same codes."""
    n, out = weight.out_features, torch.bfloat16 if round_out else torch.float32
    y = torch.empty(x.shape[0], n, dtype=out, device=x.device)
    name = str(out).removeprefix("torch.")
    if not weight.quantised:
        ascend_host.run(bf16_linear, (x, weight.data, y), k=weight.depth, n=n, out=name)
        return y
    codes, scale = cast_ascend.q8_codes(x)
    stored = weight.data.view(torch.float8_e4m3fn)
    stored_scale = expand_scale(weight.scale, n).view(torch.uint16)
    tensors = (codes, scale.view(torch.uint16), stored, stored_scale, y)
    ascend_host.run(fp8_linear, tensors, k=weight.depth, n=n, groups=weight.groups, out=name)
    return y
