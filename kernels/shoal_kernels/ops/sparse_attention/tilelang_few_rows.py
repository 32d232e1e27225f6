# mypy: ignore-errors
"""Two Hopper kernels for steps of fewer rows than multiprocessors, with the bits of the one for many.

`scores` multiplies queries and keys of (row, tile) pairs dealt out over all multiprocessors: the raw scores of a tile
do not depend on other tiles. `combine` walks the tiles of a row as the kernel for many rows does, with the same
softmax, for a quarter of the dims: a dim of the sum does not depend on other dims.
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

QUARTERS, STAGES = 4, 3
_HALF, _PART = DIM // 2, DIM // QUARTERS


@functools.cache
def scores_kernel(sms: int, has_entries: bool, arch: str = "sm_90a"):
    """Compiled `scores` for the static sizes."""
    return compile_for(lambda: build_scores(sms, has_entries), arch)


@functools.cache
def combine_kernel(frequencies: int, has_entries: bool, cast_out: bool, arch: str = "sm_90a"):
    """Compiled `combine` for the static sizes."""
    return compile_for(lambda: build_combine(frequencies, has_entries, cast_out), arch)


def build_scores(sms: int, has_entries: bool):
    """raw [rows, tiles, 64, 64] = queries times keys of every tile, 2^-10 of their value, unscaled."""
    import tilelang.language as T

    rows, near_width, far_width, most = T.dynamic("rows, near_width, far_width, most")
    records, stored, units, sequences, blocks = T.dynamic("records, stored, units, sequences, blocks")
    bf16, f32, i32, u8 = "bfloat16", "float32", "int32", "uint8"
    count, find, load, store, load_query, _ = gathering(T, quarters=4)

    @T.prim_func
    def scores(
        query: T.Tensor((rows, HEADS, DIM), bf16),
        window: T.Tensor((records, DIM + DIM // 32), u8),
        window_index: T.Tensor((rows, near_width), i32),
        storage: T.Tensor((stored, units), u8),
        block_table: T.Tensor((sequences, blocks), i32),
        row_seq: T.Tensor((rows,), i32),
        topk: T.Tensor((rows, far_width), i32),
        raw_scores: T.Tensor((rows, most, HEADS, TILE), f32),
        per_block: T.int32,
        offset: T.int32,
        stride: T.int32,
    ):
        with T.Kernel(sms, threads=256) as block:
            T.import_source(GATHER)
            q_left = T.alloc_shared([HEADS, _HALF], bf16)
            q_right = T.alloc_shared([HEADS, _HALF], bf16)
            k_left = T.alloc_shared([2, TILE, _HALF], bf16)
            k_right = T.alloc_shared([2, TILE, _HALF], bf16)
            row_tiles = T.alloc_shared([1], i32)
            acc = T.alloc_fragment([HEADS, TILE], f32)
            q_ready = T.alloc_barrier(arrive_count=128)
            q_free = T.alloc_barrier(arrive_count=128)
            k_ready = T.alloc_barrier(arrive_count=[128, 128])
            k_free = T.alloc_barrier(arrive_count=[128, 128])
            thread = T.get_thread_binding()
            geometry = per_block, units, offset, stride
            first = block * (rows * most) // sms
            last = (block + 1) * (rows * most) // sms

            if thread < 128:
                step = T.alloc_var(i32, init=0)
                turn = T.alloc_var(i32, init=0)
                tiles = T.alloc_var(i32, init=0)
                for unit in T.serial(first, last):
                    if unit == first or unit % most == 0:
                        T.barrier_wait(q_ready, turn & 1)
                        tiles = row_tiles[0]
                        turn += 1
                    if unit % most < tiles:
                        T.barrier_wait(k_ready[step & 1], (step >> 1) & 1)
                        T.wgmma_gemm(q_left, k_left[step & 1, :, :], acc, transpose_B=True, clear_accum=True)
                        T.wgmma_gemm(q_right, k_right[step & 1, :, :], acc, transpose_B=True)
                        T.wait_wgmma(0)
                        T.barrier_arrive(k_free[step & 1])
                        T.copy(acc, raw_scores[unit // most, unit % most, :, :])
                        step += 1
                    if (unit + 1) % most == 0:
                        T.barrier_arrive(q_free)
            else:
                step_gather = T.alloc_var(i32, init=0)
                turn_gather = T.alloc_var(i32, init=0)
                near = T.alloc_var(i32, init=0)
                far = T.alloc_var(i32, init=0)
                tiles_gather = T.alloc_var(i32, init=0)
                raw = T.alloc_local([32], "uint32")
                gains = T.alloc_local([8], "uint32")
                places = T.alloc_local([2], "int64")
                for unit in T.serial(first, last):
                    row = unit // most
                    t = unit % most
                    sequence = row_seq[row] if has_entries else 0
                    if unit == first or t == 0:
                        near = count(window_index, row, near_width)
                        far = count(topk, row, far_width) if has_entries else 0
                        tiles_gather = T.call_extern(i32, "shoal_tiles", near, far)
                    if t < tiles_gather:
                        find(places, window_index, topk, block_table, row, sequence, t, near, far, geometry)
                        load(raw, gains, places, window, storage, t, near)
                        T.barrier_wait(k_free[step_gather & 1], ((step_gather >> 1) & 1) ^ 1)
                        store(raw, gains, places, window, t, near, k_left, k_right, step_gather & 1)
                        T.fence_proxy_async()
                        T.barrier_arrive(k_ready[step_gather & 1])
                        step_gather += 1
                    if unit == first or t == 0:
                        T.barrier_wait(q_free, (turn_gather & 1) ^ 1)
                        load_query(query, row, q_left)
                        load_query(query, row, q_right, 2)
                        if thread == 128:
                            row_tiles[0] = tiles_gather
                        T.fence_proxy_async()
                        T.barrier_arrive(q_ready)
                        turn_gather += 1

    return scores


def build_combine(frequencies: int, has_entries: bool, cast_out: bool):
    """o from raw scores: softmax, sum over the keys, one quarter of the dims per block."""
    import tilelang.language as T
    from tilelang.layout import Fragment

    # Scores lie in registers as the tensor cores leave them in the other kernel: sums over them depend on it.
    accumulator = Fragment(
        [HEADS, TILE],
        forward_thread_fn=lambda h, k: h // 16 * 32 + h % 8 * 4 + k % 8 // 2,
        forward_index_fn=lambda h, k: k // 8 * 4 + h % 16 // 8 * 2 + k % 2,
    )

    source = GATHER + FINISH + finish_source(frequencies, cast_out)
    rows, near_width, far_width, most = T.dynamic("rows, near_width, far_width, most")
    records, stored, units, sequences, blocks, positions_known = T.dynamic(
        "records, stored, units, sequences, blocks, positions_known"
    )
    bf16, f32, i32, u8 = "bfloat16", "float32", "int32", "uint8"
    (begin, weigh), finish = softmax(T), finishing(T, frequencies)
    count, find, load, store, _, _ = gathering(T, quarters=1)

    @T.prim_func
    def combine(
        raw_scores: T.Tensor((rows, most, HEADS, TILE), f32),
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
        with T.Kernel(QUARTERS, rows, threads=256) as (part_index, row):
            T.import_source(source)
            T.annotate_min_blocks_per_sm(2)
            keys = T.alloc_shared([STAGES, TILE, _PART], bf16)
            p_shared = T.alloc_shared([2, HEADS, TILE], bf16)
            total_shared = T.alloc_shared([HEADS], f32)
            row_tiles = T.alloc_shared([1], i32)
            tile_keys = T.alloc_shared([STAGES], i32)
            acc = T.alloc_fragment([HEADS, _PART], f32)
            scores = T.alloc_fragment([HEADS, TILE], f32)
            ahead = T.alloc_fragment([HEADS, TILE], f32)
            peak = T.alloc_fragment([HEADS], f32)
            before = T.alloc_fragment([HEADS], f32)
            shrink = T.alloc_fragment([HEADS], f32)
            total = T.alloc_fragment([HEADS], f32)
            part = T.alloc_fragment([HEADS], f32)
            T.annotate_layout({scores: accumulator, ahead: accumulator})
            row_ready = T.alloc_barrier(arrive_count=128)
            k_ready = T.alloc_barrier(arrive_count=[128] * STAGES)
            k_free = T.alloc_barrier(arrive_count=[128] * STAGES)
            p_ready = T.alloc_barrier(arrive_count=128)
            thread = T.get_thread_binding()
            geometry = per_block, units, offset, stride

            if thread < 128:
                T.set_max_nreg(168, 1)
                tiles = T.alloc_var(i32, init=0)
                T.copy(raw_scores[row, 0, :, :], ahead)
                begin(sink, peak, total)
                T.fill(acc, 0)
                T.barrier_wait(row_ready, 0)
                tiles = row_tiles[0]
                for t in T.serial(tiles):
                    T.copy(ahead, scores)
                    if t < tiles - 1:
                        T.copy(raw_scores[row, t + 1, :, :], ahead)
                    T.barrier_wait(k_ready[t % STAGES], (t // STAGES) & 1)
                    weigh(scores, tile_keys[t % STAGES], factor, peak, before, shrink, total, part)
                    T.copy(scores, p_shared[t & 1, :, :])
                    T.fence_proxy_async()
                    T.barrier_arrive(p_ready)
                    for h, d in T.Parallel(HEADS, _PART):
                        acc[h, d] *= shrink[h]
                    T.barrier_wait(p_ready, t & 1)
                    T.wgmma_gemm(p_shared[t & 1, :, :], keys[t % STAGES, :, :], acc)
                    T.wait_wgmma(0)
                    T.barrier_arrive(k_free[t % STAGES])
                T.copy(total, total_shared)
                T.barrier_arrive(p_ready)
                T.barrier_wait(p_ready, tiles & 1)
                totals = T.access_ptr(total_shared[0], "r", HEADS)
                finish(acc.data, totals, cos_sin, positions, out, row, part_index * _PART)
            else:
                T.set_max_nreg(80, 0)
                near = T.alloc_var(i32, init=0)
                far = T.alloc_var(i32, init=0)
                raw = T.alloc_local([8], "uint32")
                gains = T.alloc_local([2], "uint32")
                places = T.alloc_local([2], "int64")
                sequence = row_seq[row] if has_entries else 0
                near = count(window_index, row, near_width)
                far = count(topk, row, far_width) if has_entries else 0
                if thread == 128:
                    row_tiles[0] = T.call_extern(i32, "shoal_tiles", near, far)
                T.barrier_arrive(row_ready)
                find(places, window_index, topk, block_table, row, sequence, 0, near, far, geometry)
                for t in T.serial(T.call_extern(i32, "shoal_tiles", near, far)):
                    load(raw, gains, places, window, storage, t, near, part_index)
                    T.barrier_wait(k_free[t % STAGES], ((t // STAGES) & 1) ^ 1)
                    store(raw, gains, places, window, t, near, keys, keys, t % STAGES, part_index)
                    if thread == 128:
                        tile_keys[t % STAGES] = T.call_extern(i32, "shoal_keys", t, near, far)
                    T.fence_proxy_async()
                    T.barrier_arrive(k_ready[t % STAGES])
                    find(places, window_index, topk, block_table, row, sequence, t + 1, near, far, geometry)

    return combine
