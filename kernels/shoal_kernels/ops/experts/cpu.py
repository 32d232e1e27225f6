"""Compiled experts: rows are gathered per expert, so a weight is read once per step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from shoal_kernels.arith_nb import ONE, ZERO, bf16, q8_row, silu
from shoal_kernels.gemm_nb import gemm
from shoal_kernels.jit import inline, kernel
from shoal_kernels.precision import Precision
from shoal_kernels.threads import for_row_ranges

if TYPE_CHECKING:
    from shoal_kernels.ops.experts import ExpertWeights


@inline
def _apply(x: Any, weight: Any, gate_up: Any, down: Any, limit: Any, out: Any) -> None:
    """out [n, D] = the expert's output, not rounded; x [n, D] is cast, weight [n]."""
    rows, inner = x.shape[0], down.shape[0]
    hidden = np.empty((rows, 2 * inner), np.float32)
    gemm(x, gate_up, hidden)
    u = np.empty((rows, inner), np.float32)
    for r in range(rows):
        gates, ups, target, w = hidden[r, :inner], hidden[r, inner:], u[r], weight[r]
        for i in range(inner):
            gate, up = bf16(gates[i]), bf16(ups[i])
            gate = gate if gate < limit else limit
            up = up if up < limit else limit
            up = up if up > -limit else -limit
            target[i] = (silu(gate) * up) * w
        q8_row(target, target)
    gemm(u, down, out)


@kernel("void(f4[:, ::1], i4[:, ::1], f4[:, ::1], f4[:, :, ::1], f4[:, :, ::1], f8, f4[:, ::1])")
def _routed(x: Any, ids: Any, weights: Any, gate_up: Any, down: Any, limit: Any, total: Any) -> None:
    rows, dim = x.shape
    experts = gate_up.shape[0]
    places = np.empty((experts, rows), np.int64)
    counts = np.zeros(experts, np.int64)
    for r in range(rows):
        for place in range(ids.shape[1]):
            e = ids[r, place]
            places[e, counts[e]] = r * ids.shape[1] + place
            counts[e] += 1
    for r in range(rows):
        target = total[r]
        for d in range(dim):
            target[d] = ZERO
    for e in range(experts):
        count = counts[e]
        if count == 0:
            continue
        part = np.empty((count, dim), np.float32)
        part_weight = np.empty(count, np.float32)
        out = np.empty((count, dim), np.float32)
        for i in range(count):
            r = places[e, i] // ids.shape[1]
            part_weight[i] = weights[r, places[e, i] % ids.shape[1]]
            part[i] = x[r]
        _apply(part, part_weight, gate_up[e], down[e], np.float32(limit), out)
        for i in range(count):
            target, source = total[places[e, i] // ids.shape[1]], out[i]
            for d in range(dim):
                target[d] = target[d] + bf16(source[d])


@kernel("void(f4[:, ::1], f4[:, ::1], f4[:, ::1], f8, f4[:, ::1])")
def _add_shared(x: Any, gate_up: Any, down: Any, limit: Any, total: Any) -> None:
    rows, dim = x.shape
    weight = np.full(rows, ONE, np.float32)
    out = np.empty((rows, dim), np.float32)
    _apply(x, weight, gate_up, down, np.float32(limit), out)
    for r in range(rows):
        target, source = total[r], out[r]
        for d in range(dim):
            target[d] = bf16(target[d] + bf16(source[d]))


@kernel("void(f4[:, ::1], f4[:, ::1])")
def _cast(x: Any, out: Any) -> None:
    for r in range(x.shape[0]):
        q8_row(x[r], out[r])


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, expert_weights: ExpertWeights, limit: float, precision: Precision
) -> Tensor:
    """x [R, D], ids [R, k], weights [R, k] -> [R, D]."""
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
    return _run(x, ids, weights, expert_weights, shared, limit)


def _run(
    x: Tensor, ids: Tensor, weights: Tensor, routed: ExpertWeights, shared: ExpertWeights | None, limit: float
) -> Tensor:
    out = torch.empty(x.shape)
    source, target = x.contiguous().numpy(), out.numpy()
    row_ids, row_weights = ids.contiguous().numpy(), weights.contiguous().numpy()
    gate_up, down = routed.gate_up.numpy(), routed.down.numpy()
    shared_pair = None if shared is None else (shared.gate_up[0].numpy(), shared.down[0].numpy())

    def body(first: int, last: int) -> None:
        part = slice(first, last)
        cast = np.empty((last - first, source.shape[1]), np.float32)
        _cast(source[part], cast)
        _routed(cast, row_ids[part], row_weights[part], gate_up, down, limit, target[part])
        if shared_pair is not None:
            _add_shared(cast, *shared_pair, limit, target[part])

    for_row_ranges(x.shape[0], body)
    return out
