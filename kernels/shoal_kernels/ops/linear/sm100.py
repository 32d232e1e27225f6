# mypy: ignore-errors
"""The SM100 tile of the TileLang linear: the same segments, with tcgen05 and accumulators in tensor memory.

There is no A operand from registers: two warpgroups dequantise a weight tile into shared memory, one warp issues the
products, one brings the tiles. out^T = W x^T, so outputs are the lanes of tensor memory and rows its columns.
"""

from shoal_kernels.ops.linear.cuda_source import SOURCE
from shoal_kernels.ops.linear.segments import UNIT
from shoal_kernels.ops.linear.tiles import MOST_DEPTH, TILE_COLUMNS, Plan


def program(plan: Plan, quantised: bool, wide: bool, segmented: bool):
    """As `hopper.program`. Sums of more than one segment are added in registers between segments."""
    import tilelang.language as T
    from tilelang.layout import make_swizzled_layout

    R, STEP, STAGES = plan.rows, 64, 4 if plan.rows <= 128 else 2
    summed = plan.split == 1 and segmented
    pitch = MOST_DEPTH // 32
    rows, width, depth, x_width, x_stride = (T.dynamic(n) for n in ("rows", "width", "depth", "x_width", "x_stride"))
    scale_rows, scale_columns = T.dynamic("scale_rows"), T.dynamic("scale_columns")
    scratch_size = T.dynamic("scratch_size")

    @T.prim_func
    def linear_kernel(
        x: T.StridedTensor((rows, x_width), (x_stride, 1), T.bfloat16),
        weight: T.Tensor((width, depth), T.uint8 if quantised else T.bfloat16),
        scale: T.Tensor((scale_rows, scale_columns), T.uint8),
        out: T.Tensor((rows, width), T.float32 if wide else T.bfloat16),
        scratch: T.Tensor((scratch_size,), T.float32),
        tiles: T.int32,
        segments: T.int32,
    ):
        with T.Kernel(
            T.ceildiv(rows, R),
            T.ceildiv(width, TILE_COLUMNS),
            plan.split,
            threads=384,
            cluster_dims=(1, 1, plan.split),
        ) as (bx, by, bz):
            x_shared = T.alloc_shared((STAGES, R, STEP), T.bfloat16)
            stored = T.alloc_shared((STAGES if quantised else 1, TILE_COLUMNS, STEP), T.uint8)
            w_shared = T.alloc_shared((STAGES, TILE_COLUMNS, STEP), T.bfloat16)
            factors = T.alloc_shared((4 * pitch if quantised else 4,), T.uint32)
            partial = T.alloc_shared((R if plan.split > 1 else 1, TILE_COLUMNS + 4), T.float32)
            accumulator = T.alloc_tmem([TILE_COLUMNS, R], T.float32)
            sums = T.alloc_fragment((TILE_COLUMNS, R), T.float32)
            total = T.alloc_fragment((TILE_COLUMNS, R), T.float32)
            full = T.alloc_barrier([32] * STAGES)
            ready = T.alloc_barrier([128] * STAGES)
            empty = T.alloc_barrier([1] * STAGES)
            summing = T.alloc_barrier([1])
            taken = T.alloc_barrier([128])
            T.annotate_layout({w_shared: make_swizzled_layout(w_shared)})
            if quantised:
                T.annotate_layout({stored: make_swizzled_layout(stored)})
            T.import_source(SOURCE)
            # Clusters are launched before the kernel ahead of them is done.
            T.pdl_sync()
            tx = T.get_thread_binding()
            units = T.ceildiv(depth, UNIT)
            first = bz * units // plan.split * (UNIT // STEP)
            count = (bz + 1) * units // plan.split * (UNIT // STEP) - first
            if quantised:
                T.call_extern(
                    "handle", "shoal_factors<4, 384>", T.access_ptr(scale, "r"), T.access_ptr(factors, "w"), pitch,
                    by * 4, scale_rows, first * (STEP // 32), count * (STEP // 32), scale_columns, tx,
                )  # fmt: skip
                T.sync_threads()
            if tx >= 128 and tx < 160:
                left = (by // tiles) * depth
                for i in T.serial(count):
                    k = (first + i) * STEP
                    T.mbarrier_wait_parity(empty[i % STAGES], ((i // STAGES) & 1) ^ 1)
                    T.tma_copy(
                        x[bx * R : (bx + 1) * R, left + k : left + k + STEP],
                        x_shared[i % STAGES, :, :],
                        barrier=full[i % STAGES],
                    )
                    T.tma_copy(
                        weight[by * TILE_COLUMNS : (by + 1) * TILE_COLUMNS, k : k + STEP],
                        stored[i % STAGES, :, :] if quantised else w_shared[i % STAGES, :, :],
                        barrier=full[i % STAGES],
                    )
                    T.mbarrier_arrive(full[i % STAGES])
            if tx >= 160 and tx < 192:
                for s in T.serial(segments if summed else 1):
                    start = s * units // segments * (UNIT // STEP) if summed else 0
                    stop = (s + 1) * units // segments * (UNIT // STEP) if summed else count
                    if s > 0:
                        # The accumulator is free when the segment before has been taken from it.
                        T.mbarrier_wait_parity(taken, (s - 1) & 1)
                    for j in T.serial(stop - start):
                        i = start + j
                        if quantised:
                            T.mbarrier_wait_parity(ready[i % STAGES], (i // STAGES) & 1)
                        else:
                            T.mbarrier_wait_parity(full[i % STAGES], (i // STAGES) & 1)
                        T.tcgen05_gemm(
                            w_shared[i % STAGES, :, :], x_shared[i % STAGES, :, :], accumulator, transpose_B=True,
                            mbar=empty[i % STAGES], clear_accum=j == 0,
                        )  # fmt: skip
                    T.tcgen05_mma_arrive(summing)
            if quantised and tx >= 256:
                for i in T.serial(count):
                    T.mbarrier_wait_parity(full[i % STAGES], (i // STAGES) & 1)
                    T.call_extern(
                        "handle", f"shoal_dequantise_tile<{STEP}>", T.access_ptr(stored[i % STAGES, 0, 0], "r"),
                        T.access_ptr(factors[i * (STEP // 32)], "r"), pitch,
                        T.access_ptr(w_shared[i % STAGES, 0, 0], "w"),
                    )  # fmt: skip
                    T.fence_proxy_async()
                    T.mbarrier_arrive(ready[i % STAGES])
            if tx < 128:
                if summed:
                    T.clear(total)
                for s in T.serial(segments if summed else 1):
                    T.mbarrier_wait_parity(summing, s & 1)
                    T.copy(accumulator, sums)
                    T.mbarrier_arrive(taken)
                    if summed:
                        for n, r in T.Parallel(TILE_COLUMNS, R):
                            total[n, r] += sums[n, r]
                if plan.split > 1:
                    for n, r in T.Parallel(TILE_COLUMNS, R):
                        partial[r, n] = sums[n, r]
                else:
                    for n, r in T.Parallel(TILE_COLUMNS, R):
                        if (bx * R + r < rows) and (by * TILE_COLUMNS + n < width):
                            out[bx * R + r, by * TILE_COLUMNS + n] = total[n, r] if summed else sums[n, r]
            if plan.split > 1:
                T.cluster_sync()
                T.call_extern(
                    "handle", f"shoal_add_segments<{R}, {TILE_COLUMNS}, {plan.split}>", T.access_ptr(partial, "r"),
                    T.access_ptr(out, "w"), bx * R, rows, by * TILE_COLUMNS, width, bz, 384,
                )  # fmt: skip
                T.cluster_sync()
            # Tensor memory is given back at the end of the block: after every warp has read it.
            T.sync_threads()

    return linear_kernel
