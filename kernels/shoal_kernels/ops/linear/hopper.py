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
from shoal_kernels.ops.linear.tiles import MOST_DEPTH, MULTIPROCESSORS, TILE_COLUMNS, Plan


def program(plan: Plan, quantised: bool, wide: bool, segmented: bool):
    """The kernel of a plan. x [rows, groups * depth], weight [groups * columns, depth].

    segmented  more than one segment: partial sums are added in registers, or by the cluster if `plan.split` > 1
    """
    import tilelang.language as T
    from tilelang.layout import make_swizzled_layout

    R, COLUMNS, STEP, STAGES = plan.rows, TILE_COLUMNS, plan.step, plan.stages
    # Threads that multiply, 64 columns a warpgroup; the warpgroup that brings tiles comes after them.
    WARPGROUPS, CONSUMERS = COLUMNS // 64, COLUMNS * 2
    segmented = plan.split == 1 and segmented
    parked = segmented and plan.parked
    summed = segmented and not parked
    part_rows = R if R <= 128 else R // 2
    pitch = MOST_DEPTH // 32
    rows, width, depth, x_width, x_stride = (T.dynamic(n) for n in ("rows", "width", "depth", "x_width", "x_stride"))
    scale_rows, scale_columns = T.dynamic("scale_rows"), T.dynamic("scale_columns")
    scratch_size = T.dynamic("scratch_size")
    fragment = {
        n: T.Fragment(
            (COLUMNS, n),
            forward_fn=lambda i, j: (i // 16 * 32 + i % 8 * 4 + j % 8 // 2, j // 8 * 4 + i % 16 // 8 * 2 + j % 2),
        )
        for n in {R, STEP}
    }

    def blocks(tile_count):
        """Blocks take tiles in turns; those of a cluster have one tile."""
        return T.min(tile_count, MULTIPROCESSORS) if plan.split == 1 else tile_count

    @T.macro
    def fetch(operand, turn, base, j, w_shared, factors, full):
        """The weight tile of step j of a turn, dequantised into registers."""
        if quantised:
            tx = T.get_thread_binding()
            i = base + j
            T.mbarrier_wait_parity(full[i % STAGES], (i // STAGES) & 1)
            T.call_extern(
                "handle", f"shoal_dequantise<{STEP}>", T.access_ptr(w_shared[i % STAGES, tx // 128 * 64, 0], "r"),
                T.access_ptr(factors[turn % 2, tx // 64 * pitch + j * (STEP // 32)], "r"), T.access_ptr(operand, "w"),
            )  # fmt: skip

    @T.macro
    def multiply(operand, i, x_shared, w_shared, sums, full):
        """Start the product of step i; the one before may still run."""
        tx = T.get_thread_binding()
        if quantised:
            T.call_extern(
                "handle", f"shoal_multiply<{R}, {STEP}, {WARPGROUPS}>", T.access_ptr(operand, "r"),
                T.access_ptr(x_shared[i % STAGES, 0, 0, 0], "r"), T.access_ptr(sums, "rw"),
            )  # fmt: skip
        else:
            T.mbarrier_wait_parity(full[i % STAGES], (i // STAGES) & 1)
            T.call_extern(
                "handle", f"shoal_multiply_shared<{R}>", T.access_ptr(w_shared[i % STAGES, tx // 128 * 64, 0], "r"),
                T.access_ptr(x_shared[i % STAGES, 0, 0, 0], "r"), T.access_ptr(sums, "rw"),
            )  # fmt: skip

    @T.macro
    def release(i, running, empty):
        """Wait for the product of step i, with `running` later ones, and give its stage back: one arrival per warp."""
        T.wait_wgmma(running)
        if T.get_thread_binding() % 32 == 0:
            T.mbarrier_arrive(empty[i % STAGES])

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
            partial = T.alloc_shared((R if plan.split > 1 else 1, COLUMNS + 4), T.float32)
            even = T.alloc_fragment((COLUMNS, STEP), T.bfloat16)
            odd = T.alloc_fragment((COLUMNS, STEP), T.bfloat16)
            sums = T.alloc_fragment((COLUMNS, R), T.float32)
            total = T.alloc_fragment((COLUMNS, R), T.float32)
            full = T.alloc_barrier([32] * STAGES)
            empty = T.alloc_barrier([CONSUMERS // 32] * STAGES)
            scaled = T.alloc_barrier([96] * 2)
            unscaled = T.alloc_barrier([CONSUMERS // 32] * 2)
            T.annotate_layout(
                {shared: make_swizzled_layout(shared) for shared in (o_shared, w_shared, x_shared)}
                | {sums: fragment[R], total: fragment[R], even: fragment[STEP], odd: fragment[STEP]}
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
            start = T.alloc_var(T.int32)
            pairs = T.alloc_var(T.int32)
            units = T.ceildiv(depth, UNIT)
            origin = bz * units // plan.split * (UNIT // STEP)
            count = (bz + 1) * units // plan.split * (UNIT // STEP) - origin
            rounds = T.ceildiv(tile_count - block, blocks(tile_count))
            base = 0
            with T.ws(WARPGROUPS):
                T.dec_max_nreg(40)
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
                T.inc_max_nreg(232)
                T.pdl_sync()
                if quantised:
                    T.call_extern("handle", f"shoal_first_turn<{WARPGROUPS}>")
                for turn in T.serial(rounds):
                    bx = (block + turn * blocks(tile_count)) % row_tiles
                    by = (block + turn * blocks(tile_count)) // row_tiles
                    if quantised:
                        T.mbarrier_wait_parity(scaled[turn % 2], (turn // 2) & 1)
                        fetch(even, turn, base, 0, w_shared, factors, full)
                    if summed:
                        T.clear(total)
                    for s in T.serial(segments if segmented else 1):
                        start = s * units // segments * (UNIT // STEP) if segmented else 0
                        pairs = (((s + 1) * units // segments * (UNIT // STEP) if segmented else count) - start) // 2
                        T.clear(sums)
                        multiply(even, base + start, x_shared, w_shared, sums, full)
                        for pair in T.serial(pairs - 1):
                            fetch(odd, turn, base, start + pair * 2 + 1, w_shared, factors, full)
                            multiply(odd, base + start + pair * 2 + 1, x_shared, w_shared, sums, full)
                            release(base + start + pair * 2, 1, empty)
                            fetch(even, turn, base, start + pair * 2 + 2, w_shared, factors, full)
                            multiply(even, base + start + pair * 2 + 2, x_shared, w_shared, sums, full)
                            release(base + start + pair * 2 + 1, 1, empty)
                        start += pairs * 2 - 1
                        fetch(odd, turn, base, start, w_shared, factors, full)
                        multiply(odd, base + start, x_shared, w_shared, sums, full)
                        release(base + start - 1, 1, empty)
                        if segmented and start + 1 < count:
                            fetch(even, turn, base, start + 1, w_shared, factors, full)
                        release(base + start, 0, empty)
                        if parked:
                            T.call_extern(
                                "handle", f"shoal_park<{R}, {CONSUMERS}>", T.access_ptr(sums, "rw"),
                                T.access_ptr(scratch[block * (R * COLUMNS)], "rw"), s == 0, s == segments - 1,
                            )  # fmt: skip
                        if summed:
                            for n, r in T.Parallel(COLUMNS, R):
                                total[n, r] += sums[n, r]
                    base += count
                    if quantised and tx % 32 == 0:
                        T.mbarrier_arrive(unscaled[turn % 2])
                    if plan.split > 1:
                        for n, r in T.Parallel(COLUMNS, R):
                            partial[r, n] = sums[n, r]
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
                    "handle", f"shoal_add_segments<{R}, {COLUMNS}, {plan.split}>", T.access_ptr(partial, "r"),
                    T.access_ptr(out, "w"), block % row_tiles * R, rows, block // row_tiles * COLUMNS, width, bz,
                    CONSUMERS + 128,
                )  # fmt: skip
                T.cluster_sync()

    return linear_kernel
