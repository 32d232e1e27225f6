"""Plain torch experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal_kernels import arith
from shoal_kernels.ops.cast import cast_q8
from shoal_kernels.precision import Precision

if TYPE_CHECKING:
    from shoal_kernels.ops.experts import ExpertWeights


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, expert_weights: ExpertWeights, limit: float, precision: Precision
) -> Tensor:
    """x [R, D], ids [R, k], weights [R, k] -> [R, D]."""
    total = torch.zeros_like(x)
    for expert in range(expert_weights.num_experts):
        rows, places = torch.nonzero(ids == expert, as_tuple=True)
        if rows.numel():
            gate_up, down = expert_weights.gate_up[expert], expert_weights.down[expert]
            total[rows] += _expert(x[rows], weights[rows, places], gate_up, down, limit, precision)
    return total


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
    routed = experts(x, ids, weights, expert_weights, limit, precision)
    one = torch.ones(x.shape[0], dtype=x.dtype, device=x.device)
    return precision.bf16(routed + _expert(x, one, shared.gate_up[0], shared.down[0], limit, precision))


def _expert(x: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, limit: float, precision: Precision) -> Tensor:
    """x [n, D], weight [n], gate_up [D, 2*I], down [I, D] -> [n, D]."""
    x = cast_q8(x, precision=precision, backend="reference")
    hidden = precision.bf16(arith.matmul(x, gate_up))
    gate, up = hidden.chunk(2, dim=1)
    gate = torch.where(gate < limit, gate, limit)
    up = torch.where(up < limit, up, limit)
    up = torch.where(up > -limit, up, -limit)
    u = (arith.silu(gate) * up) * weight[:, None]
    return precision.bf16(arith.matmul(cast_q8(u, precision=precision, backend="reference"), down))
