"""Plain torch hyper-connections."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from shoal_kernels import arith
from shoal_kernels.ops.cast.reference import cast_q8
from shoal_kernels.ops.norm_rope.reference import rms_norm
from shoal_kernels.precision import Precision

if TYPE_CHECKING:
    from shoal_kernels.ops.hyper_connections import MixWeight


def mix(
    streams: Tensor, weight: MixWeight, iterations: int, eps: float, rms_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """streams [R, N, D] -> pre [R, N], post [R, N], comb [R, N, N]."""
    rows, n, d = streams.shape
    flat = streams.reshape(rows, n * d)  # [R, N*D]
    mean = arith.tree_sum(flat * flat) / flat.shape[1]
    m = arith.matmul(flat, weight.fn) * arith.rsqrt(mean + rms_eps)[:, None]  # [R, (2+N)*N]
    scale, base = weight.scale, weight.base
    pre = arith.sigmoid(m[:, :n] * scale[0] + base[:n]) + eps
    post = 2.0 * arith.sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    c = (m[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(rows, n, n)
    c = arith.exp(c - c.amax(-1, keepdim=True))
    c = c / arith.tree_sum(c)[..., None] + eps
    c = c / (arith.tree_sum(c.transpose(1, 2))[:, None, :] + eps)
    for _ in range(iterations - 1):
        c = c / (arith.tree_sum(c)[..., None] + eps)
        c = c / (arith.tree_sum(c.transpose(1, 2))[:, None, :] + eps)
    return pre, post, c


def collapse(streams: Tensor, pre: Tensor, precision: Precision) -> Tensor:
    """streams [R, N, D], pre [R, N] -> [R, D]."""
    total = pre[:, 0, None] * streams[:, 0]
    for n in range(1, streams.shape[1]):
        total = total + pre[:, n, None] * streams[:, n]
    return precision.bf16(total)


def collapse_norm(streams: Tensor, pre: Tensor, weight: Tensor, eps: float, precision: Precision) -> Tensor:
    """streams [R, N, D], pre [R, N], weight [D] -> [R, D]."""
    return rms_norm(collapse(streams, pre, precision), weight, eps, precision)


def expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, precision: Precision) -> Tensor:
    """y [R, D], streams [R, N, D], post [R, N], comb [R, N, N] -> [R, N, D]."""
    total = post[:, :, None] * y[:, None, :]
    for j in range(streams.shape[1]):
        total = total + comb[:, j, :, None] * streams[:, j, None, :]
    return precision.bf16(total)


def collapse_norm_cast(
    streams: Tensor, pre: Tensor, weight: Tensor, eps: float, precision: Precision
) -> tuple[Tensor, Tensor]:
    """streams [R, N, D], pre [R, N], weight [D] -> [R, D] and its Q8 values."""
    normed = collapse_norm(streams, pre, weight, eps, precision)
    return normed, cast_q8(normed) if precision.cast_activations else normed


def expand_norm(
    y: Tensor,
    streams: Tensor,
    post: Tensor,
    comb: Tensor,
    pre: Tensor,
    weight: Tensor,
    eps: float,
    cast: bool,
    precision: Precision,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """expand, then collapse_norm or collapse_norm_cast of the new streams."""
    after = expand(y, streams, post, comb, precision)
    if not cast:
        return after, collapse_norm(after, pre, weight, eps, precision), None
    return after, *collapse_norm_cast(after, pre, weight, eps, precision)
