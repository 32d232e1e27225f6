# mypy: ignore-errors
"""The Markov loop in Triton: two kernels per draft position and one for all confidences, no word from the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from shoal_kernels.ops.linear import LinearWeight
from shoal_kernels.ops.lm_head import reference
from shoal_kernels.ops.lm_head.tile_triton import is_cut, is_fused, keep_best, tiles
from shoal_kernels.ops.sampling.triton import best_of_parts, coupled_argmax
from shoal_kernels.precision import Precision
from shoal_kernels.triton_lib import EXACT_OPTIONS, dot


@triton.jit(do_not_specialize=["rows", "ahead", "previous_stride"])
def _markov_tile(
    base,
    stride_n,
    embed,
    previous,
    previous_stride,
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
    ahead,
    DEPTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICE: tl.constexpr,
    FUSED: tl.constexpr,
):
    row_tiles = tl.cdiv(rows, BLOCK_R)
    part, row_tile = tl.program_id(0) // row_tiles, tl.program_id(0) % row_tiles
    row, first = row_tile * BLOCK_R + tl.arange(0, BLOCK_R), part * BLOCK_V
    column = first + tl.arange(0, BLOCK_V)
    token = tl.load(previous + tl.minimum(row, rows - 1) * previous_stride)
    acc = tl.zeros([BLOCK_R, BLOCK_V], tl.float32)
    for k in range(0, DEPTH, BLOCK_K):
        at = k + tl.arange(0, BLOCK_K)
        left = tl.load(embed + (token * DEPTH)[:, None] + at[None, :], mask=(at < DEPTH)[None, :], other=0.0)
        acc = dot(left, w.load([first, k]).T, acc)
    at = base + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * stride_n + column[None, :]
    z = tl.load(at, mask=column[None, :] < vocab, other=0.0) + acc
    keep_best(
        z,
        first,
        row,
        rows,
        vocab,
        inverse_temperature,
        seeds,
        positions,
        ahead,
        is_greedy,
        values,
        tokens,
        part,
        parts,
        SLICE,
        FUSED,
    )


@triton.jit
def _confidence(
    hidden,
    stride_n,
    stride_b,
    embed,
    previous,
    drafted,
    w,
    out,
    width,
    DEPTH: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    row, j = tl.program_id(0), tl.program_id(1)
    at, near = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_M)
    token = tl.load(previous + row)
    if j > 0:
        token = tl.load(drafted + row * width + j - 1)
    h = tl.load(hidden + row.to(tl.int64) * stride_n + j * stride_b + at, mask=at < DEPTH, other=0.0).to(tl.float32)
    total = tl.sum(h * tl.load(w + at, mask=at < DEPTH, other=0.0).to(tl.float32), 0)
    e = tl.load(embed + token * RANK + near, mask=near < RANK, other=0.0).to(tl.float32)
    total += tl.sum(e * tl.load(w + DEPTH + near, mask=near < RANK, other=0.0).to(tl.float32), 0)
    tl.store(out + row * width + j, total)


def markov_loop(
    base_logits: Tensor,
    hidden: Tensor,
    previous: Tensor,
    markov_embed: Tensor,
    markov_head: LinearWeight,
    confidence: LinearWeight,
    inverse_temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    is_greedy: Tensor,
    width: int,
    precision: Precision,
) -> tuple[Tensor, Tensor, Tensor]:
    """base_logits float32 [n, B, V] -> tokens int64 [n, width], confidence logits and margins float32 [n, width]."""
    if is_cut(markov_head):
        return reference.markov_loop(
            base_logits,
            hidden,
            previous,
            markov_embed,
            markov_head,
            confidence,
            inverse_temperature,
            seeds,
            positions,
            is_greedy,
            width,
            precision,
        )
    rows, vocab, rank = base_logits.shape[0], base_logits.shape[2], markov_head.in_features
    depth = hidden.shape[2]
    embed = markov_embed.to(torch.bfloat16)
    drafted = torch.empty(rows, width, dtype=torch.int64, device=hidden.device)
    chances = torch.empty(rows, width, dtype=torch.float32, device=hidden.device)
    if not rows:
        return drafted, chances, torch.empty_like(chances)
    # Its time goes into reading the base logits, so more rows would gain nothing from a larger tile.
    block_r, block_v, block_k, warps, stages = tiles(1, vocab, rank)
    parts = triton.cdiv(vocab, block_v)
    fused = is_fused(hidden.device)
    # The best value of every part and position stays: the two best parts give the margins.
    kept = (width, rows, parts) if fused else (1, rows, vocab)
    values = torch.empty(kept, dtype=torch.float32, device=hidden.device)
    tokens = torch.empty(rows, parts, dtype=torch.int32, device=hidden.device)
    base_logits = base_logits if base_logits.stride(2) == 1 else base_logits.contiguous()
    hidden = hidden if hidden.stride(2) == 1 else hidden.contiguous()
    before, stride = previous, previous.stride(0)
    weight = TensorDescriptor.from_tensor(markov_head.data, [block_v, block_k])
    for j in range(width):
        _markov_tile[(parts * triton.cdiv(rows, block_r),)](
            base_logits[:, j],
            base_logits.stride(0),
            embed,
            before,
            stride,
            weight,
            inverse_temperature,
            seeds,
            positions,
            is_greedy,
            values[j if fused else 0],
            tokens,
            rows,
            vocab,
            parts,
            j,
            DEPTH=rank,
            BLOCK_R=block_r,
            BLOCK_V=block_v,
            BLOCK_K=block_k,
            SLICE=min(64, block_v),
            FUSED=fused,
            num_warps=warps,
            num_stages=stages,
            **EXACT_OPTIONS,
        )
        if fused:
            best_of_parts(values[j], tokens, drafted[:, j])
        else:
            drafted[:, j] = coupled_argmax(values[0], seeds, positions + j, is_greedy)
        before, stride = drafted[:, j], width
    _confidence[(rows, width)](
        hidden,
        hidden.stride(0),
        hidden.stride(1),
        embed,
        previous,
        drafted,
        confidence.data,
        chances,
        width,
        DEPTH=depth,
        RANK=rank,
        BLOCK_D=triton.next_power_of_2(depth),
        BLOCK_M=triton.next_power_of_2(rank),
        num_warps=4,
        **EXACT_OPTIONS,
    )
    if not fused or parts == 1:
        return drafted, chances, torch.full_like(chances, torch.nan)
    two = values.topk(2, dim=2).values
    return drafted, chances, (two[..., 0] - two[..., 1]).T
