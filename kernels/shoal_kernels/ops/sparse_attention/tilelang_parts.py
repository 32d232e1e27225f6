# mypy: ignore-errors
"""What the TileLang kernels of this op share: sizes, compiling, and macros for the softmax and for gathering keys."""

LOG2E = 1.4426950408889634
HEADS, DIM, TILE = 64, 512, 64


def compile_for(build_program, arch: str):
    """The program that `build_program` makes, compiled."""
    import tilelang
    from tvm.target import Target

    target = {"kind": "cuda", "arch": arch}
    with Target(target):
        program = build_program()
    # No fast math: it flushes subnormals, which the smallest scales of entries are. No fused multiply-add: which pairs
    # fuse could differ between the kernels of this op, and their bits must not.
    return tilelang.compile(program, target=target, compile_flags=["--fmad=false"])


def gathering(T, quarters: int):
    """Macros for the 128 threads that gather, of `quarters` quarters of the dims of every key.

    count       number of keys of a row in a list
    find        where the keys of tile t lie; beyond the last tile nowhere
    ask         for their bytes in the L2 cache
    load        their bytes into registers
    store       dequantised into stage `stage` of two tiles of [64, 256]
    load_query  256 dims of the queries of a row, from quarter `part` on, into a tile of [64, 256]
    prefetch    what these read of a later row, into the L2 cache
    """

    @T.macro
    def count(index, row, width):
        return T.call_extern("int32", "shoal_count", T.access_ptr(index[row, 0], "r", width), width)

    @T.macro
    def find(places, window_index, topk, block_table, row, sequence, t, near, far, geometry):
        T.call_extern(
            "handle",
            "shoal_places",
            T.address_of(places[0]),
            T.access_ptr(window_index[row, 0], "r", 1),
            T.access_ptr(topk[row, 0], "r", 1),
            T.access_ptr(block_table[sequence, 0], "r", 1),
            t,
            near,
            far,
            *geometry,
        )

    @T.macro
    def load(raw, gains, places, window, storage, t, near, part=0):
        T.call_extern(
            "handle",
            f"shoal_load<{quarters}>",
            T.address_of(raw[0]),
            T.address_of(gains[0]),
            T.address_of(places[0]),
            T.access_ptr(window[0, 0], "r", 1),
            T.access_ptr(storage[0, 0], "r", 1),
            part,
            t,
            near,
        )

    @T.macro
    def store(raw, gains, places, window, t, near, left, right, stage, part=0):
        T.call_extern(
            "handle",
            f"shoal_store<{quarters}>",
            T.address_of(raw[0]),
            T.address_of(gains[0]),
            T.address_of(places[0]),
            T.access_ptr(window[0, 0], "r", 1),
            part,
            t,
            near,
            T.access_ptr(left[stage, 0, 0], "w", TILE * 64),
            T.access_ptr(right[stage, 0, 0], "w", TILE * 64),
        )

    @T.macro
    def ask(places, window, storage, t, near):
        T.call_extern(
            "handle",
            "shoal_ask",
            T.address_of(places[0]),
            T.access_ptr(window[0, 0], "r", 1),
            T.access_ptr(storage[0, 0], "r", 1),
            t,
            near,
        )

    @T.macro
    def load_query(query, row, tile, part=0):
        T.call_extern(
            "handle",
            "shoal_load_query",
            T.access_ptr(query[row, 0, 0], "r", HEADS * DIM),
            T.access_ptr(tile[0, 0], "w", HEADS * DIM // 2),
            part,
        )

    @T.macro
    def prefetch(query, window_index, topk, row, near_width, far_width):
        T.call_extern(
            "handle",
            "shoal_prefetch",
            T.access_ptr(query[row, 0, 0], "r", HEADS * DIM),
            T.access_ptr(window_index[row, 0], "r", 1),
            T.access_ptr(topk[row, 0], "r", 1),
            near_width,
            far_width,
        )

    return count, find, ask, load, store, load_query, prefetch


def softmax(T):
    """Macros of the online softmax over powers of two: `begin` at the sink, `weigh` one tile of raw scores.

    Every kernel of this op uses these, on fragments of one layout: that makes their bits equal.
    """

    @T.macro
    def begin(sink, peak, total):
        for h in T.Parallel(HEADS):
            peak[h] = T.max(sink[h] * LOG2E, -1e30)
            total[h] = _exp2(T, sink[h] * LOG2E - peak[h])

    @T.macro
    def weigh(scores, keys, factor, peak, before, shrink, total, part):
        for h, k in T.Parallel(HEADS, TILE):
            scores[h, k] = T.if_then_else(k < keys, scores[h, k] * factor, -T.infinity("float32"))
        T.copy(peak, before)
        T.reduce_max(scores, peak, dim=1, clear=False)
        for h in T.Parallel(HEADS):
            shrink[h] = _exp2(T, before[h] - peak[h])
        for h, k in T.Parallel(HEADS, TILE):
            scores[h, k] = _exp2(T, scores[h, k] - peak[h])
        T.reduce_sum(scores, part, dim=1)
        for h in T.Parallel(HEADS):
            total[h] = total[h] * shrink[h] + part[h]

    return begin, weigh


def _exp2(T, x):
    return T.call_extern("float32", "shoal_exp2", x)


def finishing(T, frequencies: int):
    """Macro: o from the accumulators of 256 dims, the first of which is `first`, and the sums of weights."""

    @T.macro
    def finish(acc, totals, cos_sin, positions, out, row, first):
        T.call_extern(
            "handle",
            "shoal_finish",
            acc,
            totals,
            T.access_ptr(cos_sin[positions[row], 0], "r", 2 * frequencies),
            T.access_ptr(out[row, 0, 0], "w", HEADS * DIM),
            first,
        )

    return finish


def finish_source(frequencies: int, cast_out: bool) -> str:
    """The function `shoal_finish`."""
    cast = "true" if cast_out else "false"
    return (
        "__device__ __forceinline__ void shoal_finish(const void* acc, const void* total, const float* angles, "
        "void* out, int first) {\n"
        f"  shoal_finish_as<{cast}, {frequencies}>(\n"
        "      reinterpret_cast<const float*>(acc), reinterpret_cast<const float*>(total), angles,\n"
        "      reinterpret_cast<__nv_bfloat16*>(out), first);\n"
        "}\n"
    )
