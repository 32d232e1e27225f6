# mypy: ignore-errors
"""Experts in Triton: one product for gate and up with the activation behind it, one for down.

Both compute the transposed output: the weight is the left operand, decoded in registers to the bfloat16 values that it
stands for, and the rows of an expert are the columns. The sum over K runs in one order for every shape of rows: plane
by plane, 32 elements at a time, or block by block on Blackwell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal_kernels.ops.experts.packing import FP4_WORDS, K_BLOCK, packed_depth
from shoal_kernels.ops.experts.triton_decode import (
    decode_block,
    decode_fp4,
    decode_fp8,
    fp4_rest,
    load_scale,
    load_words,
)
from shoal_kernels.ops.experts.triton_routing import cast_rows, combine, sort_pairs
from shoal_kernels.precision import Precision
from shoal_kernels.triton_lib import cast_q8, dot, round_bf16

if TYPE_CHECKING:
    from shoal_kernels.ops.experts import ExpertWeights


@triton.jit
def _find_tile(starts, tile, num_experts, EXPERTS: tl.constexpr, BLOCK_N: tl.constexpr):
    """The expert of a row tile (num_experts if there are fewer tiles), its first row and the end of its rows."""
    lane = tl.arange(0, EXPERTS)
    first = tl.load(starts + lane, mask=lane < num_experts, other=0)
    last = tl.load(starts + lane + 1, mask=lane < num_experts, other=0)
    ends = tl.cumsum(tl.cdiv(last - first, BLOCK_N), 0)
    expert = tl.sum(((ends <= tile) & (lane < num_experts)).to(tl.int32), 0)
    before = tl.max(tl.where(ends <= tile, ends, 0), 0)
    is_mine = lane == expert
    row = tl.sum(tl.where(is_mine, first, 0), 0) + (tile - before) * BLOCK_N
    return expert, row, tl.sum(tl.where(is_mine, last, 0), 0)


@triton.jit
def _load_rows(x, offsets, first, depth, SIZE: tl.constexpr, MASKED: tl.constexpr):
    """[SIZE, N]: SIZE elements of every row from `first`."""
    k = first + tl.arange(0, SIZE)
    pointers = x + offsets[None, :] + k[:, None]
    if MASKED:
        return tl.load(pointers, mask=(k < depth)[:, None], other=0.0)
    return tl.load(pointers)


@triton.jit
def _gate_up(
    x, words, scales, starts, order, weights, u, limit, num_experts, depth, inner, u_stride, TOP_K: tl.constexpr,
    ROUTED: tl.constexpr, FP4: tl.constexpr, JOINED: tl.constexpr, BLOCKS: tl.constexpr, MASK_K: tl.constexpr,
    MASK_M: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """u [sorted pair, I] = Q8(silu(min(gate, limit)) * clamp(up) * weight) of BLOCK_M columns and BLOCK_N pairs."""
    WORDS: tl.constexpr = 2 if FP4 else 4
    expert, start, end = _find_tile(starts, tl.program_id(1), num_experts, EXPERTS, BLOCK_N)
    if expert >= num_experts:
        return
    slots = start + tl.arange(0, BLOCK_N)
    valid = slots < end
    if ROUTED:
        pairs = tl.load(order + slots, mask=valid, other=0)
        weight = tl.load(weights + pairs, mask=valid, other=0.0)
        rows = pairs // TOP_K
    else:
        weight = tl.full([BLOCK_N], 1.0, tl.float32)
        rows = tl.where(valid, slots, 0)
    offsets = rows.to(tl.int64) * depth
    gates = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = gates < inner
    ups = gates + inner
    step = 2 * inner
    words += expert.to(tl.int64) * BLOCKS * WORDS * 16 * step
    scales += expert.to(tl.int64) * BLOCKS * 8 * step
    gate, up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for block in range(BLOCKS):
        word = words + block * (WORDS * 16 * step)
        scale = scales + block * (8 * step)
        if JOINED:
            values = _load_rows(x, offsets, block * 256, depth, 256, MASK_K)
            gate = dot(decode_block(word, scale, gates, inside, step, FP4, MASK_M), values, gate)
            up = dot(decode_block(word, scale, ups, inside, step, FP4, MASK_M), values, up)
        else:
            if FP4:
                second = word + 16 * step
                gate_a, gate_b = load_words(word, gates, inside, MASK_M), load_words(second, gates, inside, MASK_M)
                up_a, up_b = load_words(word, ups, inside, MASK_M), load_words(second, ups, inside, MASK_M)
                gate_c, up_c = fp4_rest(gate_a, gate_b), fp4_rest(up_a, up_b)
            for plane in tl.static_range(8):
                values = _load_rows(x, offsets, block * 256 + plane * 32, depth, 32, MASK_K)
                gate_scale = load_scale(scale, gates, inside, plane, MASK_M)
                up_scale = load_scale(scale, ups, inside, plane, MASK_M)
                if FP4:
                    left = decode_fp4(gate_a, gate_b, gate_c, gate_scale, plane)
                    right = decode_fp4(up_a, up_b, up_c, up_scale, plane)
                else:
                    place = word + (plane // 2) * (16 * step)
                    left = decode_fp8(load_words(place, gates, inside, MASK_M), gate_scale, plane % 2)
                    right = decode_fp8(load_words(place, ups, inside, MASK_M), up_scale, plane % 2)
                gate = dot(left, values, gate)
                up = dot(right, values, up)
    gate, up = round_bf16(gate).to(tl.float32), round_bf16(up).to(tl.float32)
    gate = tl.minimum(gate, limit)
    up = tl.maximum(tl.minimum(up, limit), -limit)
    activation = tl.math.div_rn(gate, 1.0 + tl.exp(-gate)) * up * weight[None, :]
    groups = tl.reshape(activation, (BLOCK_M // 32, 32, BLOCK_N))
    result = tl.reshape(round_bf16(cast_q8(groups, 1)), (BLOCK_M, BLOCK_N))
    target = u + slots.to(tl.int64)[None, :] * u_stride + gates[:, None]
    tl.store(target, result, mask=inside[:, None] & valid[None, :])


@triton.jit
def _down(
    u, words, scales, starts, order, out, num_experts, depth, dim, u_stride, ROUTED: tl.constexpr,
    FP4: tl.constexpr, JOINED: tl.constexpr, BLOCKS: tl.constexpr, MASK_K: tl.constexpr, MASK_M: tl.constexpr,
    EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out [pair, D] = bf16(down . u) of BLOCK_M columns and BLOCK_N pairs."""
    WORDS: tl.constexpr = 2 if FP4 else 4
    expert, start, end = _find_tile(starts, tl.program_id(1), num_experts, EXPERTS, BLOCK_N)
    if expert >= num_experts:
        return
    slots = start + tl.arange(0, BLOCK_N)
    valid = slots < end
    offsets = tl.where(valid, slots, start).to(tl.int64) * u_stride
    columns = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = columns < dim
    words += expert.to(tl.int64) * BLOCKS * WORDS * 16 * dim
    scales += expert.to(tl.int64) * BLOCKS * 8 * dim
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for block in range(BLOCKS):
        word = words + block * (WORDS * 16 * dim)
        scale = scales + block * (8 * dim)
        if JOINED:
            values = _load_rows(u, offsets, block * 256, depth, 256, MASK_K)
            acc = dot(decode_block(word, scale, columns, inside, dim, FP4, MASK_M), values, acc)
        else:
            if FP4:
                a, b = load_words(word, columns, inside, MASK_M), load_words(word + 16 * dim, columns, inside, MASK_M)
                c = fp4_rest(a, b)
            for plane in tl.static_range(8):
                values = _load_rows(u, offsets, block * 256 + plane * 32, depth, 32, MASK_K)
                multiplier = load_scale(scale, columns, inside, plane, MASK_M)
                if FP4:
                    left = decode_fp4(a, b, c, multiplier, plane)
                else:
                    place = word + (plane // 2) * (16 * dim)
                    left = decode_fp8(load_words(place, columns, inside, MASK_M), multiplier, plane % 2)
                acc = dot(left, values, acc)
    pairs = tl.load(order + slots, mask=valid, other=0) if ROUTED else slots
    target = out + pairs.to(tl.int64)[None, :] * dim + columns[:, None]
    tl.store(target, round_bf16(acc), mask=inside[:, None] & valid[None, :])


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, expert_weights: ExpertWeights, limit: float, precision: Precision
) -> Tensor:
    """x [R, D], ids [R, k], weights [R, k] -> [R, D]."""
    if not x.shape[0]:
        return x.to(precision.wide)
    ids = ids.contiguous()
    return combine(ids, _routed(cast_rows(x.contiguous()), ids, weights, expert_weights, limit), None)


