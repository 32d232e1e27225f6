# mypy: ignore-errors
"""The Hopper kernel: one row at a time on every multiprocessor, three warpgroups with a role each.

Warpgroup 0 computes scores and weights of a tile of 64 keys and the left 256 dims of the sum, warpgroup 1 the right
256, warpgroup 2 gathers and dequantises the tiles ahead of them. Scores of the next tile are issued behind the sum of
this one, so that the tensor cores work while weights are computed.
"""

import functools

LOG2E = 1.4426950408889634
HEADS, DIM, TILE = 64, 512, 64
_HALF = DIM // 2


@functools.cache
def kernel(sms: int, frequencies: int, has_entries: bool, cast_out: bool, arch: str = "sm_90a"):
    """Compiled for the static sizes; call it with the tensors of `build`."""
    return compile_for_hopper(lambda: build(sms, frequencies, has_entries, cast_out), arch)


def compile_for_hopper(build_program, arch: str):
    """The program that `build_program` makes, compiled."""
    import tilelang
    from tvm.target import Target

    target = {"kind": "cuda", "arch": arch}
    with Target(target):
        program = build_program()
    # No fast math: it flushes subnormals, which the smallest scales of entries are. No fused multiply-add: which pairs
    # fuse could differ between the kernels of this op, and their bits must not.
    return tilelang.compile(program, target=target, compile_flags=["--fmad=false"])


