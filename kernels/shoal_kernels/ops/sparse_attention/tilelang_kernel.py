# mypy: ignore-errors
"""The Hopper kernel: one row at a time on every multiprocessor, three warpgroups with a role each.

Warpgroup 0 computes scores and weights of a tile of 64 keys and the left 256 dims of the sum, warpgroup 1 the right
256, warpgroup 2 gathers and dequantises the tiles ahead of them. Scores of the next tile are issued behind the sum of
this one, so that the tensor cores work while weights are computed.
"""

import functools

from shoal_kernels.ops.sparse_attention.tilelang_parts import (
    DIM,
    HEADS,
    TILE,
    compile_for,
    finish_source,
    finishing,
    gathering,
    softmax,
)
from shoal_kernels.ops.sparse_attention.tilelang_source import FINISH, GATHER, INTRINSICS

_HALF = DIM // 2


@functools.cache
def kernel(sms: int, frequencies: int, has_entries: bool, cast_out: bool, arch: str = "sm_90a"):
    """Compiled for the static sizes; call it with the tensors of `build`."""
    return compile_for(lambda: build(sms, frequencies, has_entries, cast_out), arch)


def build(sms: int, frequencies: int, has_entries: bool, cast_out: bool):
    """The program over dynamic numbers of rows, records and blocks."""
    import tilelang.language as T

    source = INTRINSICS + GATHER + FINISH + finish_source(frequencies, cast_out)
    rows, near_width, far_width = T.dynamic("rows, near_width, far_width")
    records, stored, units, sequences, blocks, positions_known = T.dynamic(
        "records, stored, units, sequences, blocks, positions_known"
    )
    bf16, f32, i32, u8 = "bfloat16", "float32", "int32", "uint8"
    (begin, weigh), finish = softmax(T), finishing(T, frequencies)
    count, find, ask, load, store, load_query, prefetch = gathering(T, quarters=4)

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
            geometry = per_block, units, offset, stride
            turns = T.ceildiv(rows - block, sms)

            if thread < 128:
                T.set_max_nreg(216, 1)
                step = T.alloc_var(i32, init=0)
                tiles = T.alloc_var(i32, init=0)
                for turn in T.serial(turns):
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
                    totals = T.access_ptr(total_shared[(step - 1) & 1, 0], "r", HEADS)
                    finish(acc_left.data, totals, cos_sin, positions, out, row, 0)
            elif thread < 256:
                T.set_max_nreg(168, 1)
                step_right = T.alloc_var(i32, init=0)
                tiles_right = T.alloc_var(i32, init=0)
                for turn in T.serial(turns):
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
                    totals = T.access_ptr(total_shared[(step_right - 1) & 1, 0], "r", HEADS)
                    finish(acc_right.data, totals, cos_sin, positions, out, row, _HALF)
                    T.barrier_arrive(p_free[(step_right - 1) & 1])
            else:
                T.set_max_nreg(120, 0)
                step_gather = T.alloc_var(i32, init=0)
                near = T.alloc_var(i32, init=0)
                far = T.alloc_var(i32, init=0)
                tiles_gather = T.alloc_var(i32, init=0)
                raw = T.alloc_local([32], "uint32")
                gains = T.alloc_local([8], "uint32")
                places = T.alloc_local([2], "int32")
                ahead = T.alloc_local([2], "int32")
                beyond = T.alloc_local([2], "int32")
                for turn in T.serial(turns):
                    row = block + turn * sms
                    sequence = row_seq[row] if has_entries else 0
                    near = count(window_index, row, near_width)
                    far = count(topk, row, far_width) if has_entries else 0
                    # A row with an empty list has one tile of no keys.
                    tiles_gather = T.max(T.call_extern(i32, "shoal_tiles", near, far), 1)
                    find(places, window_index, topk, block_table, row, sequence, 0, near, far, geometry)
                    find(ahead, window_index, topk, block_table, row, sequence, 1, near, far, geometry)
                    if turn < turns - 1:
                        prefetch(query, window_index, topk, row + sms, near_width, far_width)
                    for t in T.serial(tiles_gather):
                        load(raw, gains, places, window, storage, t, near)
                        # Places are found two tiles ahead and bytes asked for one: neither latency is waited out.
                        ask(ahead, window, storage, t + 1, near)
                        find(beyond, window_index, topk, block_table, row, sequence, t + 2, near, far, geometry)
                        T.barrier_wait(k_free[step_gather & 1], ((step_gather >> 1) & 1) ^ 1)
                        store(raw, gains, places, window, t, near, k_left, k_right, step_gather & 1)
                        if thread == 256:
                            tile_keys[step_gather & 1] = T.call_extern(i32, "shoal_keys", t, near, far)
                        T.fence_proxy_async()
                        T.barrier_arrive(k_ready[step_gather & 1])
                        step_gather += 1
                        places[0] = ahead[0]
                        places[1] = ahead[1]
                        ahead[0] = beyond[0]
                        ahead[1] = beyond[1]
                        if t == 0:
                            T.barrier_wait(q_free, (turn & 1) ^ 1)
                            load_query(query, row, q_left)
                            load_query(query, row, q_right, 2)
                            if thread == 256:
                                row_tiles[0] = tiles_gather
                            T.fence_proxy_async()
                            T.barrier_arrive(q_ready)

    return attend
