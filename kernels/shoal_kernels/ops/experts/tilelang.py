# mypy: ignore-errors
"""Experts on Hopper: TileLang launches a kernel whose body is CUDA, since the words are decoded between shared memory
and the tensor core, in the registers that are its left operand. Other chips and widths have the Triton kernels."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal_kernels.ops.experts import triton as general
from shoal_kernels.ops.experts.hopper import compiled
from shoal_kernels.ops.experts.triton_routing import combine
from shoal_kernels.ops.experts.triton_slots import spread_rows
from shoal_kernels.precision import Precision

if TYPE_CHECKING:
    from shoal_kernels.ops.experts import ExpertWeights

_COLUMNS = (16, 32, 48, 64, 96, 128)


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, expert_weights: ExpertWeights, limit: float, precision: Precision
) -> Tensor:
    """x [R, D], ids [R, k], weights [R, k] -> [R, D]."""
    if not x.shape[0] or not _is_served(expert_weights, x.device.index):
        return general.experts(x, ids, weights, expert_weights, limit, precision)
    return _run(x, ids, weights, expert_weights, None, limit)


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
    if not x.shape[0] or not _is_served(expert_weights, x.device.index):
        return general.moe(x, ids, weights, expert_weights, shared, limit, precision)
    return _run(x, ids, weights, expert_weights, shared, limit)


def _is_served(weights: ExpertWeights, device: int | None) -> bool:
    return weights.dim % 256 == 0 and weights.inner % 256 == 0 and _is_hopper(device)


@functools.cache
def _is_hopper(device: int | None) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


def row_tile(pairs: int, num_experts: int) -> int:
    """Rows of an expert that one tile takes: about what an expert gets. It changes no bits."""
    expected = -(-pairs // num_experts)
    each = -(-expected // -(-expected // _COLUMNS[-1]))
    return next(columns for columns in _COLUMNS if columns >= each)


def _run(
    x: Tensor, ids: Tensor, weights: Tensor, routed: ExpertWeights, shared: ExpertWeights | None, limit: float
) -> Tensor:
    rows, (count, dim, inner) = x.shape[0], (routed.num_experts, routed.dim, routed.inner)
    ids = ids.contiguous()
    pairs = ids.numel()
    slots = spread_rows(x.contiguous(), ids, weights.contiguous(), count, shared=shared is not None)
    columns = row_tile(pairs, count)
    tiles = min(pairs, -(-pairs // columns) + count) + (0 if shared is None else -(-rows // columns))
    u = torch.empty(inner * slots.groups * 8, dtype=x.dtype, device=x.device)
    parts = torch.empty(pairs + (0 if shared is None else rows), dim, dtype=x.dtype, device=x.device)
    other = routed if shared is None else shared
    common = {"columns": columns, "experts": count, "shared": shared is not None}
    places = slots.starts, slots.slot_pair, slots.slot_weight
    for kernel, source, side, out in (
        (compiled(rows=2 * inner, blocks=dim // 256, gate_up=True, **common), slots.x, "gate_up", u),
        (compiled(rows=dim, blocks=inner // 256, gate_up=False, **common), u, "down", parts.view(-1)),
    ):
        words, scales, other_words, other_scales = (
            getattr(each, name).view(-1) for each in (routed, other) for name in (side, f"{side}_scale")
        )
        kernel(source, words, scales, other_words, other_scales, *places, out, limit, slots.groups, tiles)
    both = None if shared is None else parts[pairs:]
    return combine(ids, parts[:pairs].view(rows, ids.shape[1], dim), both)