def moe(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    expert_weights: ExpertWeights,
    shared: ExpertWeights,
    limit: float,
    precision: Precision,
) -> Tensor:
    """x [R, D] -> [R, D]."""
    if not x.shape[0]:
        return torch.empty_like(x)
    x, ids = cast_rows(x.contiguous()), ids.contiguous()
    starts = torch.arange(2, dtype=torch.int32, device=x.device) * x.shape[0]
    both = _apply(x, starts, None, None, shared, limit, 1)
    return combine(ids, _routed(x, ids, weights, expert_weights, limit), both)


def _routed(x: Tensor, ids: Tensor, weights: Tensor, expert_weights: ExpertWeights, limit: float) -> Tensor:
    starts, order = sort_pairs(ids, expert_weights.num_experts)
    parts = _apply(x, starts, order, weights.contiguous(), expert_weights, limit, ids.shape[1])
    return parts.view(*ids.shape, -1)


def _apply(
    x: Tensor,
    starts: Tensor,
    order: Tensor | None,
    weights: Tensor | None,
    expert_weights: ExpertWeights,
    limit: float,
    top_k: int,
) -> Tensor:
    """x [R, D] of Q8 values -> [R * top_k, D] bfloat16: every pair's output of its expert, without `order` of row 0."""
    pairs, dim, inner, count = x.shape[0] * top_k, expert_weights.dim, expert_weights.inner, expert_weights.num_experts
    stride = packed_depth(inner)
    u = torch.empty(pairs, stride, dtype=x.dtype, device=x.device)
    out = torch.empty(pairs, dim, dtype=x.dtype, device=x.device)
    block_n = row_block(pairs, count)
    tiles = min(pairs, triton.cdiv(pairs, block_n) + count)
    unused = starts
    joined = _joins_planes(x.device)
    common = {
        "JOINED": joined,
        "ROUTED": order is not None,
        "FP4": expert_weights.down.shape[2] == FP4_WORDS,
        "BLOCK_N": block_n,
        "EXPERTS": triton.next_power_of_2(count),
        "num_warps": 8 if joined or block_n > 64 else 4,
        "num_stages": 2,
    }
    block_m = 128
    _gate_up[(triton.cdiv(inner, block_m), tiles)](
        x, expert_weights.gate_up, expert_weights.gate_up_scale, starts, unused if order is None else order,
        unused if weights is None else weights, u, limit, count, dim, inner, stride, TOP_K=top_k,
        BLOCKS=packed_depth(dim) // K_BLOCK, MASK_K=dim % K_BLOCK != 0, MASK_M=inner % block_m != 0,
        BLOCK_M=block_m, **common,
    )  # fmt: skip
    _down[(triton.cdiv(dim, block_m), tiles)](
        u, expert_weights.down, expert_weights.down_scale, starts, unused if order is None else order, out, count,
        inner, dim, stride, BLOCKS=stride // K_BLOCK, MASK_K=inner % K_BLOCK != 0, MASK_M=dim % block_m != 0,
        BLOCK_M=block_m, **common,
    )  # fmt: skip
    return out


def row_block(pairs: int, num_experts: int) -> int:
    """Rows of an expert that one tile takes: about what an expert gets. It changes no bits."""
    return min(128, max(16, triton.next_power_of_2(triton.cdiv(pairs, num_experts))))


def _joins_planes(device: torch.device) -> bool:
    """Whether a block of K is one product: Blackwell keeps the accumulator of every product in a loop apart."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 10
