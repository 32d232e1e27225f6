# mypy: ignore-errors
"""The TileLang linear for Hopper: one kernel for 1 to 8192 rows.

A producer warp brings tiles of the input and of the weight by the copy engine, three more warps the scales; two
consumer warpgroups of 64 outputs each dequantise their half of the weight tile from shared memory into the registers of
wgmma's A operand (e4m3 times a power of two is exact in bfloat16). out^T = W x^T: rows are the N dimension of the
instruction, so that 48 rows cost 48. Two products are in flight while the operand of the next is made.

Annotations are evaluated when the kernel is built, so this file does not postpone them.
"""

from shoal_kernels.ops.linear.cuda_source import SOURCE, WGMMA_SOURCE
from shoal_kernels.ops.linear.segments import UNIT
from shoal_kernels.ops.linear.tiles import MOST_DEPTH, MULTIPROCESSORS, Plan


def program(plan: Plan, quantised: bool, wide: bool, segmented: bool):
    """The kernel of a plan. x [rows, groups * depth], weight [groups * columns, depth].

    segmented  more than one segment: partial sums are added in registers, or by the cluster if `plan.split` > 1
    """
    import tilelang.language as T
    from tilelang.layout import make_swizzled_layout

    R, COLUMNS, STEP, STAGES = plan.rows, plan.columns, plan.step, plan.stages
    # Consumers, 64 columns each, and the warpgroup that brings tiles after them.
    WARPGROUPS, CONSUMERS = COLUMNS // 64, COLUMNS * 2
    producer_registers, consumer_registers = {2: (40, 232), 3: (32, 160), 4: (32, 112)}[WARPGROUPS]
    segmented = plan.split == 1 and segmented
    parked = segmented and plan.parked
    summed = segmented and not parked
    part_rows = R if R <= 128 else R // 2
    pitch = MOST_DEPTH // 32
    rows, width, depth, x_width, x_stride = (T.dynamic(n) for n in ("rows", "width", "depth", "x_width", "x_stride"))
    scale_rows, scale_columns = T.dynamic("scale_rows"), T.dynamic("scale_columns")
    scratch_size = T.dynamic("scratch_size")
    fragment = T.Fragment(
        (COLUMNS, R),
        forward_fn=lambda i, j: (i // 16 * 32 + i % 8 * 4 + j % 8 // 2, j // 8 * 4 + i % 16 // 8 * 2 + j % 2),
    )
    flags = (quantised, plan.turns, summed, parked)
    variant = ", ".join(str(value).lower() for value in (R, COLUMNS, STEP, STAGES, UNIT, *flags))

    def blocks(tile_count):
        """Blocks take tiles in turns; those of a cluster have one tile."""
        return T.min(tile_count, MULTIPROCESSORS) if plan.split == 1 else tile_count

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
            blocks(T.ceildiv(rows, R) * T.ceildiv(width, COLUMNS)), 1, plan.split,
            threads=CONSUMERS + 128, cluster_dims=(1, 1, plan.split),
        ) as (block, _, bz):  # fmt: skip
            x_shared = T.alloc_shared((STAGES, STEP // 64, R, 64), T.bfloat16)
            w_shared = T.alloc_shared((STAGES, COLUMNS, STEP), T.uint8 if quantised else T.bfloat16)
            factors = T.alloc_shared((2, COLUMNS // 32 * pitch) if quantised else (2, 4), T.uint32)
            o_shared = T.alloc_shared((WARPGROUPS, part_rows if plan.split == 1 and not wide else 16, 64), T.bfloat16)
            sums = T.alloc_fragment((COLUMNS, R), T.float32)
            total = T.alloc_fragment((COLUMNS, R), T.float32)
            full = T.alloc_barrier([32] * STAGES)
            empty = T.alloc_barrier([CONSUMERS // 32] * STAGES)
            scaled = T.alloc_barrier([96] * 2)
            unscaled = T.alloc_barrier([CONSUMERS // 32] * 2)
            T.annotate_layout(
                {shared: make_swizzled_layout(shared) for shared in (o_shared, w_shared, x_shared)}
                | {sums: fragment, total: fragment}
            )
            T.import_source(SOURCE + WGMMA_SOURCE)
            T.pdl_trigger()
            tx = T.get_thread_binding()
            warpgroup = tx // 128
            row_tiles = T.ceildiv(rows, R)
            tile_count = row_tiles * T.ceildiv(width, COLUMNS)
            # Variables, so that the compiler does not carry these expressions into every index.
            count = T.alloc_var(T.int32)
            base = T.alloc_var(T.int32)
            bx = T.alloc_var(T.int32)
            by = T.alloc_var(T.int32)
            rounds = T.alloc_var(T.int32)
            left = T.alloc_var(T.int32)
            ahead = T.alloc_var(T.int32)
            units = T.ceildiv(depth, UNIT)
            origin = bz * units // plan.split * (UNIT // STEP)
            count = (bz + 1) * units // plan.split * (UNIT // STEP) - origin
            rounds = T.ceildiv(tile_count - block, blocks(tile_count))
            base = 0
            with T.ws(WARPGROUPS):
                T.dec_max_nreg(producer_registers)
                if tx < CONSUMERS + 32:
                    # The weight does not wait for the kernel before this one.
                    ahead = T.min(count, STAGES)
                    by = block // row_tiles
                    for j in T.serial(ahead):
                        T.tma_copy(
                            weight[by * COLUMNS : (by + 1) * COLUMNS, (origin + j) * STEP : (origin + j) * STEP + STEP],
                            w_shared[j, :, :],
                            barrier=full[j],
                        )
                    T.pdl_sync()
                    for turn in T.serial(rounds):
                        bx = (block + turn * blocks(tile_count)) % row_tiles
                        by = (block + turn * blocks(tile_count)) // row_tiles
                        left = by // tiles * depth
                        for j in T.serial(count):
                            i = base + j
                            k = (origin + j) * STEP
                            T.mbarrier_wait_parity(empty[i % STAGES], ((i // STAGES) & 1) ^ 1)
                            for panel in T.unroll(STEP // 64):
                                T.tma_copy(
                                    x[bx * R : (bx + 1) * R, left + k + panel * 64 : left + k + panel * 64 + 64],
                                    x_shared[i % STAGES, panel, :, :],
                                    barrier=full[i % STAGES],
                                )
                            if i >= ahead:
                                T.tma_copy(
                                    weight[by * COLUMNS : (by + 1) * COLUMNS, k : k + STEP],
                                    w_shared[i % STAGES, :, :],
                                    barrier=full[i % STAGES],
                                )
                            T.mbarrier_arrive(full[i % STAGES])
                        base += count
                elif quantised:
                    for turn in T.serial(rounds):
                        by = (block + turn * blocks(tile_count)) // row_tiles
                        T.mbarrier_wait_parity(unscaled[turn % 2], ((turn // 2) & 1) ^ 1)
                        T.call_extern(
                            "handle", f"shoal_factors<{COLUMNS // 32}, 96>", T.access_ptr(scale, "r"),
                            T.access_ptr(factors[turn % 2, 0], "w"), pitch, by * (COLUMNS // 32), scale_rows,
                            origin * (STEP // 32), count * (STEP // 32), scale_columns, tx - (CONSUMERS + 32),
                        )  # fmt: skip
                        T.mbarrier_arrive(scaled[turn % 2])
            with T.ws(*range(WARPGROUPS)):
                T.inc_max_nreg(consumer_registers)
                T.pdl_sync()
                if quantised:
                    T.call_extern("handle", f"shoal_first_turn<{WARPGROUPS}>")
                for turn in T.serial(rounds):
                    bx = (block + turn * blocks(tile_count)) % row_tiles
                    by = (block + turn * blocks(tile_count)) // row_tiles
                    if quantised:
                        T.mbarrier_wait_parity(scaled[turn % 2], (turn // 2) & 1)
                    T.call_extern(
                        "handle", f"shoal_tile<{variant}>", T.access_ptr(w_shared, "r"), T.access_ptr(x_shared, "r"),
                        T.access_ptr(factors[turn % 2, tx // 64 * pitch if quantised else 0], "r"),
                        T.address_of(full[0]), T.address_of(empty[0]), T.access_ptr(sums, "w"),
                        T.access_ptr(total if summed else sums, "w"),
                        T.access_ptr(scratch[block * (R * COLUMNS) if parked else 0], "rw"), base, count,
                        segments if segmented else 1,
                    )  # fmt: skip
                    base += count
                    if quantised and tx % 32 == 0:
                        T.mbarrier_arrive(unscaled[turn % 2])
                    if plan.split > 1:
                        # A cluster has one tile: its stages are free when both warpgroups are done.
                        T.sync_threads(1, CONSUMERS)
                        T.call_extern(
                            "handle", f"shoal_store_partial<{R}, {COLUMNS}>", T.access_ptr(sums, "r"),
                            T.access_ptr(x_shared, "w"),
                        )  # fmt: skip
                    elif wide:
                        for n, r in T.Parallel(COLUMNS, R):
                            if (bx * R + r < rows) and (by * COLUMNS + n < width):
                                out[bx * R + r, by * COLUMNS + n] = total[n, r] if summed else sums[n, r]
                    else:
                        for part in T.unroll(R // part_rows):
                            # The copy engine has read what the part before left here.
                            T.tma_store_wait(0)
                            T.sync_threads(1, CONSUMERS)
                            T.call_extern(
                                "handle", f"shoal_store_transposed<{part_rows}>",
                                T.access_ptr(total if summed else sums, "r"), part,
                                T.access_ptr(o_shared[warpgroup, 0, 0], "w"),
                            )  # fmt: skip
                            T.fence_proxy_async()
                            T.sync_threads(1, CONSUMERS)
                            for half in T.unroll(WARPGROUPS):
                                T.tma_copy(
                                    o_shared[half, :, :],
                                    out[
                                        bx * R + part * part_rows : bx * R + (part + 1) * part_rows,
                                        by * COLUMNS + half * 64 : by * COLUMNS + half * 64 + 64,
                                    ],
                                )
                T.tma_store_wait(0)
            if plan.split > 1:
                T.cluster_sync()
                T.call_extern(
                    "handle", f"shoal_add_segments<{R}, {COLUMNS}, {plan.split}>", T.access_ptr(x_shared, "r"),
                    T.access_ptr(out, "w"), block % row_tiles * R, rows, block // row_tiles * COLUMNS, width, bz,
                    CONSUMERS + 128,
                )  # fmt: skip
                T.cluster_sync()

    return linear_kernel
