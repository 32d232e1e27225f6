# mypy: ignore-errors
"""Grouped FP8 x FP4 experts on Ascend. Lowered, never run here.

TileLang's scaled product takes one operand type, so e4m3 rows cannot meet e2m1 weights in it. e2m1 times a power of two
is exact in bfloat16, and so are the Q8 values of the rows: vector cores decode a tile of weights, the Cube multiplies
bfloat16. A step is five launches: rows gathered by expert (`gather_rows`), gate and up (`grouped_linear`),
`swiglu_cast`, down (`grouped_linear`), and `combine`.

Pairs are (row, expert) sorted by expert: expert e owns pairs first[e] .. first[e + 1] - 1.
"""

_TILE_N, _TILE_K, _THREADS = 128, 256, 256
_SCALES = 32  # a row of a transfer starts at a multiple of 32 bytes


def gather_rows(*, d: int):
    """Y[p] = Q8 values of X[row_of[p]]: X bfloat16 [rows, d], row_of int32 [pairs], Y bfloat16 [pairs, d]."""
    import tilelang.ascend.language as T

    from shoal_kernels import ascend_lib as lib

    groups = d // 32
    rows, pairs = T.dynamic("rows"), T.dynamic("pairs")

    @T.prim_func
    def main(
        X: T.Tensor((rows, groups, 32), "bfloat16"),
        row_of: T.Tensor((pairs,), "int32"),
        Y: T.Tensor((pairs, groups, 32), "bfloat16"),
    ):
        with T.Kernel(lib.VECTOR_CORES) as core:
            x = T.alloc_shared((groups, 32), "bfloat16")
            y = T.alloc_shared((groups, 32), "bfloat16")
            for turn in T.Pipelined(T.ceildiv(pairs - core, lib.VECTOR_CORES), num_stages=2):
                pair = turn * lib.VECTOR_CORES + core
                row = row_of[pair]
                T.copy(X[row, :, :], x)
                with T.SimtVF(threads=_THREADS):
                    values = T.alloc_fragment((groups, 32), "float32")
                    largest = T.alloc_fragment((groups,), "float32")
                    for g, i in T.Parallel(groups, 32):
                        values[g, i] = lib.wide(x[g, i])
                    T.reduce_absmax(values, largest, dim=1)
                    for g, i in T.Parallel(groups, 32):
                        byte = lib.power_of_two_byte(largest[g], lib.Q8_FLOOR, lib.E4M3_MAX)
                        code = T.cast(
                            lib.clamped(values[g, i] * lib.inverse_of_byte(byte), lib.E4M3_MAX), "float8_e4m3fn"
                        )
                        y[g, i] = lib.bf16(T.cast(code, "float32") * lib.ue8m0(byte))
                T.copy(y, Y[pair, :, :])

    return main


