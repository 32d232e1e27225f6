"""Plain torch pair pooling; what is fused on accelerators, put together from the host's operations."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal_kernels import arith
from shoal_kernels.paged_rows import PagedRows
from shoal_kernels.precision import Precision
from shoal_kernels.registry import resolve


def pool_pairs(score: Tensor, value: Tensor, precision: Precision) -> Tensor:
    """score, value [2, R, d] -> [R, d]."""
    largest = torch.where(score[0] > score[1], score[0], score[1])
    first, second = arith.exp(score[0] - largest), arith.exp(score[1] - largest)
    total = first + second
    return precision.bf16((first / total) * value[0] + (second / total) * value[1])


def store_main(
    raw: Tensor,
    ring: Tensor,
    members: Tensor,
    weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    pages: PagedRows,
    block_ids: Tensor,
    slots: Tensor,
    precision: Precision,
) -> Tensor:
    """raw [rows, ratio*d], ring [P, ratio, d], members [ratio, n] -> latent [n, d]."""
    ratio, device = members.shape[0], raw.device.type
    kept = ring.shape[0]
    rows = raw.unflatten(1, (ratio, -1))  # [rows, ratio, d]
    groups = rows.new_empty(*members.shape, *rows.shape[1:])  # [ratio members, n, score | value, d]
    is_kept = members < kept
    groups[is_kept] = ring[members[is_kept]]
    groups[~is_kept] = rows[members[~is_kept] - kept]
    if ratio == 1:
        pooled = precision.bf16(groups[0, :, 0])
    else:
        pooled = resolve("pool_pairs", device, precision)(groups[:, :, 0], groups[:, :, 1], precision)
    latent: Tensor = resolve("rms_norm", device, precision)(pooled, weight, eps, precision)
    rotated = resolve("rope", device, precision)(latent[:, None], positions, cos_sin, False, precision)
    pages.write(block_ids, slots, rotated[:, 0])
    return latent


def store_key(
    x: Tensor,
    weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    pages: PagedRows,
    block_ids: Tensor,
    slots: Tensor,
    precision: Precision,
) -> None:
    """x [n, d] into the places (block_ids [n], slots [n])."""
    rotated = resolve("rms_norm_rope", x.device.type, precision)(x, weight, eps, positions, cos_sin, precision)
    pages.write(block_ids, slots, rotated)
