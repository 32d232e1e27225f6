# mypy: ignore-errors
"""Hyper-connections on Ascend: mix in two kernels, the pass over a row in one. Lowered, never run here.

Sizes are those of the Triton kernels: K = N*D is cut into segments that depend on the weight only.
"""

import torch
from torch import Tensor

from shoal_kernels import ascend_host

_SEGMENT, _TILE_K, _COLUMNS = 1024, 256, 64
STREAMS = 4


def mix_partials(*, d: int, parts: int = 2):
    """Partial sums of streams X bfloat16 [rows, K = 4 * d] times F bfloat16 [24 * parts, K], parts side by side.

    P float32 [segments, rows, 64]: a row's products over one segment of K
    Q float32 [segments, rows]: its sum of squares over the segment, which the vector cores take from the same tiles
    """
    import tilelang.ascend.language as T

    from shoal_kernels import ascend_lib as lib

    k, outputs, half = STREAMS * d, 24 * parts, lib.ROW_TILE // 2
    if k % _SEGMENT:
        raise ValueError(f"this kernel needs K in segments of {_SEGMENT}, got {k}")
    segments, steps = k // _SEGMENT, _SEGMENT // _TILE_K
    rows = T.dynamic("rows")

    @T.prim_func
    def main(
        X: T.Tensor((rows, k), "bfloat16"),
        F: T.Tensor((outputs, k), "bfloat16"),
        P: T.Tensor((segments, rows, _COLUMNS), "float32"),
        Q: T.Tensor((segments, rows), "float32"),
    ):
        with T.MixedKernel(lib.CUBE_CORES) as (core, sid):
            total = T.alloc_l0c((lib.ROW_TILE, _COLUMNS), "float32")
            x = T.alloc_l1((lib.ROW_TILE, _TILE_K), "bfloat16")
            f = T.alloc_l1((_COLUMNS, _TILE_K), "bfloat16")
            seen = T.alloc_shared((half, _TILE_K), "bfloat16")
            squares = T.alloc_shared((half,), "float32")
            for turn in T.serial(T.ceildiv(T.ceildiv(rows, lib.ROW_TILE) * segments - core, lib.CUBE_CORES)):
                tile = turn * lib.CUBE_CORES + core
                top = tile // segments * lib.ROW_TILE
                segment = tile % segments
                own = top + sid * half
                with T.SimtVF(threads=256):
                    for r in T.Parallel(half):
                        squares[r] = lib.f32(0.0)
                for step in T.Pipelined(steps, num_stages=2):
                    at = segment * _SEGMENT + step * _TILE_K
                    T.copy(X[top : top + lib.ROW_TILE, at : at + _TILE_K], x)
                    T.copy(F[0:_COLUMNS, at : at + _TILE_K], f)
                    T.gemm(x, f, total, transpose_B=True, clear_accum=(step == 0))
                    T.copy(X[own : own + half, at : at + _TILE_K], seen)
                    with T.SimtVF(threads=256):
                        wide = T.alloc_fragment((half, _TILE_K), "float32")
                        sums = T.alloc_fragment((half,), "float32")
                        for r, i in T.Parallel(half, _TILE_K):
                            wide[r, i] = lib.wide(seen[r, i]) * lib.wide(seen[r, i])
                        T.reduce_sum(wide, sums, dim=1)
                        for r in T.Parallel(half):
                            squares[r] = squares[r] + sums[r]
                T.copy(total, P[segment, top : top + lib.ROW_TILE, :])
                T.copy(squares, Q[segment, own : own + half])

    return main


