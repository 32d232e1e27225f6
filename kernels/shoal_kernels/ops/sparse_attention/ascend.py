# mypy: ignore-errors
"""Attention over the records of the window and of the selected entries on Ascend. Lowered, never run here.

A row at a time: vector cores fetch records, decode them to bfloat16 (exact: e4m3 times a power of two, e2m1 times an
e4m3 scale) and lay them out for the Cube as keys and, transposed, as values; the Cube multiplies; the softmax runs over
blocks of 64 keys with a running maximum that starts at the sink. Blocks follow the key list's own order, so a row's
bits depend on its list only. The weights of a block are rounded to bfloat16 for the second product.
"""

_BLOCK, _CHUNK, _THREADS = 64, 16, 256


def sparse_attention(*, heads: int, d: int, window: int, top_k: int, rope: int, page: int):
    """Y = inverse RoPE(softmax with sink over the listed keys): see the contract; a row with an empty list gives zeros.

    Q             bfloat16 [rows, heads, d]
    window_rows   uint8 [places, d + d / 32]; window_index int32 [rows, window]
    entries       uint8 [pages, page, d / 2 + d / 16] with its own distance between pages
    blocks        int32 [sequences, most]; row_seq int32 [rows]; top int32 [rows, top_k]
    sink          float32 [heads]; positions int64 [rows]; CS float32 [length, rope]; scale
    Y             bfloat16 [rows, heads, d]
    """
    import tilelang.ascend.language as T

    from shoal_kernels import ascend_lib as lib

    own, keys_own, pairs, kept = heads // 2, _BLOCK // 2, rope // 2, d - rope
    window_blocks, all_blocks = window // _BLOCK, (window + top_k) // _BLOCK
    window_bytes, entry_bytes = d + d // 32, d // 2 + d // 16
    if window % _BLOCK or top_k % _BLOCK or d % 64:
        raise ValueError(
            f"this kernel needs lists in blocks of {_BLOCK} and d in steps of 64, got {window}, {top_k}, {d}"
        )
    rows, places, pages, sequences = (T.dynamic(name) for name in ("rows", "places", "pages", "sequences"))
    most, length, page_bytes = (T.dynamic(name) for name in ("most", "length", "page_bytes"))

    @T.prim_func
    def main(
        Q: T.Tensor((rows, heads, d), "bfloat16"),
        window_rows: T.Tensor((places, window_bytes), "uint8"),
        window_index: T.Tensor((rows, window), "int32"),
        entries: T.StridedTensor((pages, page, entry_bytes), (page_bytes, entry_bytes, 1), "uint8"),
        blocks: T.Tensor((sequences, most), "int32"),
        row_seq: T.Tensor((rows,), "int32"),
        top: T.Tensor((rows, top_k), "int32"),
        sink: T.Tensor((heads,), "float32"),
        positions: T.Tensor((rows,), "int64"),
        CS: T.Tensor((length, rope), "float32"),
        Y: T.Tensor((rows, heads, d), "bfloat16"),
        scale: T.float32,
    ):
        with T.MixedKernel(lib.CUBE_CORES) as (core, sid):
            q = T.alloc_l1((heads, d), "bfloat16")
            keys = T.alloc_l1((_BLOCK, d), "bfloat16")
            values = T.alloc_l1((d, _BLOCK), "bfloat16")
            shares = T.alloc_l1((heads, _BLOCK), "bfloat16")
            dots = T.alloc_l0c((heads, _BLOCK), "float32")
            product = T.alloc_l0c((heads, d), "float32")
            records = T.alloc_shared((_CHUNK, (window_bytes + 31) // 32 * 32), "uint8")
            ids = T.alloc_shared((_BLOCK,), "int32")
            by_key = T.alloc_shared((_CHUNK, d), "bfloat16")
            by_value = T.alloc_shared((d, _CHUNK), "bfloat16")
            score = T.alloc_shared((own, _BLOCK), "float32")
            share = T.alloc_shared((own, _BLOCK), "bfloat16")
            total = T.alloc_shared((own, d), "float32")
            part = T.alloc_shared((own, d), "float32")
            out = T.view(part, (2 * own, d), "bfloat16")
            bound = T.alloc_shared((own,), "float32")
            weight = T.alloc_shared((own,), "float32")
            factor = T.alloc_shared((own,), "float32")
            angle = T.alloc_shared((1, rope), "float32")
            for turn in T.serial(T.ceildiv(rows - core, lib.CUBE_CORES)):
                row = turn * lib.CUBE_CORES + core
                sequence = row_seq[row]
                position = positions[row]
                T.copy(Q[row, :, :], q)
                T.dual_copy(sink, bound)
                T.copy(CS[position : position + 1, :], angle)
                with T.SimtVF(threads=_THREADS):
                    for h in T.Parallel(own):
                        weight[h] = lib.f32(1.0)
                    for h, c in T.Parallel(own, d):
                        total[h, c] = lib.f32(0.0)
                for block in T.serial(all_blocks):
                    if block < window_blocks:
                        T.copy(window_index[row, block * _BLOCK : (block + 1) * _BLOCK], ids)
                    else:
                        T.copy(top[row, (block - window_blocks) * _BLOCK : (block - window_blocks + 1) * _BLOCK], ids)
                    for chunk in T.serial(keys_own // _CHUNK):
                        begin = sid * keys_own + chunk * _CHUNK
                        for i in T.serial(_CHUNK):
                            key = ids[begin + i]
                            if key >= 0:
                                if block < window_blocks:
                                    T.copy(window_rows[key, :], records[i, 0:window_bytes])
                                else:
                                    at = blocks[sequence, key // page]
                                    T.copy(entries[at, key % page, :], records[i, 0:entry_bytes])
                        with T.SimtVF(threads=_THREADS):
                            for i, c in T.Parallel(_CHUNK, d):
                                eight = lib.e4m3(lib.integer(records[i, c])) * lib.ue8m0(
                                    lib.integer(records[i, d + c // 32])
                                )
                                four = lib.e2m1(lib.nibble(records[i, c // 2], c)) * lib.e4m3(
                                    lib.integer(records[i, d // 2 + c // 16])
                                )
                                value = T.if_then_else(block < window_blocks, eight, four)
                                by_key[i, c] = lib.bf16(T.if_then_else(ids[begin + i] >= 0, value, lib.f32(0.0)))
                            for c, i in T.Parallel(d, _CHUNK):
                                by_value[c, i] = by_key[i, c]
                        T.copy(by_key, keys[begin : begin + _CHUNK, :])
                        T.copy(by_value, values[:, begin : begin + _CHUNK])
                    T.gemm(q, keys, dots, transpose_B=True, clear_accum=True)
                    T.dual_copy(dots, score)
                    with T.SimtVF(threads=_THREADS):
                        s = T.alloc_fragment((own, _BLOCK), "float32")
                        largest = T.alloc_fragment((own,), "float32")
                        added = T.alloc_fragment((own,), "float32")
                        for h, t in T.Parallel(own, _BLOCK):
                            s[h, t] = T.if_then_else(ids[t] >= 0, score[h, t] * scale, -T.infinity("float32"))
                        T.reduce_max(s, largest, dim=1)
                        for h in T.Parallel(own):
                            largest[h] = T.max(largest[h], bound[h])
                        for h, t in T.Parallel(own, _BLOCK):
                            s[h, t] = T.exp(s[h, t] - largest[h])
                        T.reduce_sum(s, added, dim=1)
                        for h, t in T.Parallel(own, _BLOCK):
                            share[h, t] = lib.bf16(s[h, t])
                        for h in T.Parallel(own):
                            factor[h] = T.exp(bound[h] - largest[h])
                            weight[h] = weight[h] * T.exp(bound[h] - largest[h]) + added[h]
                        for h in T.Parallel(own):
                            bound[h] = largest[h]
                    T.dual_copy(share, shares)
                    T.gemm(shares, values, product, transpose_B=True, clear_accum=True)
                    T.dual_copy(product, part)
                    with T.SimtVF(threads=_THREADS):
                        for h, c in T.Parallel(own, d):
                            total[h, c] = total[h, c] * factor[h] + part[h, c]
                with T.SimtVF(threads=_THREADS):
                    for h, c in T.Parallel(own, d):
                        total[h, c] = lib.wide(lib.bf16(total[h, c] / weight[h]))
                    for h, c in T.Parallel(own, kept):
                        out[h, c] = lib.bf16(total[h, c])
                    for h, i in T.Parallel(own, pairs):
                        even, odd = total[h, kept + 2 * i], total[h, kept + 2 * i + 1]
                        out[h, kept + 2 * i] = lib.bf16(even * angle[0, i] + odd * angle[0, pairs + i])
                        out[h, kept + 2 * i + 1] = lib.bf16(odd * angle[0, i] - even * angle[0, pairs + i])
                T.dual_copy(out[0:own, :], Y[row, :, :])

    return main
