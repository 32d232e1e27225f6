# mypy: ignore-errors
"""The LM head with its arg-max and the Markov loop in Triton: logits stay in the accumulators of the product.

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
from shoal_kernels.ops.linear.segments import segment_count
from shoal_kernels.ops.lm_head import reference
from shoal_kernels.ops.sampling.noise_triton import best_of_tile
from shoal_kernels.ops.sampling.triton import best_of_parts, coupled_argmax
from shoal_kernels.precision import Precision
from shoal_kernels.triton_lib import EXACT_OPTIONS, dot


@triton.jit
def _keep_best(
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
    SLICE: tl.constexpr,
    FUSED: tl.constexpr,
):
    """Store the best token of every row of z [rows, tokens], logits of the ids from `first` on.

    Not FUSED: store the processed logits, float32 [rows, vocab], as `values`.
    """
    column = first + tl.arange(0, z.shape[1])
    inside = row < rows
    greedy = tl.load(is_greedy + row, mask=inside, other=1) != 0
    inverse = tl.load(inverse_temperature + row, mask=inside, other=1.0)
    seed = tl.load(seeds + row, mask=inside, other=0)
    position = tl.load(positions + row, mask=inside, other=0) + ahead
    z = tl.where(greedy[:, None], z, z * inverse[:, None])
    if not FUSED:
        at = row.to(tl.int64)[:, None] * vocab + column[None, :]
        tl.store(values + at, z, mask=inside[:, None] & (column[None, :] < vocab))
        return
    z = tl.where(column[None, :] < vocab, z, float("-inf"))
    value, token = best_of_tile(
        z,
        first,
        position.to(tl.uint32),
        (position >> 32).to(tl.uint32),
        seed.to(tl.uint32),
        (seed >> 32).to(tl.uint32),
        greedy,
        SLICE,
        False,
    )
    tl.store(values + row.to(tl.int64) * parts + part, value, mask=inside)
    tl.store(tokens + row.to(tl.int64) * parts + part, token, mask=inside)


@triton.jit
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
    _keep_best(
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


@triton.jit
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
    _keep_best(
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


def _tiles(rows: int, vocab: int, depth: int) -> tuple[int, int, int, int, int]:
    """Rows, tokens and K of a tile, warps and stages. None of them changes the order of a sum over K."""
    block_k = min(64, max(16, triton.next_power_of_2(depth)))
    block_v = min(128, max(16, triton.next_power_of_2(vocab)))
    return (64, block_v, block_k, 4, 4) if rows <= 64 else (128, block_v, block_k, 8, 4)


def is_cut(head: LinearWeight) -> bool:
    """Whether `linear` adds a logit up from segments of K: then the logits have to come from it."""
    return segment_count(head.out_features, head.in_features) > 1


def _is_fused(device: torch.device) -> bool:
    """Whether the arg-max is taken in the product's kernel. Triton's layout pass for Blackwell's tensor memory fails on
    it, so there the processed logits are stored and a second kernel reads them.
    """
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 10


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
    block_r, block_v, block_k, warps, stages = _tiles(rows, vocab, depth)
    parts = triton.cdiv(vocab, block_v)
    fused = _is_fused(hidden.device)
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
) -> tuple[Tensor, Tensor]:
    """base_logits float32 [n, B, V] -> tokens int64 [n, width], confidence logits float32 [n, width]."""
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
        return drafted, chances
    block_r, block_v, block_k, warps, stages = _tiles(rows, vocab, rank)
    parts = triton.cdiv(vocab, block_v)
    fused = _is_fused(hidden.device)
    values = torch.empty(rows, parts if fused else vocab, dtype=torch.float32, device=hidden.device)
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
            values,
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
            best_of_parts(values, tokens, drafted[:, j])
        else:
            drafted[:, j] = coupled_argmax(values, seeds, positions + j, is_greedy)
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
    return drafted, chances
