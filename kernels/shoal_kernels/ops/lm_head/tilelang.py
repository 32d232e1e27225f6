# mypy: ignore-errors
"""The LM head with its arg-max for Hopper in TileLang: as fast as the product alone, nearly.

Blocks stay on their multiprocessor and walk over tiles. A producer warpgroup brings hidden rows and weights by the copy
engine and runs ahead into the next tile while two consumer warpgroups of 64 rows choose tokens out of the accumulators.
The product is that of the Triton kernel, K ascending in steps of 16, so the bits of a logit are the same.
"""

from functools import cache

import torch
import triton
from torch import Tensor

from shoal_kernels.ops.linear import LinearWeight
from shoal_kernels.ops.lm_head import triton as plain
from shoal_kernels.ops.lm_head.cuda_source import SOURCE
from shoal_kernels.ops.lm_head.markov_triton import markov_loop
from shoal_kernels.ops.lm_head.tile_triton import is_cut
from shoal_kernels.ops.sampling.triton import best_of_parts
from shoal_kernels.precision import Precision

__all__ = ["lm_head_argmax", "markov_loop"]

ROWS, TOKENS, STEP, STAGES = 128, 256, 64, 4
PARTS = TOKENS // 32
"""Parts of a tile's noise: each is made while one step of the product is under way."""


