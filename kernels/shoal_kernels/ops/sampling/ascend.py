# mypy: ignore-errors
"""LM head and arg-max on Ascend, without storing logits. Lowered, never run here.

Greedy rows only: penalties, filters and Gumbel noise are not in these kernels. `head_argmax` leaves the best token of
every tile of the vocabulary, `merge_argmax` takes the best of those; ties go to the smaller id.
"""

_TILE_N, _TILE_K = 256, 256


def head_argmax(*, d: int, vocabulary: int):
    """best, token [tiles, rows]: the largest X[r] . W[v] over a tile of v, and its v.

    X bfloat16 [rows, d], W bfloat16 [vocabulary, d]
    """
    import tilelang.ascend.language as T

    from shoal_kernels import ascend_lib as lib

    if vocabulary % _TILE_N or d % _TILE_K:
        raise ValueError(f"this kernel needs whole tiles of {_TILE_N} x {_TILE_K}, got {vocabulary} and {d}")
    tiles, steps, own = vocabulary // _TILE_N, d // _TILE_K, lib.ROW_TILE // 2
    rows = T.dynamic("rows")

    @T.prim_func
    def main(
        X: T.Tensor((rows, d), "bfloat16"),
        W: T.Tensor((vocabulary, d), "bfloat16"),
        best: T.Tensor((tiles, rows), "float32"),
        token: T.Tensor((tiles, rows), "int32"),
    ):
        with T.Kernel(lib.CUBE_CORES) as core:
            total = T.alloc_l0c((lib.ROW_TILE, _TILE_N), "float32")
            x = T.alloc_l1((lib.ROW_TILE, _TILE_K), "bfloat16")
            w = T.alloc_l1((_TILE_N, _TILE_K), "bfloat16")
            logits = T.alloc_shared((own, _TILE_N), "float32")
            value = T.alloc_shared((1, own), "float32")
            winner = T.alloc_shared((1, own), "int32")
            for turn in T.serial(T.ceildiv(T.ceildiv(rows, lib.ROW_TILE) * tiles - core, lib.CUBE_CORES)):
                tile = turn * lib.CUBE_CORES + core
                top = tile // tiles * lib.ROW_TILE
                column = tile % tiles
                for step in T.Pipelined(steps, num_stages=2):
                    T.copy(X[top : top + lib.ROW_TILE, step * _TILE_K : (step + 1) * _TILE_K], x)
                    T.copy(W[column * _TILE_N : (column + 1) * _TILE_N, step * _TILE_K : (step + 1) * _TILE_K], w)
                    T.gemm(x, w, total, transpose_B=True, clear_accum=(step == 0))
                T.dual_copy(total, logits)
                with T.SimtVF(threads=256):
                    z = T.alloc_fragment((own, _TILE_N), "float32")
                    tied = T.alloc_fragment((own, _TILE_N), "int32")
                    largest = T.alloc_fragment((own,), "float32")
                    first = T.alloc_fragment((own,), "int32")
                    for r, v in T.Parallel(own, _TILE_N):
                        z[r, v] = logits[r, v]
                    T.reduce_max(z, largest, dim=1)
                    for r, v in T.Parallel(own, _TILE_N):
                        tied[r, v] = T.if_then_else(z[r, v] == largest[r], v, _TILE_N)
                    T.reduce_min(tied, first, dim=1)
                    for r in T.Parallel(own):
                        value[0, r] = largest[r]
                        winner[0, r] = column * _TILE_N + first[r]
                T.dual_copy(value, best[column : column + 1, top : top + lib.ROW_TILE])
                T.dual_copy(winner, token[column : column + 1, top : top + lib.ROW_TILE])

    return main


def merge_argmax(*, tiles: int):
    """ids int32 [rows]: the token of the largest of best [tiles, rows]; on a tie that of the first tile."""
    import tilelang.ascend.language as T

    from shoal_kernels import ascend_lib as lib

    block = 32
    rows = T.dynamic("rows")

    @T.prim_func
    def main(
        best: T.Tensor((tiles, rows), "float32"),
        token: T.Tensor((tiles, rows), "int32"),
        ids: T.Tensor((rows,), "int32"),
    ):
        with T.Kernel(lib.VECTOR_CORES) as core:
            values = T.alloc_shared((tiles, block), "float32")
            tokens = T.alloc_shared((tiles, block), "int32")
            out = T.alloc_shared((block,), "int32")
            for turn in T.serial(T.ceildiv(T.ceildiv(rows, block) - core, lib.VECTOR_CORES)):
                top = (turn * lib.VECTOR_CORES + core) * block
                T.copy(best[:, top : top + block], values)
                T.copy(token[:, top : top + block], tokens)
                with T.SimtVF(threads=block):
                    largest = T.alloc_var("float32")
                    winner = T.alloc_var("int32")
                    for r in T.Parallel(block):
                        largest = values[0, r]
                        winner = tokens[0, r]
                        for t in T.serial(tiles):
                            winner = T.if_then_else(values[t, r] > largest, tokens[t, r], winner)
                            largest = T.max(values[t, r], largest)
                        out[r] = winner
                T.copy(out, ids[top : top + block])

    return main
