# mypy: ignore-errors
"""The LM head with its arg-max in Triton: logits stay in the accumulators of the product.

Every program multiplies one tile of rows by one tile of the vocabulary over the whole of K, in steps of the tensor
core's 16, and keeps the best token of each of its rows; a second kernel compares the tiles. The sum over K of a logit
has one order whatever the tiles, the same as in `linear`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from shoal_kernels.ops.linear import LinearWeight
from shoal_kernels.ops.lm_head import reference
from shoal_kernels.ops.lm_head.markov_triton import markov_loop
from shoal_kernels.ops.lm_head.tile_triton import is_cut, is_fused, keep_best, tiles
from shoal_kernels.ops.sampling.triton import best_of_parts, coupled_argmax
from shoal_kernels.precision import Precision
from shoal_kernels.triton_lib import EXACT_OPTIONS, dot

__all__ = ["lm_head_argmax", "markov_loop"]


# The noise of a tile is long straight code: one compilation takes ten seconds, so that numbers which change from step to
# step (rows, draft position, stride of the tokens before) make no variants of their own.
@triton.jit(do_not_specialize=["rows"])
def _head_tile(
    x,
    w,
    inverse_temperature,
    seeds,
    positions,
    is_greedy,
    values,
    tokens,
    rows,
    vocab,
    parts,
    DEPTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICE: tl.constexpr,
    FUSED: tl.constexpr,
):
    """x, w: descriptors of bf16 [rows, DEPTH] and [vocab, DEPTH]; what lies beyond them reads as zero."""
    # Row tiles of one vocabulary tile run side by side, so that its weights come from memory once.
    row_tiles = tl.cdiv(rows, BLOCK_R)
    part, row_tile = tl.program_id(0) // row_tiles, tl.program_id(0) % row_tiles
    acc = tl.zeros([BLOCK_R, BLOCK_V], tl.float32)
    for k in range(0, DEPTH, BLOCK_K):
        acc = dot(x.load([row_tile * BLOCK_R, k]), w.load([part * BLOCK_V, k]).T, acc)
    row = row_tile * BLOCK_R + tl.arange(0, BLOCK_R)
    keep_best(
        acc,
        part * BLOCK_V,
        row,
        rows,
        vocab,
        inverse_temperature,
        seeds,
        positions,
        0,
        is_greedy,
        values,
        tokens,
        part,
        parts,
        SLICE,
        FUSED,
    )


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
    (rows, depth), vocab = hidden.shape, head.out_features
    if is_cut(head):
        return reference.lm_head_argmax(hidden, head, inverse_temperature, seeds, positions, is_greedy, precision)
    block_r, block_v, block_k, warps, stages = tiles(rows, vocab, depth)
    parts = triton.cdiv(vocab, block_v)
    fused = is_fused(hidden.device)
    values = torch.empty(rows, parts if fused else vocab, dtype=torch.float32, device=hidden.device)
    tokens = torch.empty(rows, parts, dtype=torch.int32, device=hidden.device)
    if rows:
        _head_tile[(parts * triton.cdiv(rows, block_r),)](
            TensorDescriptor.from_tensor(hidden.contiguous(), [block_r, block_k]),
            TensorDescriptor.from_tensor(head.data, [block_v, block_k]),
            inverse_temperature,
            seeds,
            positions,
            is_greedy,
            values,
            tokens,
            rows,
            vocab,
            parts,
            DEPTH=depth,
            BLOCK_R=block_r,
            BLOCK_V=block_v,
            BLOCK_K=block_k,
            SLICE=min(64, block_v),
            FUSED=fused,
            num_warps=warps,
            num_stages=stages,
            **EXACT_OPTIONS,
        )
    return best_of_parts(values, tokens) if fused else coupled_argmax(values, seeds, positions, is_greedy)
