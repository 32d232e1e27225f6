# mypy: ignore-errors
"""Rows in the order and layout of the Hopper kernel: expert by expert, in tiles of 8 rows by 64 elements.

The slots of expert e start at ceil8(s) + 8e for s pairs of lower experts: a multiple of 8, and never before the last
slot of expert e - 1. The shared expert counts as one more expert that every row chose.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal_kernels.triton_lib import EXACT_OPTIONS, cast_q8, round_bf16

SLACK = 128
"""Slots behind the last one that a tile of rows may read."""


@dataclass(frozen=True, slots=True)
class Slots:
    """starts int32 [E + 2]: pairs of lower experts; slot_pair int32 [slots], slot_weight float32 [slots]; x: the rows,
    bfloat16 [D / 64, groups, 8, 64] (16-byte chunk c of row r at c ^ r), of what Q8 keeps; groups = slots / 8."""

    starts: Tensor
    slot_pair: Tensor
    slot_weight: Tensor
    x: Tensor
    groups: int


@triton.jit
def _first_slot(below, expert):
    return (below + 7) // 8 * 8 + 8 * expert


@triton.jit
def _assign(
    ids, weights, starts, pair_slot, slot_pair, slot_weight, pairs, rows, num_experts, BLOCK: tl.constexpr
):  # fmt: skip
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    below, equal = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for first in range(0, pairs, BLOCK):
        chosen = tl.load(ids + first + lane, mask=first + lane < pairs, other=num_experts)
        below += (chosen < expert).to(tl.int32)
        equal += (chosen == expert).to(tl.int32)
    start, count = tl.sum(below, 0), tl.sum(equal, 0)
    tl.store(starts + expert, start)
    if expert == num_experts - 1:
        tl.store(starts + num_experts, start + count)
        tl.store(starts + num_experts + 1, start + count + rows)
    if count > 0:
        place = _first_slot(start, expert)
        for first in range(0, pairs, BLOCK):
            pair = first + lane
            chosen = tl.load(ids + pair, mask=pair < pairs, other=num_experts)
            mine = (chosen == expert).to(tl.int32)
            slot = place + tl.cumsum(mine, 0) - mine
            tl.store(pair_slot + pair, slot, mask=mine > 0)
            tl.store(slot_pair + slot, pair, mask=mine > 0)
            tl.store(slot_weight + slot, tl.load(weights + pair, mask=mine > 0, other=0.0), mask=mine > 0)
            place += tl.sum(mine, 0)


@triton.jit
def _spread(
    x, pair_slot, slot_pair, slot_weight, out, dim, groups, pairs, shared_start, TOP_K: tl.constexpr,
    SHARED: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    chunk = part * CHUNKS + tl.arange(0, CHUNKS)
    inside = (chunk * 8 < dim)[:, None]
    values = tl.load(x + row.to(tl.int64) * dim + chunk[:, None] * 8 + tl.arange(0, 8)[None, :], mask=inside, other=0.0)
    cast = tl.reshape(cast_q8(tl.reshape(values.to(tl.float32), (CHUNKS // 4, 32)), 1), (CHUNKS, 8))
    cast = round_bf16(cast)
    for place in tl.static_range(TOP_K + SHARED):
        slot = tl.load(pair_slot + row * TOP_K + place) if place < TOP_K else shared_start + row
        turned = chunk // 8 * 8 + ((chunk % 8) ^ (slot % 8))
        block = (chunk // 8).to(tl.int64) * groups + slot // 8
        target = block * 512 + slot % 8 * 64 + turned % 8 * 8
        tl.store(out + target[:, None] + tl.arange(0, 8)[None, :], cast, mask=inside)
    tl.store(slot_pair + shared_start + row, pairs + row, mask=SHARED and part == 0)
    tl.store(slot_weight + shared_start + row, 1.0, mask=SHARED and part == 0)


def spread_rows(x: Tensor, ids: Tensor, weights: Tensor, num_experts: int, *, shared: bool) -> Slots:
    """x bfloat16 [R, D], ids and weights [R, k], all contiguous."""
    rows, dim = x.shape
    pairs, top_k = ids.numel(), ids.shape[1]
    shared_start = -(-pairs // 8) * 8 + 8 * num_experts
    slots = shared_start + (-(-rows // 8) * 8 if shared else 0) + SLACK
    pair_slot, slot_pair = (torch.empty(n, dtype=torch.int32, device=x.device) for n in (pairs, slots))
    starts = torch.empty(num_experts + 2, dtype=torch.int32, device=x.device)
    slot_weight = torch.empty(slots, dtype=torch.float32, device=x.device)
    out = torch.empty(dim * slots, dtype=torch.bfloat16, device=x.device)
    block = min(4096, max(128, triton.next_power_of_2(pairs)))
    _assign[(num_experts,)](
        ids, weights, starts, pair_slot, slot_pair, slot_weight, pairs, rows, num_experts, BLOCK=block, num_warps=8
    )
    chunks = min(128, triton.next_power_of_2(dim // 8))
    _spread[(rows, triton.cdiv(dim // 8, chunks))](
        x, pair_slot, slot_pair, slot_weight, out, dim, slots // 8, pairs, shared_start, TOP_K=top_k, SHARED=shared,
        CHUNKS=chunks, num_warps=4, **EXACT_OPTIONS,
    )  # fmt: skip
    return Slots(starts, slot_pair, slot_weight, out, slots // 8)
