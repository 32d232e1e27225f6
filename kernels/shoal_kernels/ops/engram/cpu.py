"""Compiled Engram gather and gate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from shoal_kernels.arith_nb import ONE, ZERO, bf16, power_of_two, rsqrt, sigmoid, tree_sum
from shoal_kernels.jit import kernel
from shoal_kernels.norm_rope_nb import mean_square
from shoal_kernels.precision import Precision
from shoal_kernels.records_nb import decode_window

if TYPE_CHECKING:
    from shoal_kernels.ops.engram import EngramTable

_FLOOR = np.float32(1e-6)


@kernel("void(u1[:, ::1], u1[:, ::1], i8[:, ::1], f4[:, ::1])")
def _gather(data: Any, scales: Any, rows: Any, out: Any) -> None:
    dim = data.shape[1]
    for r in range(rows.shape[0]):
        for column in range(rows.shape[1]):
            target = out[r, column * dim : (column + 1) * dim]
            row = rows[r, column]
            if row < 0:
                for i in range(dim):
                    target[i] = ZERO
            else:
                decode_window(data[row], scales[row], target)


@kernel("void(f4[:, :, ::1], f4[:, ::1], f4[:, ::1], b1[::1], f8, f8, f4[:, :, ::1])")
def _gate(streams: Any, kv: Any, weight: Any, skip: Any, root: Any, rms_eps: Any, out: Any) -> None:
    rows, n, d = streams.shape
    scratch = np.empty(power_of_two(d), np.float32)
    eps = np.float32(rms_eps)
    for r in range(rows):
        value = kv[r, n * d :]
        for i in range(n):
            x, target = streams[r, i], out[r, i]
            if skip[r]:
                for c in range(d):
                    target[c] = x[c]
                continue
            key, w = kv[r, i * d : (i + 1) * d], weight[i]
            for c in range(d):
                scratch[c] = (x[c] * w[c]) * key[c]
            dot = tree_sum(scratch, d)
            dot = dot * rsqrt(mean_square(x, scratch) + eps)
            dot = dot * rsqrt(mean_square(key, scratch) + eps)
            dot = dot * np.float32(root)
            magnitude = abs(dot)
            magnitude = np.sqrt(magnitude if magnitude > _FLOOR else _FLOOR)
            sign = ONE if dot > ZERO else (-ONE if dot < ZERO else ZERO)
            g = sigmoid(sign * magnitude)
            for c in range(d):
                target[c] = bf16(x[c] + g * value[c])


def engram_gather(table: EngramTable, rows: Tensor, precision: Precision) -> Tensor:
    """rows [R, C] -> [R, C * head_dim]."""
    out = torch.empty(rows.shape[0], rows.shape[1] * table.data.shape[1])
    _gather(table.data.numpy(), table.scales.numpy(), rows.contiguous().numpy(), out.numpy())
    return out


def engram_gate(
    streams: Tensor, kv: Tensor, weight: Tensor, skip: Tensor, rms_eps: float, precision: Precision
) -> Tensor:
    """streams [R, N, D], kv [R, (N+1)*D], weight [N, D], skip [R] -> [R, N, D]."""
    out = torch.empty(streams.shape)
    _gate(
        streams.contiguous().numpy(),
        kv.contiguous().numpy(),
        weight.contiguous().numpy(),
        skip.contiguous().numpy(),
        float(streams.shape[2]) ** -0.5,
        rms_eps,
        out.numpy(),
    )
    return out
