# mypy: ignore-errors
"""TileLang linear for Hopper: one kernel for 1 to 8192 rows.

A producer warpgroup brings tiles of the input and of the weight by the copy engine; two consumer warpgroups of 64
outputs each dequantise their half of the weight tile from shared memory into the registers of wgmma's A operand
(e4m3 times a power of two is exact in bfloat16). The sum over K is cut as in the Triton kernel; see there.
"""

from functools import cache
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from shoal_kernels.ops.linear import sm100
from shoal_kernels.ops.linear import triton as plain
from shoal_kernels.ops.linear.cuda_source import SOURCE
from shoal_kernels.ops.linear.segments import segment_depth
from shoal_kernels.ops.linear.tiles import MOST_DEPTH, PITCH, TILE_COLUMNS, Plan, choose
from shoal_kernels.precision import Precision

if TYPE_CHECKING:
    from shoal_kernels.ops.linear import LinearWeight


def _program(plan: Plan, quantised: bool, wide: bool, segmented: bool):
    """The kernel of a plan. x [rows, groups * depth], weight [groups * columns, depth].

    segmented  more than one segment: partial sums are added in registers, or by the cluster if `plan.split` > 1
    """
    import tilelang.language as T
    from tilelang.layout import make_swizzled_layout

    R, STEP, STAGES = plan.rows, plan.step, plan.stages
    # Blocks that share a multiprocessor have a producer of one warp; alone it is a warpgroup, which can give registers.
    THREADS = 384 if plan.blocks == 1 else 288
    summed = plan.split == 1 and segmented
    part_rows = min(R, 128)
    pitch = MOST_DEPTH // 32
    rows, width, depth, x_width, x_stride = (T.dynamic(n) for n in ("rows", "width", "depth", "x_width", "x_stride"))
    scale_rows, scale_columns = T.dynamic("scale_rows"), T.dynamic("scale_columns")
    fragment = {
        n: T.Fragment(
            (128, n),
            forward_fn=lambda i, j: (i // 16 * 32 + i % 8 * 4 + j % 8 // 2, j // 8 * 4 + i % 16 // 8 * 2 + j % 2),
        )
        for n in {R, STEP}
    }

    @T.macro
    def fetch(operand, i, w_shared, factors, full):
        """The weight tile of step i, dequantised into registers."""
        tx = T.get_thread_binding()
        T.mbarrier_wait_parity(full[i % STAGES], (i // STAGES) & 1)
        T.call_extern(
            "handle", f"shoal_dequantise<{STEP}>", T.access_ptr(w_shared[i % STAGES, tx // 128 * 64, 0], "r"),
            T.access_ptr(factors[tx // 64 * pitch + i * (STEP // 32)], "r"), T.access_ptr(operand, "w"),
        )  # fmt: skip

    @T.macro
    def multiply(operand, i, x_shared, sums):
        """Start the product of step i."""
        T.wgmma_gemm(operand, x_shared[i % STAGES, :, :], sums, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)

    @T.macro
    def multiply_shared(i, w_shared, x_shared, sums, full):
        T.mbarrier_wait_parity(full[i % STAGES], (i // STAGES) & 1)
        T.wgmma_gemm(
            w_shared[i % STAGES, :, :], x_shared[i % STAGES, :, :], sums, transpose_B=True,
            policy=T.GemmWarpPolicy.FullRow,
        )  # fmt: skip

    @T.macro
    def release(i, empty):
        """Wait for the product of step i and give its stage back: one arrival per warp."""
        T.wait_wgmma(0)
        if T.get_thread_binding() % 32 == 0:
            T.mbarrier_arrive(empty[i % STAGES])

    @T.prim_func
    def linear_kernel(
        x: T.StridedTensor((rows, x_width), (x_stride, 1), T.bfloat16),
        weight: T.Tensor((width, depth), T.uint8 if quantised else T.bfloat16),
        scale: T.Tensor((scale_rows, scale_columns), T.uint8),
        out: T.Tensor((rows, width), T.float32 if wide else T.bfloat16),
        tiles: T.int32,
        segment_steps: T.int32,
        segment_count: T.int32,
    ):
        with T.Kernel(
            T.ceildiv(rows, R),
            T.ceildiv(width, TILE_COLUMNS),
            plan.split,
            threads=THREADS,
            cluster_dims=(1, 1, plan.split),
        ) as (bx, by, bz):
            x_shared = T.alloc_shared((STAGES, R, STEP), T.bfloat16)
            w_shared = T.alloc_shared((STAGES, TILE_COLUMNS, STEP), T.uint8 if quantised else T.bfloat16)
            factors = T.alloc_shared((4 * pitch if quantised else 4,), T.uint32)
            o_shared = T.alloc_shared((2, part_rows if plan.split == 1 and not wide else 16, 64), T.bfloat16)
            partial = T.alloc_shared((R if plan.split > 1 else 1, PITCH), T.float32)
            even = T.alloc_fragment((TILE_COLUMNS, STEP), T.bfloat16)
            odd = T.alloc_fragment((TILE_COLUMNS, STEP), T.bfloat16)
            sums = T.alloc_fragment((TILE_COLUMNS, R), T.float32)
            total = T.alloc_fragment((TILE_COLUMNS, R), T.float32)
            full = T.alloc_barrier([THREADS - 256] * STAGES)
            empty = T.alloc_barrier([8] * STAGES)
            T.annotate_layout(
                {o_shared: make_swizzled_layout(o_shared), sums: fragment[R], total: fragment[R]}
                | (
                    {w_shared: make_swizzled_layout(w_shared), even: fragment[STEP], odd: fragment[STEP]}
                    if quantised
                    else {}
                )
            )
            if plan.blocks > 1:
                T.annotate_min_blocks_per_sm(plan.blocks)
            T.import_source(SOURCE)
            tx = T.get_thread_binding()
            warpgroup = tx // 128
            steps = T.ceildiv(depth, 2 * STEP) * 2
            first = bz * segment_steps
            count = steps if plan.split == 1 else T.min(segment_steps, steps - first)
            if quantised:
                T.call_extern(
                    "handle", "shoal_factors", T.access_ptr(scale, "r"), T.access_ptr(factors, "w"), pitch, by * 4,
                    scale_rows, first * (STEP // 32), count * (STEP // 32), scale_columns, THREADS,
                )  # fmt: skip
                T.sync_threads()
            with T.ws(2):
                if plan.blocks == 1:
                    T.dec_max_nreg(24)
                left = (by // tiles) * depth
                for i in T.serial(count):
                    stage = i % STAGES
                    k = (first + i) * STEP
                    T.mbarrier_wait_parity(empty[stage], ((i // STAGES) & 1) ^ 1)
                    T.tma_copy(
                        x[bx * R : (bx + 1) * R, left + k : left + k + STEP], x_shared[stage, :, :], barrier=full[stage]
                    )
                    T.tma_copy(
                        weight[by * TILE_COLUMNS : (by + 1) * TILE_COLUMNS, k : k + STEP],
                        w_shared[stage, :, :],
                        barrier=full[stage],
                    )
                    T.mbarrier_arrive(full[stage])
            with T.ws(0, 1):
                if plan.blocks == 1:
                    T.inc_max_nreg(240)
                if summed:
                    T.clear(total)
                if quantised:
                    fetch(even, 0, w_shared, factors, full)
                for s in T.serial(segment_count if summed else 1):
                    T.clear(sums)
                    for pair in T.serial((T.min(segment_steps, steps - s * segment_steps) if summed else count) // 2):
                        i = s * segment_steps + pair * 2
                        if quantised:
                            multiply(even, i, x_shared, sums)
                            fetch(odd, i + 1, w_shared, factors, full)
                            release(i, empty)
                            multiply(odd, i + 1, x_shared, sums)
                            if i + 2 < count:
                                fetch(even, i + 2, w_shared, factors, full)
                            release(i + 1, empty)
                        else:
                            for half in T.unroll(2):
                                multiply_shared(i + half, w_shared, x_shared, sums, full)
                                release(i + half, empty)
                    if summed:
                        for n, r in T.Parallel(TILE_COLUMNS, R):
                            total[n, r] += sums[n, r]
                if plan.split > 1:
                    for n, r in T.Parallel(TILE_COLUMNS, R):
                        partial[r, n] = sums[n, r]
                elif wide:
                    for n, r in T.Parallel(TILE_COLUMNS, R):
                        if (bx * R + r < rows) and (by * TILE_COLUMNS + n < width):
                            out[bx * R + r, by * TILE_COLUMNS + n] = total[n, r] if summed else sums[n, r]
                else:
                    for part in T.unroll(R // part_rows):
                        T.call_extern(
                            "handle", f"shoal_store_transposed<{part_rows}>",
                            T.access_ptr(total if summed else sums, "r"), part,
                            T.access_ptr(o_shared[warpgroup, 0, 0], "w"),
                        )  # fmt: skip
                        T.fence_proxy_async()
                        T.sync_threads(1, 256)
                        for half in T.unroll(2):
                            T.tma_copy(
                                o_shared[half, :, :],
                                out[
                                    bx * R + part * part_rows : bx * R + (part + 1) * part_rows,
                                    by * TILE_COLUMNS + half * 64 : by * TILE_COLUMNS + half * 64 + 64,
                                ],
                            )
                        T.tma_store_wait(0)
                        if part_rows < R:
                            T.sync_threads(1, 256)
            if plan.split > 1:
                T.cluster_sync()
                T.call_extern(
                    "handle", f"shoal_add_segments<{R}, {PITCH}, {plan.split}>", T.access_ptr(partial, "r"),
                    T.access_ptr(out, "w"), bx * R, rows, by * TILE_COLUMNS, width, bz, THREADS,
                )  # fmt: skip
                T.cluster_sync()

    return linear_kernel


@cache
def compiled(plan: Plan, quantised: bool, wide: bool, segmented: bool, arch: str = "sm_90a"):
    """The compiled kernel of a plan; called with x, weight, scale, out, tiles, segment_steps, segment_count."""
    import tilelang
    from tvm.target import Target

    target = {"kind": "cuda", "arch": arch}
    with Target(target):
        program = (_program if arch == "sm_90a" else sm100.program)(plan, quantised, wide, segmented)
    # Barriers are explicit here; what the compiler would add between the roles of the warpgroups would stop them.
    options = {
        "tl.disable_thread_storage_sync": True,
        "tl.disable_safe_memory_legalize": True,
        "tl.disable_shared_memory_reuse": True,
    }
    return tilelang.compile(program, target=target, pass_configs=options)


def serves(width: int, groups: int, depth: int) -> bool:
    """Whether the copy engine takes these sizes and groups do not share a tile; else the Triton kernel is used."""
    separate = groups == 1 or (width // groups % TILE_COLUMNS == 0 and depth % 128 == 0)
    return separate and depth % 64 == 0 and depth <= MOST_DEPTH and width % 8 == 0


def linear(x: Tensor, weight: "LinearWeight", cast: bool, round_out: bool, precision: Precision) -> Tensor:
    """x bfloat16 [R, groups * K], rows contiguous but not necessarily next to each other -> [R, groups * N]."""
    rows, width, depth = x.shape[0], weight.out_features, weight.depth
    if not serves(width, weight.groups, depth) or rows == 0:
        return plain.linear(x, weight, cast, round_out, precision)
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.contiguous()
    if cast:
        x = plain.cast_rows(x)
    segment = segment_depth(width, depth)
    plan = choose(rows, width, depth, triton.cdiv(depth, segment), weight.scale is not None)
    return run(plan, x, weight, torch.bfloat16 if round_out else torch.float32)


def run(plan: Plan, x: Tensor, weight: "LinearWeight", dtype: torch.dtype) -> Tensor:
    """The product of a cast input [R, groups * K] by the tiles of `plan`; the bits are those of any other plan."""
    rows, width, depth, quantised = x.shape[0], weight.out_features, weight.depth, weight.scale is not None
    segment = segment_depth(width, depth)
    segments = triton.cdiv(depth, segment)
    out = torch.empty(rows, width, dtype=dtype, device=x.device)
    scale = weight.scale if quantised else weight.data.view(torch.uint8)
    kernel = compiled(plan, quantised, dtype == torch.float32, segments > 1, _architecture(x.device.index))
    tiles = triton.cdiv(width // weight.groups, TILE_COLUMNS)
    kernel(x, weight.data, scale, out, tiles, segment // plan.step, segments)
    return out


@cache
def _architecture(device: int) -> str:
    return "sm_100a" if torch.cuda.get_device_capability(device)[0] == 10 else "sm_90a"
