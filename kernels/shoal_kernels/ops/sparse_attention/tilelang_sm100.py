# mypy: ignore-errors
"""The Blackwell kernel: one row per block, one warpgroup that multiplies and one that gathers.

Tensor memory has 512 columns. Scores take 64 of them; the sum would take 512 as [64, 512] and is kept transposed, as
four [128, 64] of 64 columns: keys are the left operand there and weights the right one.
"""

import functools

from shoal_kernels.ops.sparse_attention.tilelang_parts import (
    DIM,
    HEADS,
    TILE,
    compile_for,
    gathering,
    softmax,
)
from shoal_kernels.ops.sparse_attention.tilelang_source import FINISH, GATHER, INTRINSICS

_HALF, _PART = DIM // 2, DIM // 4


@functools.cache
def kernel(frequencies: int, has_entries: bool, cast_out: bool, arch: str = "sm_100a"):
    """Compiled for the static sizes; call it with the tensors of `build`."""
    return compile_for(lambda: build(frequencies, has_entries, cast_out), arch)


def build(frequencies: int, has_entries: bool, cast_out: bool):
    """The program over dynamic numbers of rows, records and blocks."""
    import tilelang.language as T

    source = INTRINSICS + GATHER + FINISH
    finish = f"shoal_finish_stored<{'true' if cast_out else 'false'}, {frequencies}>"
    rows, near_width, far_width = T.dynamic("rows, near_width, far_width")
    records, stored, units, sequences, blocks, positions_known = T.dynamic(
        "records, stored, units, sequences, blocks, positions_known"
    )
    bf16, f32, i32, u8 = "bfloat16", "float32", "int32", "uint8"
    begin, weigh = softmax(T)
    count, find, load, store, load_query = gathering(T)

    @T.macro
    def shrink_sum(tmem, held, shrink_shared):
        T.copy(tmem, held)
        for d, h in T.Parallel(_PART, HEADS):
            held[d, h] *= shrink_shared[h]
        T.copy(held, tmem)

    @T.macro
    def keep(tmem, held, total_shared, out, row, first):
        T.copy(tmem, held)
        for d, h in T.Parallel(_PART, HEADS):
            # Keys were held times 2^-10; their dims lie in the order 0 4 1 5 2 6 3 7 of every eight.
            out[row, h, first + d // 8 * 8 + d % 8 // 2 + d % 2 * 4] = held[d, h] * (1024.0 / total_shared[h])

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
        with T.Kernel(rows, threads=256) as row:
            T.import_source(source)
            q_left = T.alloc_shared([HEADS, _HALF], bf16)
            q_right = T.alloc_shared([HEADS, _HALF], bf16)
            k_left = T.alloc_shared([2, TILE, _HALF], bf16)
            k_right = T.alloc_shared([2, TILE, _HALF], bf16)
            p_shared = T.alloc_shared([HEADS, TILE], bf16)
            shrink_shared = T.alloc_shared([HEADS], f32)
            total_shared = T.alloc_shared([HEADS], f32)
            row_tiles = T.alloc_shared([1], i32)
            tile_keys = T.alloc_shared([2], i32)
            scores_tmem = T.alloc_tmem([HEADS, TILE], f32)
            sum_0 = T.alloc_tmem([_PART, HEADS], f32)
            sum_1 = T.alloc_tmem([_PART, HEADS], f32)
            sum_2 = T.alloc_tmem([_PART, HEADS], f32)
            sum_3 = T.alloc_tmem([_PART, HEADS], f32)
            held = T.alloc_fragment([_PART, HEADS], f32)
            scores = T.alloc_fragment([HEADS, TILE], f32)
            peak = T.alloc_fragment([HEADS], f32)
            before = T.alloc_fragment([HEADS], f32)
            shrink = T.alloc_fragment([HEADS], f32)
            total = T.alloc_fragment([HEADS], f32)
            part = T.alloc_fragment([HEADS], f32)
            q_ready = T.alloc_barrier(arrive_count=128)
            k_ready = T.alloc_barrier(arrive_count=[128, 128])
            k_free = T.alloc_barrier(arrive_count=[128, 128])
            scored = T.alloc_barrier(arrive_count=1)
            summed = T.alloc_barrier(arrive_count=1)
            p_ready = T.alloc_barrier(arrive_count=128)
            shrunk = T.alloc_barrier(arrive_count=128)
            thread = T.get_thread_binding()
            geometry = per_block, units, offset, stride

            if thread < 128:
                tiles = T.alloc_var(i32, init=0)
                begin(sink, peak, total)
                T.barrier_wait(q_ready, 0)
                tiles = row_tiles[0]
                for t in T.serial(tiles):
                    T.barrier_wait(k_ready[t & 1], (t >> 1) & 1)
                    T.tcgen05_gemm(
                        q_left, k_left[t & 1, :, :], scores_tmem, transpose_B=True, clear_accum=True, mbar=None
                    )
                    T.tcgen05_gemm(q_right, k_right[t & 1, :, :], scores_tmem, transpose_B=True, mbar=scored)
                    T.mbarrier_wait_parity(scored, t & 1)
                    T.copy(scores_tmem, scores)
                    weigh(scores, tile_keys[t & 1], factor, peak, before, shrink, total, part)
                    T.copy(scores, p_shared)
                    T.copy(shrink, shrink_shared)
                    T.fence_proxy_async()
                    T.barrier_arrive(p_ready)
                    T.barrier_wait(p_ready, t & 1)
                    if t > 0:
                        shrink_sum(sum_0, held, shrink_shared)
                        shrink_sum(sum_1, held, shrink_shared)
                        shrink_sum(sum_2, held, shrink_shared)
                        shrink_sum(sum_3, held, shrink_shared)
                        # One thread issues the products below, after all have stored.
                        T.tcgen05_before_thread_sync()
                        T.barrier_arrive(shrunk)
                        T.barrier_wait(shrunk, (t - 1) & 1)
                        T.tcgen05_after_thread_sync()
                    keys = k_left[t & 1, :, :_PART], k_left[t & 1, :, _PART:]
                    more = k_right[t & 1, :, :_PART], k_right[t & 1, :, _PART:]
                    first = t == 0
                    options = {"transpose_A": True, "transpose_B": True, "clear_accum": first}
                    T.tcgen05_gemm(keys[0], p_shared, sum_0, mbar=None, **options)
                    T.tcgen05_gemm(keys[1], p_shared, sum_1, mbar=None, **options)
                    T.tcgen05_gemm(more[0], p_shared, sum_2, mbar=None, **options)
                    T.tcgen05_gemm(more[1], p_shared, sum_3, mbar=summed, **options)
                    T.mbarrier_wait_parity(summed, t & 1)
                    T.barrier_arrive(k_free[t & 1])
                T.copy(total, total_shared)
                T.barrier_arrive(p_ready)
                T.barrier_wait(p_ready, tiles & 1)
                keep(sum_0, held, total_shared, out, row, 0)
                keep(sum_1, held, total_shared, out, row, _PART)
                keep(sum_2, held, total_shared, out, row, 2 * _PART)
                keep(sum_3, held, total_shared, out, row, 3 * _PART)
                T.barrier_arrive(p_ready)
                T.barrier_wait(p_ready, (tiles + 1) & 1)
                T.call_extern(
                    "handle",
                    finish,
                    T.access_ptr(cos_sin[positions[row], 0], "r", 2 * frequencies),
                    T.access_ptr(out[row, 0, 0], "rw", HEADS * DIM),
                )
            else:
                near = T.alloc_var(i32, init=0)
                far = T.alloc_var(i32, init=0)
                tiles_gather = T.alloc_var(i32, init=0)
                raw = T.alloc_local([32], "uint32")
                gains = T.alloc_local([8], "uint32")
                places = T.alloc_local([2], "int32")
                sequence = row_seq[row] if has_entries else 0
                near = count(window_index, row, near_width)
                far = count(topk, row, far_width) if has_entries else 0
                # A row with an empty list has one tile of no keys.
                tiles_gather = T.max(T.call_extern(i32, "shoal_tiles", near, far), 1)
                load_query(query, row, q_left)
                load_query(query, row, q_right, 2)
                if thread == 128:
                    row_tiles[0] = tiles_gather
                T.fence_proxy_async()
                T.barrier_arrive(q_ready)
                for t in T.serial(tiles_gather):
                    find(places, window_index, topk, block_table, row, sequence, t, near, far, geometry)
                    load(raw, gains, places, window, storage, t, near)
                    T.barrier_wait(k_free[t & 1], ((t >> 1) & 1) ^ 1)
                    store(raw, gains, places, window, t, near, k_left, k_right, t & 1)
                    if thread == 128:
                        tile_keys[t & 1] = T.call_extern(i32, "shoal_keys", t, near, far)
                    T.fence_proxy_async()
                    T.barrier_arrive(k_ready[t & 1])

    return attend
