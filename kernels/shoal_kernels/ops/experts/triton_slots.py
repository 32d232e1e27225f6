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
from triton.language.extra.cuda import gdc_launch_dependents

from shoal_kernels.triton_lib import EXACT_OPTIONS, IS_INTERPRETED, cast_q8, round_bf16

SLACK = 128
"""Slots behind the last one that a tile of rows may read."""
_FEW = 1024
"""Pairs up to which programs find their slots themselves."""


_INTERPRETED = tl.constexpr(IS_INTERPRETED)


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
def _assign(ids, weights, starts, pair_slot, slot_pair, slot_weight, pairs, rows, num_experts, BLOCK: tl.constexpr):
    """The slots of one expert's pairs among BLOCK pairs."""
    expert, part = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    # Pairs of lower experts, and pairs of this one in front of the part.
    below, before = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for first in range(0, pairs, BLOCK):
        chosen = tl.load(ids + first + lane, mask=first + lane < pairs, other=num_experts)
        below += (chosen < expert).to(tl.int32)
        before += ((chosen == expert) & (first < part * BLOCK)).to(tl.int32)
    start = tl.sum(below, 0)
    place = _first_slot(start, expert) + tl.sum(before, 0)
    pair = part * BLOCK + lane
    mine = (tl.load(ids + pair, mask=pair < pairs, other=num_experts) == expert).to(tl.int32)
    slot = place + tl.cumsum(mine, 0) - mine
    tl.store(pair_slot + pair, slot, mask=mine > 0)
    tl.store(slot_pair + slot, pair, mask=mine > 0)
    tl.store(slot_weight + slot, tl.load(weights + pair, mask=mine > 0, other=0.0), mask=mine > 0)
    if part == 0:
        tl.store(starts + expert, start)
        tl.store(starts + num_experts, pairs)
        tl.store(starts + num_experts + 1, pairs + rows)


@triton.jit
def _store_row(out, values, chunk, inside, slot, groups):
    """values [chunks, 8] of a row to its slot."""
    turned = (chunk % 8) ^ (slot % 8)
    target = ((chunk // 8).to(tl.int64) * groups + slot // 8) * 512 + slot % 8 * 64 + turned * 8
    tl.store(out + target[:, None] + tl.arange(0, 8)[None, :], values, mask=inside)


@triton.jit
def _cast_chunks(x, row, dim, chunk, inside, CHUNKS: tl.constexpr):
    """Q8 values of a part of a row, bfloat16 [chunks, 8]."""
    values = tl.load(x + row.to(tl.int64) * dim + chunk[:, None] * 8 + tl.arange(0, 8)[None, :], mask=inside, other=0.0)
    cast = cast_q8(tl.reshape(values.to(tl.float32), (CHUNKS // 4, 32)), 1)
    return tl.reshape(round_bf16(cast), (CHUNKS, 8))


@triton.jit
def _spread(
    x, pair_slot, slot_pair, slot_weight, out, dim, groups, pairs, shared_start, TOP_K: tl.constexpr,
    SHARED: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    chunk = part * CHUNKS + tl.arange(0, CHUNKS)
    inside = (chunk * 8 < dim)[:, None]
    cast = _cast_chunks(x, row, dim, chunk, inside, CHUNKS)
    for place in tl.static_range(TOP_K + SHARED):
        slot = tl.load(pair_slot + row * TOP_K + place) if place < TOP_K else shared_start + row
        _store_row(out, cast, chunk, inside, slot, groups)
    tl.store(slot_pair + shared_start + row, pairs + row, mask=SHARED and part == 0)
    tl.store(slot_weight + shared_start + row, 1.0, mask=SHARED and part == 0)


@triton.jit
def _assign_and_spread(
    x, ids, weights, starts, slot_pair, slot_weight, out, dim, groups, pairs, rows, num_experts, shared_start,
    TOP_K: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For few pairs: every program finds the slot of its row and place itself, from all ids."""
    if not _INTERPRETED:
        gdc_launch_dependents()  # The products' grid waits for this one before it reads.
    row, part, place = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    pair = tl.arange(0, BLOCK)
    everyone = tl.load(ids + pair, mask=pair < pairs, other=num_experts)
    mine = row * TOP_K + place
    expert = tl.load(ids + mine, mask=place < TOP_K, other=num_experts)
    chunk = part * CHUNKS + tl.arange(0, CHUNKS)
    inside = (chunk * 8 < dim)[:, None]
    cast = _cast_chunks(x, row, dim, chunk, inside, CHUNKS)
    # One sum of both counts: pairs of lower experts above, pairs of this expert in front of this one below.
    lower = (everyone < expert).to(tl.int32) << 16
    counts = tl.sum(lower + ((everyone == expert) & (pair < mine)).to(tl.int32), 0)
    slot = tl.where(place < TOP_K, _first_slot(counts >> 16, expert) + (counts & 0xFFFF), shared_start + row)
    _store_row(out, cast, chunk, inside, slot, groups)
    weight = tl.load(weights + mine, mask=place < TOP_K, other=1.0)
    tl.store(slot_pair + slot, tl.where(place < TOP_K, mine, pairs + row), mask=part == 0)
    tl.store(slot_weight + slot, weight, mask=part == 0)
    index = (row * tl.num_programs(2) + place) * tl.num_programs(1) + part
    for other in range(index, num_experts + 2, tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)):
        below = tl.sum((everyone < tl.minimum(other, num_experts)).to(tl.int32), 0)
        tl.store(starts + other, tl.where(other > num_experts, pairs + rows, below))


def spread_rows(x: Tensor, ids: Tensor, weights: Tensor, num_experts: int, *, shared: bool) -> Slots:
    """x bfloat16 [R, D], ids and weights [R, k], all contiguous."""
    rows, dim = x.shape
    pairs, top_k = ids.numel(), ids.shape[1]
    shared_start = -(-pairs // 8) * 8 + 8 * num_experts
    slots = shared_start + (-(-rows // 8) * 8 if shared else 0) + SLACK
    slot_pair = torch.empty(slots, dtype=torch.int32, device=x.device)
    starts = torch.empty(num_experts + 2, dtype=torch.int32, device=x.device)
    slot_weight = torch.empty(slots, dtype=torch.float32, device=x.device)
    out = torch.empty(dim * slots, dtype=torch.bfloat16, device=x.device)
    chunks = min(128, triton.next_power_of_2(dim // 8))
    parts = triton.cdiv(dim // 8, chunks)
    if pairs <= _FEW:
        _assign_and_spread[(rows, parts, top_k + shared)](
            x, ids, weights, starts, slot_pair, slot_weight, out, dim, slots // 8, pairs, rows, num_experts,
            shared_start, TOP_K=top_k, CHUNKS=chunks, BLOCK=128 if pairs <= 128 else 1024, num_warps=4, **EXACT_OPTIONS,
        )  # fmt: skip
    else:
        pair_slot = torch.empty(pairs, dtype=torch.int32, device=x.device)
        block = 1024 if pairs <= 8192 else 4096
        _assign[(num_experts, triton.cdiv(pairs, block))](
            ids, weights, starts, pair_slot, slot_pair, slot_weight, pairs, rows, num_experts, BLOCK=block, num_warps=8
        )
        _spread[(rows, parts)](
            x, pair_slot, slot_pair, slot_weight, out, dim, slots // 8, pairs, shared_start, TOP_K=top_k,
            SHARED=shared, CHUNKS=chunks, num_warps=4, **EXACT_OPTIONS,
        )  # fmt: skip
    return Slots(starts, slot_pair, slot_weight, out, slots // 8)
