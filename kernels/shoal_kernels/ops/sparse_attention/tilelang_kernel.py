# mypy: ignore-errors
"""The Hopper kernel: one row at a time on every multiprocessor, four warpgroups with a role each.

Warpgroup 0 computes scores and weights of a tile of 64 keys and the left 256 dims of the sum, warpgroup 1 the right
256; warpgroups 2 and 3 gather and dequantise the left and the right dims of the tiles ahead of them. Scores of the next
tile are issued behind the left sum of this one, and the right sum runs while they become weights.
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
from shoal_kernels.ops.sparse_attention.tilelang_source import FINISH, GATHER

_HALF, _PART = DIM // 2, DIM // 4


@functools.cache
def kernel(sms: int, frequencies: int, has_entries: bool, cast_out: bool, arch: str = "sm_90a"):
    """Compiled for the static sizes; call it with the tensors of `build`."""
    return compile_for(lambda: build(sms, frequencies, has_entries, cast_out), arch)


def build(sms: int, frequencies: int, has_entries: bool, cast_out: bool):
    """The program over dynamic numbers of rows, records and blocks."""
    import tilelang.language as T

    source = GATHER + FINISH + finish_source(frequencies, cast_out)
    rows, near_width, far_width = T.dynamic("rows, near_width, far_width")
    records, stored, units, sequences, blocks, positions_known = T.dynamic(
        "records, stored, units, sequences, blocks, positions_known"
    )
    bf16, f32, i32, u8 = "bfloat16", "float32", "int32", "uint8"
    (begin, weigh), finish = softmax(T), finishing(T, frequencies)
    score, produce_left = scoring(T), producing(T, sms, has_entries, True)
    hand_over, add = summing(T)
    produce_right = producing(T, sms, has_entries, False)

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
        with T.Kernel(sms, threads=512) as block:
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

            # Two fragments each: an instruction with 128 accumulators takes more registers than 512 threads can have.
            acc_0 = T.alloc_fragment([HEADS, _PART], f32)
            acc_1 = T.alloc_fragment([HEADS, _PART], f32)
            acc_2 = T.alloc_fragment([HEADS, _PART], f32)
            acc_3 = T.alloc_fragment([HEADS, _PART], f32)
            scores = T.alloc_fragment([HEADS, TILE], f32)
            weights = T.alloc_fragment([HEADS, TILE], bf16)
            peak = T.alloc_fragment([HEADS], f32)
            before = T.alloc_fragment([HEADS], f32)
            shrink = T.alloc_fragment([HEADS], f32)
            total = T.alloc_fragment([HEADS], f32)
            part = T.alloc_fragment([HEADS], f32)

            q_ready = T.alloc_barrier(arrive_count=256)
            q_free = T.alloc_barrier(arrive_count=256)
            left_ready = T.alloc_barrier(arrive_count=[128, 128])
            left_free = T.alloc_barrier(arrive_count=[128, 128])
            right_ready = T.alloc_barrier(arrive_count=[128, 128])
            right_free = T.alloc_barrier(arrive_count=[128, 128])
            p_ready = T.alloc_barrier(arrive_count=[128, 128])
            p_free = T.alloc_barrier(arrive_count=[128, 128])
            scored = T.alloc_barrier(arrive_count=128)

            thread = T.get_thread_binding()
            geometry = per_block, units, offset, stride
            turns = T.ceildiv(rows - block, sms)
            tiles_shared = q_left, q_right, k_left, k_right, left_ready, right_ready
            lists = window_index, storage, block_table, row_seq, topk, near_width, far_width, geometry
            place = row_tiles, tile_keys, q_ready, q_free

            if thread < 128:
                T.set_max_nreg(208, 1)
                step = T.alloc_var(i32, init=0)
                tiles = T.alloc_var(i32, init=0)
                if turns > 0:
                    T.barrier_wait(q_ready, 0)
                    tiles = row_tiles[0]
                    score(scores, 0, *tiles_shared)
                    T.wait_wgmma(0)
                for turn in T.serial(turns):
                    row = block + turn * sms
                    begin(sink, peak, total)
                    T.fill(acc_0, 0)
                    T.fill(acc_1, 0)
                    for _ in T.serial(tiles - 1):
                        weigh(scores, tile_keys[step & 1], factor, peak, before, shrink, total, part)
                        T.copy(scores, weights)
                        hand_over(weights, shrink, total, step, p_shared, shrink_shared, total_shared, p_ready, p_free)
                        add(weights, shrink, step, k_left, acc_0, acc_1)
                        score(scores, step + 1, *tiles_shared)
                        T.wait_wgmma(2)
                        T.barrier_arrive(left_free[step & 1])
                        T.wait_wgmma(0)
                        T.barrier_arrive(scored)
                        step += 1
                    T.barrier_arrive(q_free)
                    weigh(scores, tile_keys[step & 1], factor, peak, before, shrink, total, part)
                    T.copy(scores, weights)
                    hand_over(weights, shrink, total, step, p_shared, shrink_shared, total_shared, p_ready, p_free)
                    add(weights, shrink, step, k_left, acc_0, acc_1)
                    T.wait_wgmma(0)
                    T.barrier_arrive(left_free[step & 1])
                    step += 1
                    totals = T.access_ptr(total_shared[(step - 1) & 1, 0], "r", HEADS)
                    if turn < turns - 1:
                        T.barrier_wait(q_ready, (turn + 1) & 1)
                        tiles = row_tiles[0]
                        # These run while this row is finished.
                        score(scores, step, *tiles_shared)
                    finish(acc_0.data, totals, cos_sin, positions, out, row, 0)
                    finish(acc_1.data, totals, cos_sin, positions, out, row, _PART)
                    T.wait_wgmma(0)
            elif thread < 256:
                T.set_max_nreg(160, 1)
                step_right = T.alloc_var(i32, init=0)
                tiles_right = T.alloc_var(i32, init=0)
                waits = T.alloc_var(i32, init=0)
                for turn in T.serial(turns):
                    row = block + turn * sms
                    T.barrier_wait(q_ready, turn & 1)
                    tiles_right = row_tiles[0]
                    T.barrier_arrive(q_free)
                    T.fill(acc_2, 0)
                    T.fill(acc_3, 0)
                    for t in T.serial(tiles_right):
                        T.barrier_wait(right_ready[step_right & 1], (step_right >> 1) & 1)
                        T.barrier_wait(p_ready[step_right & 1], (step_right >> 1) & 1)
                        for h, d in T.Parallel(HEADS, _PART):
                            acc_2[h, d] *= shrink_shared[step_right & 1, h]
                            acc_3[h, d] *= shrink_shared[step_right & 1, h]
                        # Behind the next scores: the tensor cores sum here while warpgroup 0 weighs those.
                        if t < tiles_right - 1:
                            T.barrier_wait(scored, waits & 1)
                            waits += 1
                        T.wgmma_gemm(p_shared[step_right & 1, :, :], k_right[step_right & 1, :, :_PART], acc_2)
                        T.wgmma_gemm(p_shared[step_right & 1, :, :], k_right[step_right & 1, :, _PART:], acc_3)
                        T.wait_wgmma(0)
                        T.barrier_arrive(right_free[step_right & 1])
                        if t < tiles_right - 1:
                            T.barrier_arrive(p_free[step_right & 1])
                        step_right += 1
                    totals = T.access_ptr(total_shared[(step_right - 1) & 1, 0], "r", HEADS)
                    finish(acc_2.data, totals, cos_sin, positions, out, row, 2 * _PART)
                    finish(acc_3.data, totals, cos_sin, positions, out, row, 3 * _PART)
                    T.barrier_arrive(p_free[(step_right - 1) & 1])
            elif thread < 384:
                T.set_max_nreg(72, 0)
                produce_left(block, turns, query, window, *lists, q_left, k_left, *place, left_ready, left_free)
            else:
                T.set_max_nreg(72, 0)
                produce_right(block, turns, query, window, *lists, q_right, k_right, *place, right_ready, right_free)

    return attend


def scoring(T):
    """Macro: raw scores of tile number `at`, issued as soon as its halves are there."""

    @T.macro
    def score(scores, at, q_left, q_right, k_left, k_right, left_ready, right_ready):
        T.barrier_wait(left_ready[at & 1], (at >> 1) & 1)
        T.wgmma_gemm(q_left, k_left[at & 1, :, :], scores, transpose_B=True, clear_accum=True)
        T.barrier_wait(right_ready[at & 1], (at >> 1) & 1)
        T.wgmma_gemm(q_right, k_right[at & 1, :, :], scores, transpose_B=True)

    return score


def summing(T):
    """Macros of warpgroup 0 for a tile: hand the weights over to warpgroup 1, add the left dims of the sum."""

    @T.macro
    def hand_over(weights, shrink, total, step, p_shared, shrink_shared, total_shared, p_ready, p_free):
        T.barrier_wait(p_free[step & 1], ((step >> 1) & 1) ^ 1)
        T.copy(weights, p_shared[step & 1, :, :])
        T.copy(shrink, shrink_shared[step & 1, :])
        T.copy(total, total_shared[step & 1, :])
        T.fence_proxy_async()
        T.barrier_arrive(p_ready[step & 1])

    @T.macro
    def add(weights, shrink, step, k_left, acc_0, acc_1):
        for h, d in T.Parallel(HEADS, _PART):
            acc_0[h, d] *= shrink[h]
            acc_1[h, d] *= shrink[h]
        T.wgmma_gemm(weights, k_left[step & 1, :, :_PART], acc_0)
        T.wgmma_gemm(weights, k_left[step & 1, :, _PART:], acc_1)

    return hand_over, add


def producing(T, sms: int, has_entries: bool, is_left: bool):
    """Macro: all a warpgroup does that gathers the left or the right dims of keys and queries."""
    count, find, load, store, load_query, prefetch = gathering(T, quarters=2)
    part = 0 if is_left else 2

    @T.macro
    def produce(
        block,
        turns,
        query,
        window,
        window_index,
        storage,
        block_table,
        row_seq,
        topk,
        near_width,
        far_width,
        geometry,
        q_tile,
        k_tile,
        row_tiles,
        tile_keys,
        q_ready,
        q_free,
        ready,
        free,
    ):
        thread = T.get_thread_binding()
        step = T.alloc_var("int32", init=0)
        near = T.alloc_var("int32", init=0)
        far = T.alloc_var("int32", init=0)
        tiles = T.alloc_var("int32", init=0)
        raw = T.alloc_local([16], "uint32")
        gains = T.alloc_local([4], "uint32")
        places = T.alloc_local([2], "int64")
        ahead = T.alloc_local([2], "int64")
        for turn in T.serial(turns):
            row = block + turn * sms
            sequence = row_seq[row] if has_entries else 0
            near = count(window_index, row, near_width)
            far = count(topk, row, far_width) if has_entries else 0
            # A row with an empty list has one tile of no keys.
            tiles = T.max(T.call_extern("int32", "shoal_tiles", near, far), 1)
            find(places, window_index, topk, block_table, row, sequence, 0, near, far, geometry)
            if is_left and turn < turns - 1:
                prefetch(query, window_index, topk, row + sms, near_width, far_width)
            for t in T.serial(tiles):
                load(raw, gains, places, window, storage, t, near, part)
                find(ahead, window_index, topk, block_table, row, sequence, t + 1, near, far, geometry)
                T.barrier_wait(free[step & 1], ((step >> 1) & 1) ^ 1)
                store(raw, gains, places, window, t, near, k_tile, k_tile, step & 1, part)
                if is_left and thread % 128 == 0:
                    tile_keys[step & 1] = T.call_extern("int32", "shoal_keys", t, near, far)
                T.fence_proxy_async()
                T.barrier_arrive(ready[step & 1])
                step += 1
                places[0] = ahead[0]
                places[1] = ahead[1]
                if t == 0:
                    T.barrier_wait(q_free, (turn & 1) ^ 1)
                    load_query(query, row, q_tile, part)
                    if is_left and thread % 128 == 0:
                        row_tiles[0] = tiles
                    T.fence_proxy_async()
                    T.barrier_arrive(q_ready)

    return produce
