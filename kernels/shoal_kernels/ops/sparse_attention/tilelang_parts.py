# mypy: ignore-errors
"""Sizes of the tensor-core kernels, and what the TileLang one is made of: macros for the softmax and gathering keys."""

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


def gathering(T):
    """Macros for the 128 threads that gather.

    count       number of keys of a row in a list
    find        where the keys of tile t lie; beyond the last tile nowhere
    load        their bytes into registers
    store       dequantised into stage `stage` of two tiles of [64, 256]
    load_query  256 dims of the queries of a row, from quarter `part` on, into a tile of [64, 256]
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
    def load(raw, gains, places, window, storage, t, near):
        T.call_extern(
            "handle",
            "shoal_load",
            T.address_of(raw[0]),
            T.address_of(gains[0]),
            T.address_of(places[0]),
            T.access_ptr(window[0, 0], "r", 1),
            T.access_ptr(storage[0, 0], "r", 1),
            t,
            near,
        )

    @T.macro
    def store(raw, gains, places, window, t, near, left, right, stage):
        T.call_extern(
            "handle",
            "shoal_store",
            T.address_of(raw[0]),
            T.address_of(gains[0]),
            T.address_of(places[0]),
            T.access_ptr(window[0, 0], "r", 1),
            t,
            near,
            T.access_ptr(left[stage, 0, 0], "w", TILE * 64),
            T.access_ptr(right[stage, 0, 0], "w", TILE * 64),
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

    return count, find, load, store, load_query


def softmax(T):
    """Macros of the online softmax over powers of two: `begin` at the sink, `weigh` one tile of raw scores."""

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
