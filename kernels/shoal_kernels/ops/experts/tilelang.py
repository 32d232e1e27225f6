# mypy: ignore-errors
"""Experts on Hopper: TileLang launches a kernel whose body is CUDA, since the words are decoded between shared memory
and the tensor core, in the registers that are its left operand. Other chips and widths have the Triton kernels."""

from __future__ import annotations

import functools
import math
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


def row_tile(expected: int, *, certain: bool) -> int:
    """Rows of an expert that one tile takes, for the number of rows that an expert gets. It changes no bits.

    Few rows should fit one tile, since the next one reads the expert again: unless their number is certain, two
    standard deviations are added.
    """
    if not certain and expected <= _COLUMNS[-1]:
        expected += 2 * math.isqrt(expected)
    each = -(-expected // -(-expected // _COLUMNS[-1]))
    return next(columns for columns in _COLUMNS if columns >= each)


def _run(
    x: Tensor, ids: Tensor, weights: Tensor, routed: ExpertWeights, shared: ExpertWeights | None, limit: float
) -> Tensor:
    rows, (count, dim, inner) = x.shape[0], (routed.num_experts, routed.dim, routed.inner)
    ids = ids.contiguous()
    pairs = ids.numel()
    slots = spread_rows(x.contiguous(), ids, weights.contiguous(), count, shared=shared is not None)
    u = torch.empty(inner * slots.groups * 8, dtype=x.dtype, device=x.device)
    parts = torch.empty(pairs + (0 if shared is None else rows), dim, dtype=x.dtype, device=x.device)
    other = routed if shared is None else shared
    places = slots.starts, slots.slot_pair, slots.slot_weight
    launches = _launches(pairs, rows, count, shared is not None)
    for side, depth, out_rows, source, out in (
        ("gate_up", dim, 2 * inner, slots.x, u),
        ("down", inner, dim, u, parts.view(-1)),
    ):
        stored = [getattr(each, name).view(-1) for each in (routed, other) for name in (side, f"{side}_scale")]
        for columns, first, last, tiles in launches:
            kernel = compiled(columns=columns, rows=out_rows, blocks=depth // 256, gate_up=side == "gate_up")
            late = side == "down" and (columns, first, last, tiles) == launches[-1]
            kernel(source, *stored, *places, out, limit, slots.groups, count, first, last, int(late), tiles)
    both = None if shared is None else parts[pairs:]
    return combine(ids, parts[:pairs].view(rows, ids.shape[1], dim), both, overlaps=True)


def _launches(pairs: int, rows: int, count: int, shared: bool) -> list[tuple[int, int, int, int]]:
    """(columns, first and last expert, row tiles) of every grid; the shared expert joins the others if it has about as
    many rows as one of them, else its many rows would run in their narrow tiles."""
    columns = row_tile(-(-pairs // count), certain=pairs == rows * count)
    own = row_tile(rows, certain=True)
    tiles, own_tiles = min(pairs, -(-pairs // columns) + count), -(-rows // own)
    if not shared:
        return [(columns, 0, count, tiles)]
    if own <= columns:
        return [(columns, 0, count + 1, tiles + -(-rows // columns))]
    return [(columns, 0, count, tiles), (own, count, count + 1, own_tiles)]