def build(sms: int, frequencies: int, has_entries: bool, cast_out: bool):
    """The program over dynamic numbers of rows, records and blocks."""
    import tilelang.language as T

    from shoal_kernels.ops.sparse_attention.tilelang_source import FINISH, GATHER

    source = GATHER + FINISH + finish_source(8, frequencies, cast_out)
    rows, near_width, far_width = T.dynamic("rows, near_width, far_width")
    records, stored, units, sequences, blocks, positions_known = T.dynamic(
        "records, stored, units, sequences, blocks, positions_known"
    )
    bf16, f32, i32, u8 = "bfloat16", "float32", "int32", "uint8"
    begin, weigh = softmax(T)

    @T.prim_func
    def attend(
        query: T.Tensor((rows, HEADS, DIM), bf16),
        window: T.Tensor((records, DIM + DIM // 32), u8),
        window_index: T.Tensor((rows, near_width), i32),
        sink: T.Tensor((HEADS,), f32),
        positions: T.Tensor((rows,), "int64"),
        cos_sin: T.Tensor((positions_known, 2 * frequencies), f32),
        storage: T.Tensor((stored, units), u8),
        block_table: T.Tensor((sequences, blocks), i32),
        row_seq: T.Tensor((rows,), i32),
        topk: T.Tensor((rows, far_width), i32),
        out: T.Tensor((rows, HEADS, DIM), bf16),
        factor: T.float32,
        per_block: T.int32,
        offset: T.int32,
        stride: T.int32,
    ):
        with T.Kernel(sms, threads=384) as block:
            T.import_source(source)
            q_left = T.alloc_shared([HEADS, _HALF], bf16)
            q_right = T.alloc_shared([HEADS, _HALF], bf16)
            k_left = T.alloc_shared([2, TILE, _HALF], bf16)
            k_right = T.alloc_shared([2, TILE, _HALF], bf16)
            p_shared = T.alloc_shared([2, HEADS, TILE], bf16)
            shrink_shared = T.alloc_shared([2, HEADS], f32)
            total_shared = T.alloc_shared([2, HEADS], f32)
            row_tiles = T.alloc_shared([1], i32)
            tile_keys = T.alloc_shared([2], i32)

            acc_left = T.alloc_fragment([HEADS, _HALF], f32)
            acc_right = T.alloc_fragment([HEADS, _HALF], f32)
            scores = T.alloc_fragment([HEADS, TILE], f32)
            peak = T.alloc_fragment([HEADS], f32)
            before = T.alloc_fragment([HEADS], f32)
            shrink = T.alloc_fragment([HEADS], f32)
            total = T.alloc_fragment([HEADS], f32)
            part = T.alloc_fragment([HEADS], f32)

            q_ready = T.alloc_barrier(arrive_count=128)
            q_free = T.alloc_barrier(arrive_count=256)
            k_ready = T.alloc_barrier(arrive_count=[128, 128])
            k_free = T.alloc_barrier(arrive_count=[256, 256])
            p_ready = T.alloc_barrier(arrive_count=[128, 128])
            p_free = T.alloc_barrier(arrive_count=[128, 128])

            thread = T.get_thread_binding()

            if thread < 128:
                T.set_max_nreg(232, 1)
                step = T.alloc_var(i32, init=0)
                tiles = T.alloc_var(i32, init=0)
                for turn in T.serial(T.ceildiv(rows - block, sms)):
                    row = block + turn * sms
                    T.barrier_wait(q_ready, turn & 1)
                    tiles = row_tiles[0]
                    begin(sink, peak, total)
                    T.fill(acc_left, 0)
                    T.barrier_wait(k_ready[step & 1], (step >> 1) & 1)
                    T.wgmma_gemm(q_left, k_left[step & 1, :, :], scores, transpose_B=True, clear_accum=True)
                    T.wgmma_gemm(q_right, k_right[step & 1, :, :], scores, transpose_B=True)
                    T.wait_wgmma(0)
                    for t in T.serial(tiles):
                        if t == tiles - 1:
                            T.barrier_arrive(q_free)
                        weigh(scores, tile_keys[step & 1], factor, peak, before, shrink, total, part)
                        T.barrier_wait(p_free[step & 1], ((step >> 1) & 1) ^ 1)
                        T.copy(scores, p_shared[step & 1, :, :])
                        T.copy(shrink, shrink_shared[step & 1, :])
                        T.copy(total, total_shared[step & 1, :])
                        T.fence_proxy_async()
                        T.barrier_arrive(p_ready[step & 1])
                        for h, d in T.Parallel(HEADS, _HALF):
                            acc_left[h, d] *= shrink[h]
                        T.barrier_wait(p_ready[step & 1], (step >> 1) & 1)
                        T.wgmma_gemm(p_shared[step & 1, :, :], k_left[step & 1, :, :], acc_left)
                        if t < tiles - 1:
                            T.barrier_wait(k_ready[(step + 1) & 1], ((step + 1) >> 1) & 1)
                            T.wgmma_gemm(
                                q_left, k_left[(step + 1) & 1, :, :], scores, transpose_B=True, clear_accum=True
                            )
                            T.wgmma_gemm(q_right, k_right[(step + 1) & 1, :, :], scores, transpose_B=True)
                            T.wait_wgmma(2)
                            T.barrier_arrive(k_free[step & 1])
                            T.wait_wgmma(0)
                        else:
                            T.wait_wgmma(0)
                            T.barrier_arrive(k_free[step & 1])
                        step += 1
                    T.call_extern(
                        "handle",
                        "shoal_finish",
                        acc_left.data,
                        T.access_ptr(total_shared[(step - 1) & 1, 0], "r", HEADS),
                        T.access_ptr(cos_sin[positions[row], 0], "r", 2 * frequencies),
                        T.access_ptr(out[row, 0, 0], "w", HEADS * DIM),
                        0,
                    )
            elif thread < 256:
                T.set_max_nreg(184, 1)
                step_right = T.alloc_var(i32, init=0)
                tiles_right = T.alloc_var(i32, init=0)
                for turn in T.serial(T.ceildiv(rows - block, sms)):
                    row = block + turn * sms
                    T.barrier_wait(q_ready, turn & 1)
                    tiles_right = row_tiles[0]
                    T.barrier_arrive(q_free)
                    T.fill(acc_right, 0)
                    for t in T.serial(tiles_right):
                        T.barrier_wait(k_ready[step_right & 1], (step_right >> 1) & 1)
                        T.barrier_wait(p_ready[step_right & 1], (step_right >> 1) & 1)
                        for h, d in T.Parallel(HEADS, _HALF):
                            acc_right[h, d] *= shrink_shared[step_right & 1, h]
                        T.wgmma_gemm(p_shared[step_right & 1, :, :], k_right[step_right & 1, :, :], acc_right)
                        T.wait_wgmma(0)
                        T.barrier_arrive(k_free[step_right & 1])
                        if t < tiles_right - 1:
                            T.barrier_arrive(p_free[step_right & 1])
                        step_right += 1
                    T.call_extern(
                        "handle",
                        "shoal_finish",
                        acc_right.data,
                        T.access_ptr(total_shared[(step_right - 1) & 1, 0], "r", HEADS),
                        T.access_ptr(cos_sin[positions[row], 0], "r", 2 * frequencies),
                        T.access_ptr(out[row, 0, 0], "w", HEADS * DIM),
                        _HALF,
                    )
                    T.barrier_arrive(p_free[(step_right - 1) & 1])
            else:
                T.set_max_nreg(88, 0)
                step_gather = T.alloc_var(i32, init=0)
                near = T.alloc_var(i32, init=0)
                far = T.alloc_var(i32, init=0)
                near_tiles = T.alloc_var(i32, init=0)
                all_tiles = T.alloc_var(i32, init=0)
                raw = T.alloc_local([32], "uint32")
                gains = T.alloc_local([8], "uint32")
                places = T.alloc_local([2], "int64")
                for turn in T.serial(T.ceildiv(rows - block, sms)):
                    row = block + turn * sms
                    near = T.call_extern(
                        i32, "shoal_count", T.access_ptr(window_index[row, 0], "r", near_width), near_width
                    )
                    far = 0
                    if has_entries:
                        far = T.call_extern(i32, "shoal_count", T.access_ptr(topk[row, 0], "r", far_width), far_width)
                    near_tiles = T.ceildiv(near, TILE)
                    # A row with an empty list has one tile of no keys.
                    all_tiles = T.max(near_tiles + T.ceildiv(far, TILE), 1)
                    near_tiles = T.if_then_else(far == 0, all_tiles, near_tiles)
                    for t in T.serial(all_tiles):
                        if t < near_tiles:
                            T.call_extern(
                                "handle",
                                "shoal_window_places",
                                T.address_of(places[0]),
                                T.access_ptr(window_index[row, 0], "r", near_width),
                                t * TILE,
                                near,
                            )
                            T.call_extern(
                                "handle",
                                "shoal_load_window",
                                T.address_of(raw[0]),
                                T.address_of(gains[0]),
                                T.address_of(places[0]),
                                T.access_ptr(window[0, 0], "r", 528),
                                0,
                            )
                            T.barrier_wait(k_free[step_gather & 1], ((step_gather >> 1) & 1) ^ 1)
                            T.call_extern(
                                "handle",
                                "shoal_store_window",
                                T.address_of(raw[0]),
                                T.address_of(gains[0]),
                                T.address_of(places[0]),
                                T.access_ptr(k_left[step_gather & 1, 0, 0], "w", TILE * _HALF),
                                T.access_ptr(k_right[step_gather & 1, 0, 0], "w", TILE * _HALF),
                                T.access_ptr(window[0, 0], "r", 528),
                            )
                            if thread == 256:
                                tile_keys[step_gather & 1] = near - t * TILE
                        else:
                            T.call_extern(
                                "handle",
                                "shoal_entry_places",
                                T.address_of(places[0]),
                                T.access_ptr(topk[row, 0], "r", far_width),
                                T.access_ptr(block_table[row_seq[row], 0], "r", blocks),
                                (t - near_tiles) * TILE,
                                far,
                                per_block,
                                units,
                                offset,
                                stride,
                            )
                            T.call_extern(
                                "handle",
                                "shoal_load_entries",
                                T.address_of(raw[0]),
                                T.address_of(gains[0]),
                                T.address_of(places[0]),
                                T.access_ptr(storage[0, 0], "r", 288),
                            )
                            T.barrier_wait(k_free[step_gather & 1], ((step_gather >> 1) & 1) ^ 1)
                            T.call_extern(
                                "handle",
                                "shoal_store_entries",
                                T.address_of(raw[0]),
                                T.address_of(gains[0]),
                                T.address_of(places[0]),
                                T.access_ptr(k_left[step_gather & 1, 0, 0], "w", TILE * _HALF),
                                T.access_ptr(k_right[step_gather & 1, 0, 0], "w", TILE * _HALF),
                            )
                            if thread == 256:
                                tile_keys[step_gather & 1] = far - (t - near_tiles) * TILE
                        T.fence_proxy_async()
                        T.barrier_arrive(k_ready[step_gather & 1])
                        step_gather += 1
                        if t == 0:
                            T.barrier_wait(q_free, (turn & 1) ^ 1)
                            T.call_extern(
                                "handle",
                                "shoal_load_query",
                                T.access_ptr(query[row, 0, 0], "r", HEADS * DIM),
                                T.access_ptr(q_left[0, 0], "w", HEADS * _HALF),
                                T.access_ptr(q_right[0, 0], "w", HEADS * _HALF),
                            )
                            if thread == 256:
                                row_tiles[0] = all_tiles
                            T.fence_proxy_async()
                            T.barrier_arrive(q_ready)

    return attend


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


def finish_source(groups: int, frequencies: int, cast_out: bool) -> str:
    """The function `shoal_finish` for accumulators of 32 * groups dims."""
    cast = "true" if cast_out else "false"
    return (
        "__device__ __forceinline__ void shoal_finish(const float* acc, const float* total, const float* angles, "
        "void* out, int first) {\n"
        f"  shoal_finish_as<{groups}, {cast}, {frequencies}>(\n"
        "      acc, total, angles, reinterpret_cast<__nv_bfloat16*>(out), first);\n"
        "}\n"
    )
