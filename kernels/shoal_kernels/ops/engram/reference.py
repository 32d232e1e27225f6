"""Plain torch Engram gather and gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal_kernels import arith, formats
from shoal_kernels.precision import Precision

if TYPE_CHECKING:
    from shoal_kernels.ops.engram import EngramTable


def engram_gather(table: EngramTable, rows: Tensor, precision: Precision) -> Tensor:
    """rows [R, C] -> [R, C * head_dim]."""
    safe = rows.clamp_min(0)
    values = formats.decode_q8(table.data[safe], table.scales[safe])  # [R, C, head_dim]
    return torch.where((rows < 0)[..., None], 0.0, values).flatten(1).to(precision.dtype)


def engram_gate(
    streams: Tensor, kv: Tensor, weight: Tensor, skip: Tensor, rms_eps: float, precision: Precision
) -> Tensor:
    """streams [R, N, D], kv [R, (N+1)*D], weight [N, D], skip [R] -> [R, N, D]."""
    n, d = weight.shape
    keys = kv[:, : n * d].reshape(-1, n, d)
    value = kv[:, n * d :]
    dot = arith.tree_sum((streams * weight) * keys)
    dot = dot * arith.rsqrt(arith.tree_sum(streams * streams) / d + rms_eps)
    dot = dot * arith.rsqrt(arith.tree_sum(keys * keys) / d + rms_eps)
    dot = dot * float(d) ** -0.5
    magnitude = dot.abs()
    root = arith.sqrt(torch.where(magnitude > 1e-6, magnitude, 1e-6))
    g = arith.sigmoid(torch.sign(dot) * root)
    mixed = precision.bf16(streams + g[..., None] * value[:, None, :])
    return torch.where(skip[:, None, None], streams, mixed)
