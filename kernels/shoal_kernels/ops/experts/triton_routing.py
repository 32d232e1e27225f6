# mypy: ignore-errors
"""What stands around the two products of the experts: cast, sort by expert, sum over a row's experts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from shoal_kernels.triton_lib import EXACT_OPTIONS, cast_q8, round_bf16


@triton.jit
def _cast(x, out, dim, GROUPS: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = part * GROUPS * 32 + tl.arange(0, GROUPS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    values = tl.load(x + row * dim + columns, mask=columns < dim, other=0.0).to(tl.float32)
    tl.store(out + row * dim + columns, round_bf16(cast_q8(values, 1)), mask=columns < dim)


@triton.jit
def _sort(ids, starts, order, pairs, num_experts, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    below, equal = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for first in range(0, pairs, BLOCK):
        chosen = tl.load(ids + first + lane, mask=first + lane < pairs, other=num_experts)
        below += (chosen < expert).to(tl.int32)
        equal += (chosen == expert).to(tl.int32)
    place = tl.sum(below, 0)
    tl.store(starts + expert, place)
    if expert == num_experts - 1:
        tl.store(starts + num_experts, place + tl.sum(equal, 0))
    if tl.sum(equal, 0) > 0:
        for first in range(0, pairs, BLOCK):
            chosen = tl.load(ids + first + lane, mask=first + lane < pairs, other=num_experts)
            mine = (chosen == expert).to(tl.int32)
            tl.store(order + place + tl.cumsum(mine, 0) - mine, first + lane, mask=mine > 0)
            place += tl.sum(mine, 0)


@triton.jit
def _combine(
    ids, parts, shared, out, dim, TOP_K: tl.constexpr, SLOTS: tl.constexpr, HAS_SHARED: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < dim
    slot = tl.arange(0, SLOTS)
    chosen = tl.load(ids + row * TOP_K + slot, mask=slot < TOP_K, other=0x7FFFFFFF)
    if OVERLAPS:
        gdc_wait()
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(TOP_K):
        smallest = tl.min(chosen, 0)
        place = tl.sum(tl.where(chosen == smallest, slot, 0), 0)
        total += tl.load(parts + (row * TOP_K + place) * dim + columns, mask=inside, other=0.0).to(tl.float32)
        chosen = tl.where(chosen == smallest, 0x7FFFFFFF, chosen)
    if HAS_SHARED:
        total += tl.load(shared + row * dim + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * dim + columns, round_bf16(total), mask=inside)
    else:
        tl.store(out + row * dim + columns, total, mask=inside)


def cast_rows(x: torch.Tensor) -> torch.Tensor:
    """x bfloat16 [R, D] -> bfloat16 [R, D] of the values that Q8 keeps."""
    rows, dim = x.shape
    out = torch.empty_like(x)
    groups = min(64, triton.next_power_of_2(-(-dim // 32)))
    _cast[(rows, triton.cdiv(dim, groups * 32))](x, out, dim, GROUPS=groups, num_warps=4, **EXACT_OPTIONS)
    return out


def sort_pairs(ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids int32 [R, k] -> starts int32 [E + 1], order int32 [R * k]: the pairs row * k + place, expert by expert.

    Within an expert pairs stand in ascending order.
    """
    pairs = ids.numel()
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=ids.device)
    order = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    block = min(4096, max(128, triton.next_power_of_2(pairs)))
    _sort[(num_experts,)](ids, starts, order, pairs, num_experts, BLOCK=block, num_warps=8)
    return starts, order


def combine(
    ids: torch.Tensor, parts: torch.Tensor, shared: torch.Tensor | None, *, overlaps: bool = False
) -> torch.Tensor:
    """parts bfloat16 [R, k, D] in the places of `ids` [R, k] -> their float32 sum in ascending expert id [R, D].

    With `shared` bfloat16 [R, D], which is added last, the sum is rounded to bfloat16. `overlaps` (from SM90 on): the
    kernel is launched before the grid in front, which writes `parts`, has ended, if that grid lets it.
    """
    rows, top_k, dim = parts.shape
    dtype = torch.float32 if shared is None else torch.bfloat16
    out = torch.empty(rows, dim, dtype=dtype, device=parts.device)
    block = min(1024, triton.next_power_of_2(dim))
    _combine[(rows, triton.cdiv(dim, block))](
        ids, parts, parts if shared is None else shared, out, dim, TOP_K=top_k, SLOTS=triton.next_power_of_2(top_k),
        HAS_SHARED=shared is not None, BLOCK=block, OVERLAPS=overlaps, num_warps=4,
        **({"launch_pdl": True} if overlaps else {}),
    )  # fmt: skip
    return out