def mix_finish(*, d: int, parts: int = 2, iterations: int = 20):
    """Coefficients from the partial sums: pre, post float32 [rows, 4], comb float32 [rows, 16]; a thread has a row.

    scale float32 [3], base float32 [24]. Segments are added in ascending order.
    """
    import tilelang.ascend.language as T

    from shoal_kernels import ascend_lib as lib

    k, block = STREAMS * d, 32
    segments = k // _SEGMENT
    rows = T.dynamic("rows")

    @T.macro
    def scale_four(c, first, stride, eps):
        total = (c[first] + c[first + 2 * stride]) + (c[first + stride] + c[first + 3 * stride]) + eps
        inverse = lib.f32(1.0) / total
        for i in T.unroll(4):
            c[first + i * stride] = c[first + i * stride] * inverse

    @T.prim_func
    def main(
        P: T.Tensor((segments, rows, _COLUMNS), "float32"),
        Q: T.Tensor((segments, rows), "float32"),
        scale: T.Tensor((3,), "float32"),
        base: T.Tensor((24,), "float32"),
        pre: T.Tensor((rows, 4), "float32"),
        post: T.Tensor((rows, 4), "float32"),
        comb: T.Tensor((rows, 16), "float32"),
        eps: T.float32,
        rms_eps: T.float32,
    ):
        with T.Kernel(lib.VECTOR_CORES) as core:
            p = T.alloc_shared((segments, block, _COLUMNS), "float32")
            q = T.alloc_shared((segments, block), "float32")
            slope = T.alloc_shared((8,), "float32")
            offset = T.alloc_shared((24,), "float32")
            out = T.alloc_shared((block, 4), "float32")
            out2 = T.alloc_shared((block, 4), "float32")
            out16 = T.alloc_shared((block, 16), "float32")
            T.copy(scale, slope[0:3])
            T.copy(base, offset)
            for turn in T.serial(T.ceildiv(T.ceildiv(rows, block) - core, lib.VECTOR_CORES)):
                top = (turn * lib.VECTOR_CORES + core) * block
                T.copy(P[:, top : top + block, :], p)
                T.copy(Q[:, top : top + block], q)
                with T.SimtVF(threads=block):
                    m = T.alloc_local((24,), "float32")
                    c = T.alloc_local((16,), "float32")
                    square = T.alloc_var("float32")
                    for r in T.Parallel(block):
                        square = lib.f32(0.0)
                        for s in T.serial(segments):
                            square = square + q[s, r]
                        factor = lib.f32(1.0) / T.sqrt(square / lib.f32(k) + rms_eps)
                        for i in T.unroll(24):
                            m[i] = lib.f32(0.0)
                            for s in T.serial(segments):
                                for part in T.unroll(parts):
                                    m[i] = m[i] + p[s, r, i * parts + part]
                            m[i] = m[i] * factor * slope[T.min(i // 4, 2)] + offset[i]
                        for i in T.unroll(4):
                            out[r, i] = lib.sigmoid(m[i]) + eps
                            out2[r, i] = lib.f32(2.0) * lib.sigmoid(m[4 + i])
                        for j in T.unroll(4):
                            largest = T.max(T.max(m[8 + 4 * j], m[9 + 4 * j]), T.max(m[10 + 4 * j], m[11 + 4 * j]))
                            for i in T.unroll(4):
                                c[4 * j + i] = T.exp(m[8 + 4 * j + i] - largest)
                            scale_four(c, 4 * j, 1, lib.f32(0.0))
                            for i in T.unroll(4):
                                c[4 * j + i] = c[4 * j + i] + eps
                        for i in T.unroll(4):
                            scale_four(c, i, 4, eps)
                        for _ in T.serial(iterations - 1):
                            for j in T.unroll(4):
                                scale_four(c, 4 * j, 1, eps)
                            for i in T.unroll(4):
                                scale_four(c, i, 4, eps)
                        for i in T.unroll(16):
                            out16[r, i] = c[i]
                T.copy(out, pre[top : top + block, :])
                T.copy(out2, post[top : top + block, :])
                T.copy(out16, comb[top : top + block, :])

    return main


def expand_norm(*, d: int):
    """expand, collapse with `pre`, norm and cast of a row, as the contract's expand_norm with cast.

    y bfloat16 [rows, d], X bfloat16 [rows, 4, d], post, pre [rows, 4], comb [rows, 16], weight [d] float32 ->
    Z bfloat16 [rows, 4, d], Y bfloat16 [rows, d], Q e4m3 [rows, d], S ue8m0 [rows, d / 32]; d is seen as [d / 32, 32]
    """
    import tilelang.ascend.language as T

    from shoal_kernels import ascend_lib as lib

    groups, threads = d // 32, 256
    rows = T.dynamic("rows")

    @T.prim_func
    def main(
        y: T.Tensor((rows, groups, 32), "bfloat16"),
        X: T.Tensor((rows, STREAMS, groups, 32), "bfloat16"),
        post: T.Tensor((rows, 4), "float32"),
        comb: T.Tensor((rows, 16), "float32"),
        pre: T.Tensor((rows, 4), "float32"),
        weight: T.Tensor((groups, 32), "float32"),
        Z: T.Tensor((rows, STREAMS, groups, 32), "bfloat16"),
        Y: T.Tensor((rows, groups, 32), "bfloat16"),
        Q: T.Tensor((rows, groups, 32), "float8_e4m3fn"),
        S: T.Tensor((rows, groups), "uint8"),
        eps: T.float32,
    ):
        with T.Kernel(lib.VECTOR_CORES) as core:
            w = T.alloc_shared((groups, 32), "float32")
            source = T.alloc_shared((groups, 32), "bfloat16")
            streams = T.alloc_shared((STREAMS, groups, 32), "bfloat16")
            write = T.alloc_shared((1, 8), "float32")
            carry = T.alloc_shared((1, 16), "float32")
            read = T.alloc_shared((1, 8), "float32")
            normed = T.alloc_shared((groups, 32), "bfloat16")
            q = T.alloc_shared((groups, 32), "float8_e4m3fn")
            s = T.alloc_shared((groups,), "uint8")
            T.copy(weight, w)
            for turn in T.serial(T.ceildiv(rows - core, lib.VECTOR_CORES)):
                row = turn * lib.VECTOR_CORES + core
                T.copy(y[row, :, :], source)
                T.copy(X[row, :, :, :], streams)
                T.copy(post[row : row + 1, :], write[:, 0:4])
                T.copy(comb[row : row + 1, :], carry)
                T.copy(pre[row : row + 1, :], read[:, 0:4])
                with T.SimtVF(threads=threads):
                    values = T.alloc_fragment((groups, 32), "float32")
                    squares = T.alloc_fragment((groups, 32), "float32")
                    sums = T.alloc_fragment((groups,), "float32")
                    total = T.alloc_fragment((1,), "float32")
                    largest = T.alloc_fragment((groups,), "float32")
                    old = T.alloc_local((4,), "float32")
                    for g, i in T.Parallel(groups, 32):
                        for n in T.unroll(4):
                            old[n] = lib.wide(streams[n, g, i])
                        values[g, i] = lib.f32(0.0)
                        for n in T.unroll(4):
                            after = (
                                (
                                    (write[0, n] * lib.wide(source[g, i]) + carry[0, n] * old[0])
                                    + carry[0, 4 + n] * old[1]
                                )
                                + carry[0, 8 + n] * old[2]
                            ) + carry[0, 12 + n] * old[3]
                            streams[n, g, i] = lib.bf16(after)
                            values[g, i] = values[g, i] + read[0, n] * lib.wide(lib.bf16(after))
                        values[g, i] = lib.wide(lib.bf16(values[g, i]))
                        squares[g, i] = values[g, i] * values[g, i]
                    T.reduce_sum(squares, sums, dim=1)
                    T.reduce_sum(sums, total, dim=0)
                    for g, i in T.Parallel(groups, 32):
                        factor = lib.f32(1.0) / T.sqrt(total[0] / lib.f32(d) + eps)
                        values[g, i] = lib.wide(lib.bf16((values[g, i] * factor) * w[g, i]))
                        normed[g, i] = lib.bf16(values[g, i])
                    T.reduce_absmax(values, largest, dim=1)
                    for g in T.Parallel(groups):
                        s[g] = T.cast(lib.power_of_two_byte(largest[g], lib.Q8_FLOOR, lib.E4M3_MAX), "uint8")
                    for g, i in T.Parallel(groups, 32):
                        byte = lib.power_of_two_byte(largest[g], lib.Q8_FLOOR, lib.E4M3_MAX)
                        scaled = values[g, i] * lib.inverse_of_byte(byte)
                        q[g, i] = T.cast(lib.clamped(scaled, lib.E4M3_MAX), "float8_e4m3fn")
                T.copy(streams, Z[row, :, :, :])
                T.copy(normed, Y[row, :, :])
                T.copy(q, Q[row, :, :])
                T.copy(s, S[row, :])

    return main


def mix(streams: Tensor, weight, iterations: int, eps: float, rms_eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """streams [R, 4, D], MixWeight in bfloat16 parts -> pre [R, 4], post [R, 4], comb [R, 4, 4]."""
    rows, n, d = streams.shape
    outputs, parts, k = weight.fn.shape
    segments = k // _SEGMENT
    wide = {"dtype": torch.float32, "device": streams.device}
    sums = torch.empty(segments, rows, _COLUMNS, **wide)
    squares = torch.empty(segments, rows, **wide)
    tensors = (streams.reshape(rows, k), weight.fn.view(outputs * parts, k), sums, squares)
    ascend_host.run(mix_partials, tensors, d=d, parts=parts)
    pre, post, comb = torch.empty(rows, n, **wide), torch.empty(rows, n, **wide), torch.empty(rows, n * n, **wide)
    tensors = (sums, squares, weight.scale, weight.base, pre, post, comb, eps, rms_eps)
    ascend_host.run(mix_finish, tensors, d=d, parts=parts, iterations=iterations)
    return pre, post, comb.view(rows, n, n)