def grouped_linear(*, experts: int, k: int, n: int):
    """Y[p, c] = bf16(sum over k of X[p, k] * W[expert of p, c, k]).

    X      bfloat16 [pairs, k]
    W      packed e2m1 [experts, n, k / 2] with WS ue8m0 [experts, n, k / 32], as stored
    first  int32 [experts + 1]
    Y      bfloat16 [pairs, n]
    """
    import tilelang.ascend.language as T

    from shoal_kernels import ascend_lib as lib

    if k % _TILE_K or n % _TILE_N:
        raise ValueError(f"this kernel needs K in steps of {_TILE_K} and N in steps of {_TILE_N}, got {k} and {n}")
    tiles, steps, tile_m, own = n // _TILE_N, k // _TILE_K, lib.ROW_TILE, _TILE_N // 2
    pairs = T.dynamic("pairs")

    @T.prim_func
    def main(
        X: T.Tensor((pairs, k), "bfloat16"),
        W: T.Tensor((experts, n, k // 2), "uint8"),
        WS: T.Tensor((experts, n, k // 32), "uint8"),
        first: T.Tensor((experts + 1,), "int32"),
        Y: T.Tensor((pairs, n), "bfloat16"),
    ):
        with T.Kernel(lib.CUBE_CORES) as core:
            total = T.alloc_l0c((tile_m, _TILE_N), "float32")
            x = T.alloc_l1((tile_m, _TILE_K), "bfloat16")
            w = T.alloc_l1((_TILE_N, _TILE_K), "bfloat16")
            codes = T.alloc_shared((own, _TILE_K // 2), "uint8")
            scales = T.alloc_shared((own, _SCALES), "uint8")
            values = T.alloc_shared((own, _TILE_K), "bfloat16")
            for turn in T.serial(T.ceildiv(experts * tiles - core, lib.CUBE_CORES)):
                tile = turn * lib.CUBE_CORES + core
                expert = tile // tiles
                column = tile % tiles * _TILE_N
                begin = first[expert]
                end = first[expert + 1]
                for block in T.serial(T.ceildiv(end - begin, tile_m)):
                    top = begin + block * tile_m
                    count = T.min(end - top, tile_m)
                    for step in T.Pipelined(steps, num_stages=2):
                        T.copy(X[top : top + tile_m, step * _TILE_K : (step + 1) * _TILE_K], x)
                        T.dual_copy(
                            W[expert, column : column + _TILE_N, step * _TILE_K // 2 : (step + 1) * _TILE_K // 2], codes
                        )
                        near = step * _TILE_K // 32 // _SCALES * _SCALES
                        T.dual_copy(WS[expert, column : column + _TILE_N, near : near + _SCALES], scales)
                        with T.SimtVF(threads=_THREADS):
                            for c, i in T.Parallel(own, _TILE_K):
                                scale = lib.ue8m0(lib.integer(scales[c, step * _TILE_K // 32 - near + i // 32]))
                                values[c, i] = lib.bf16(lib.e2m1(lib.nibble(codes[c, i // 2], i)) * scale)
                        T.dual_copy(values, w)
                        T.gemm(x, w, total, transpose_B=True, clear_accum=(step == 0))
                    T.copy(total[0:count, :], Y[top : top + count, column : column + _TILE_N])

    return main


def swiglu_cast(*, inner: int):
    """Y = Q8 values of silu(min(gate, limit)) * clamp(up) * weight, from X bfloat16 [pairs, 2 * inner], gate then up.

    weight float32 [pairs]; Y bfloat16 [pairs, inner]
    """
    import tilelang.ascend.language as T

    from shoal_kernels import ascend_lib as lib

    groups = inner // 32
    pairs = T.dynamic("pairs")

    @T.prim_func
    def main(
        X: T.Tensor((pairs, 2, groups, 32), "bfloat16"),
        weight: T.Tensor((pairs,), "float32"),
        Y: T.Tensor((pairs, groups, 32), "bfloat16"),
        limit: T.float32,
    ):
        with T.Kernel(lib.VECTOR_CORES) as core:
            x = T.alloc_shared((2, groups, 32), "bfloat16")
            y = T.alloc_shared((groups, 32), "bfloat16")
            for turn in T.Pipelined(T.ceildiv(pairs - core, lib.VECTOR_CORES), num_stages=2):
                pair = turn * lib.VECTOR_CORES + core
                share = weight[pair]
                T.copy(X[pair, :, :, :], x)
                with T.SimtVF(threads=_THREADS):
                    values = T.alloc_fragment((groups, 32), "float32")
                    largest = T.alloc_fragment((groups,), "float32")
                    for g, i in T.Parallel(groups, 32):
                        gate = T.min(lib.wide(x[0, g, i]), limit)
                        up = T.max(T.min(lib.wide(x[1, g, i]), limit), -limit)
                        values[g, i] = ((gate * lib.sigmoid(gate)) * up) * share
                    T.reduce_absmax(values, largest, dim=1)
                    for g, i in T.Parallel(groups, 32):
                        byte = lib.power_of_two_byte(largest[g], lib.Q8_FLOOR, lib.E4M3_MAX)
                        code = T.cast(
                            lib.clamped(values[g, i] * lib.inverse_of_byte(byte), lib.E4M3_MAX), "float8_e4m3fn"
                        )
                        y[g, i] = lib.bf16(T.cast(code, "float32") * lib.ue8m0(byte))
                T.copy(y, Y[pair, :, :])

    return main


def combine(*, d: int, k: int):
    """Y[r] = bf16(sum over i ascending of X[pair_of[r, i]] + Z[r]): experts in ascending id, then the shared one.

    X bfloat16 [pairs, d], pair_of int32 [rows, k], Z bfloat16 [rows, d], Y bfloat16 [rows, d]
    """
    import tilelang.ascend.language as T

    from shoal_kernels import ascend_lib as lib

    rows, pairs = T.dynamic("rows"), T.dynamic("pairs")

    @T.prim_func
    def main(
        X: T.Tensor((pairs, d), "bfloat16"),
        pair_of: T.Tensor((rows, k), "int32"),
        Z: T.Tensor((rows, d), "bfloat16"),
        Y: T.Tensor((rows, d), "bfloat16"),
    ):
        with T.Kernel(lib.VECTOR_CORES) as core:
            parts = T.alloc_shared((k, d), "bfloat16")
            shared = T.alloc_shared((1, d), "bfloat16")
            y = T.alloc_shared((1, d), "bfloat16")
            for turn in T.serial(T.ceildiv(rows - core, lib.VECTOR_CORES)):
                row = turn * lib.VECTOR_CORES + core
                for i in T.serial(k):
                    pair = pair_of[row, i]
                    T.copy(X[pair : pair + 1, :], parts[i : i + 1, :])
                T.copy(Z[row : row + 1, :], shared)
                with T.SimtVF(threads=_THREADS):
                    total = T.alloc_var("float32")
                    for r, c in T.Parallel(1, d):
                        total = lib.f32(0.0)
                        for i in T.serial(k):
                            total = total + lib.wide(parts[i, c])
                        y[r, c] = lib.bf16(total + lib.wide(shared[r, c]))
                T.copy(y, Y[row : row + 1, :])

    return main