def _program(vocab: int, depth: int, blocks: int):
    import tilelang.language as T

    rows = T.dynamic("rows")
    parts, steps = -(-vocab // TOKENS), depth // STEP

    @T.macro
    def multiply(n, x_shared, w_shared, sums, full):
        """Start the product of step n."""
        T.mbarrier_wait_parity(full[n % STAGES], (n // STAGES) & 1)
        T.wgmma_gemm(
            x_shared[n % STAGES, :, :],
            w_shared[n % STAGES, :, :],
            sums,
            transpose_B=True,
            policy=T.GemmWarpPolicy.FullRow,
        )

    @T.prim_func
    def head_kernel(
        x: T.Tensor((rows, depth), T.bfloat16),
        weight: T.Tensor((vocab, depth), T.bfloat16),
        inverse_temperature: T.Tensor((rows,), T.float32),
        seeds: T.Tensor((rows,), T.int64),
        positions: T.Tensor((rows,), T.int64),
        is_greedy: T.Tensor((rows,), T.uint8),
        values: T.Tensor((rows, parts), T.float32),
        tokens: T.Tensor((rows, parts), T.int32),
    ):
        with T.Kernel(blocks, threads=384) as block:
            x_shared = T.alloc_shared((STAGES, ROWS, STEP), T.bfloat16)
            w_shared = T.alloc_shared((STAGES, TOKENS, STEP), T.bfloat16)
            sums = T.alloc_fragment((ROWS, TOKENS), T.float32)
            parameters = T.alloc_local((12,), T.float32)
            most = T.alloc_local((PARTS * 4,), T.float32)
            bound = T.alloc_local((2,), T.float32)
            full = T.alloc_barrier([128] * STAGES)
            empty = T.alloc_barrier([8] * STAGES)
            T.annotate_layout(
                {
                    sums: T.Fragment(
                        (ROWS, TOKENS),
                        forward_fn=lambda i, j: (
                            i // 16 * 32 + i % 8 * 4 + j % 8 // 2,
                            j // 8 * 4 + i % 16 // 8 * 2 + j % 2,
                        ),
                    )
                }
            )
            T.import_source(SOURCE)
            tx = T.get_thread_binding()
            row_tiles = T.ceildiv(rows, ROWS)
            # Row tiles of one vocabulary tile run side by side, so that its weights come from memory once.
            count = T.ceildiv(row_tiles * parts - block, blocks)
            with T.ws(2):
                T.dec_max_nreg(24)
                for t in T.serial(count):
                    tile = block + t * blocks
                    for i in T.serial(steps):
                        n = t * steps + i
                        T.mbarrier_wait_parity(empty[n % STAGES], ((n // STAGES) & 1) ^ 1)
                        T.tma_copy(
                            x[tile % row_tiles * ROWS : tile % row_tiles * ROWS + ROWS, i * STEP : i * STEP + STEP],
                            x_shared[n % STAGES, :, :],
                            barrier=full[n % STAGES],
                        )
                        T.tma_copy(
                            weight[
                                tile // row_tiles * TOKENS : tile // row_tiles * TOKENS + TOKENS,
                                i * STEP : i * STEP + STEP,
                            ],
                            w_shared[n % STAGES, :, :],
                            barrier=full[n % STAGES],
                        )
                        T.mbarrier_arrive(full[n % STAGES])
            with T.ws(0, 1):
                T.inc_max_nreg(240)
                for t in T.serial(count):
                    tile = block + t * blocks
                    first_row = tile % row_tiles * ROWS + tx // 128 * 64
                    if t == 0 or tile % row_tiles != (tile - blocks) % row_tiles:
                        T.call_extern(
                            "handle",
                            "shoal_rows",
                            T.access_ptr(inverse_temperature, "r"),
                            T.access_ptr(seeds, "r"),
                            T.access_ptr(positions, "r"),
                            T.access_ptr(is_greedy, "r"),
                            first_row,
                            rows,
                            T.access_ptr(parameters, "w"),
                            T.access_ptr(bound, "w"),
                        )
                    T.clear(sums)
                    for part in T.unroll(PARTS):
                        multiply(t * steps + part * (steps // PARTS), x_shared, w_shared, sums, full)
                        T.call_extern(
                            "handle",
                            "shoal_noise",
                            T.access_ptr(parameters, "r"),
                            tile // row_tiles * TOKENS,
                            part,
                            T.access_ptr(most[part * 4], "w"),
                        )
                        T.wait_wgmma(1)
                        if part > 0 and tx % 32 == 0:
                            T.mbarrier_arrive(empty[(t * steps + part * (steps // PARTS) - 1) % STAGES])
                        for i in T.serial(steps // PARTS - 1):
                            n = t * steps + part * (steps // PARTS) + 1 + i
                            multiply(n, x_shared, w_shared, sums, full)
                            # One product stays under way; the stage of the one before goes back.
                            T.wait_wgmma(1)
                            if tx % 32 == 0:
                                T.mbarrier_arrive(empty[(n - 1) % STAGES])
                    T.wait_wgmma(0)
                    if tx % 32 == 0:
                        T.mbarrier_arrive(empty[(t * steps + steps - 1) % STAGES])
                    T.call_extern(
                        "handle",
                        f"shoal_choose<{TOKENS}>",
                        T.access_ptr(sums, "rw"),
                        T.access_ptr(parameters, "r"),
                        T.access_ptr(most, "r"),
                        T.access_ptr(values, "w"),
                        T.access_ptr(tokens, "w"),
                        first_row,
                        rows,
                        tile // row_tiles * TOKENS,
                        vocab,
                        tile // row_tiles,
                        parts,
                        T.access_ptr(bound, "rw"),
                    )

    return head_kernel


@cache
def compiled(vocab: int, depth: int, blocks: int):
    """The compiled kernel of a head; `blocks` multiprocessors."""
    import tilelang
    from tvm.target import Target

    target = {"kind": "cuda", "arch": "sm_90a"}
    with Target(target):
        program = _program(vocab, depth, blocks)
    # Barriers are explicit here; what the compiler would add between the roles of the warpgroups would stop them.
    options = {
        "tl.disable_thread_storage_sync": True,
        "tl.disable_safe_memory_legalize": True,
        "tl.disable_shared_memory_reuse": True,
    }
    return tilelang.compile(program, target=target, pass_configs=options)


def lm_head_argmax(
    hidden: Tensor,
    head: LinearWeight,
    inverse_temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    is_greedy: Tensor,
    precision: Precision,
) -> Tensor:
    """hidden bf16 [R, D] -> int64 [R]."""
    rows, vocab = hidden.shape[0], head.out_features
    if rows <= ROWS // 2 or is_cut(head) or not serves(hidden.shape[1], hidden.device):
        return plain.lm_head_argmax(hidden, head, inverse_temperature, seeds, positions, is_greedy, precision)
    parts = triton.cdiv(vocab, TOKENS)
    values = torch.empty(rows, parts, dtype=torch.float32, device=hidden.device)
    tokens = torch.empty(rows, parts, dtype=torch.int32, device=hidden.device)
    kernel = compiled(vocab, hidden.shape[1], _multiprocessors(hidden.device.index))
    greedy = is_greedy.contiguous().view(torch.uint8)
    contiguous = (t.contiguous() for t in (hidden, head.data, inverse_temperature, seeds, positions))
    kernel(*contiguous, greedy, values, tokens)
    return best_of_parts(values, tokens)


def serves(depth: int, device: torch.device) -> bool:
    """Whether the copy engine takes this depth and the device is a Hopper; else the Triton kernel is used."""
    return depth % (PARTS * STEP) == 0 and torch.cuda.get_device_capability(device)[0] == 9


@cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
