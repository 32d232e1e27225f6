# mypy: ignore-errors
"""Indexer scores over FP4 keys on Ascend. Lowered, never run here.

The Cube multiplies e2m1 codes with a ue8m0 scale per 32 as they are stored: the query's of `cast.ascend.cast_q4ue`, the
keys' of a page, where codes and scales lie apart. The sum over heads is sequential, in ascending order.
"""


def indexer_scores(*, heads: int, d: int, page: int):
    """Y[r, t] = bf16(sum over h of weights[r, h] * relu(q[r, h] . key t)), for t below n_vis[r].

    Q, QS    e2m1 [rows, heads, d], ue8m0 pairs [rows, heads, d / 64]
    K, KS    e2m1 [pages, page, d], ue8m0 pairs [pages, page, d / 64], each with its own distance between pages
    blocks   int32 [sequences, most]: pages of a sequence; row_seq, n_vis int32 [rows]
    Y        bfloat16 [rows, longest]. What lies at and beyond n_vis is the selection's to skip: in the last page it is
             the score of whatever the page holds, after that nothing is written
    """
    import tilelang.ascend.language as T

    from shoal_kernels import ascend_lib as lib

    own = page // 2
    rows, pages, sequences = T.dynamic("rows"), T.dynamic("pages"), T.dynamic("sequences")
    most, longest = T.dynamic("most"), T.dynamic("longest")
    key_stride, scale_stride = T.dynamic("key_stride"), T.dynamic("scale_stride")

    @T.prim_func
    def main(
        Q: T.Tensor((rows, heads, d), "float4_e2m1fn"),
        QS: T.Tensor((rows, heads, d // 64), "uint16"),
        weights: T.Tensor((rows, heads), "float32"),
        K: T.StridedTensor((pages, page, d), (key_stride, d, 1), "float4_e2m1fn"),
        KS: T.StridedTensor((pages, page, d // 64), (scale_stride, d // 64, 1), "uint16"),
        blocks: T.Tensor((sequences, most), "int32"),
        row_seq: T.Tensor((rows,), "int32"),
        n_vis: T.Tensor((rows,), "int32"),
        Y: T.Tensor((rows, longest), "bfloat16"),
    ):
        with T.Kernel(lib.CUBE_CORES) as core:
            q = T.alloc_l1((heads, d), "float4_e2m1fn")
            qs = T.alloc_l1((heads, d // 64), "uint16")
            keys = T.alloc_l1((page, d), "float4_e2m1fn")
            ks = T.alloc_l1((page, d // 64), "uint16")
            dots = T.alloc_l0c((heads, page), "float32")
            part = T.alloc_shared((heads, own), "float32")
            w = T.alloc_shared((heads,), "float32")
            out = T.alloc_shared((1, own), "bfloat16")
            for turn in T.serial(T.ceildiv(rows - core, lib.CUBE_CORES)):
                row = turn * lib.CUBE_CORES + core
                sequence = row_seq[row]
                visible = n_vis[row]
                T.copy(Q[row, :, :], q)
                T.copy(QS[row, :, :], qs)
                T.copy(weights[row, :], w)
                for block in T.Pipelined(T.ceildiv(visible, page), num_stages=2):
                    at = blocks[sequence, block]
                    T.copy(K[at, :, :], keys)
                    T.copy(KS[at, :, :], ks)
                    T.gemm_blockscaled(q, keys, dots, qs, ks, transpose_B=True, clear_accum=True)
                    # Each of the two vector cores takes half of the keys.
                    T.dual_copy(dots, part)
                    with T.SimtVF(threads=own):
                        total = T.alloc_var("float32")
                        for t in T.Parallel(own):
                            total = lib.f32(0.0)
                            for h in T.serial(heads):
                                total = total + w[h] * T.max(part[h, t], lib.f32(0.0))
                            out[0, t] = lib.bf16(total)
                    T.dual_copy(out, Y[row : row + 1, block * page : (block + 1) * page])

    return main
