"""Compiled hyper-connections."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from shoal_kernels.arith_nb import TWO, bf16, exp, power_of_two, rsqrt, sigmoid, tree_sum
from shoal_kernels.gemm_nb import gemm
from shoal_kernels.jit import inline, kernel
from shoal_kernels.norm_rope_nb import mean_square, norm_row
from shoal_kernels.ops.cast.cpu import cast_q8
from shoal_kernels.precision import Precision
from shoal_kernels.threads import for_row_ranges

if TYPE_CHECKING:
    from shoal_kernels.ops.hyper_connections import MixWeight


@inline
def _divide_rows(c: Any, eps: Any, scratch: Any) -> None:
    for j in range(c.shape[0]):
        for k in range(c.shape[1]):
            scratch[k] = c[j, k]
        total = tree_sum(scratch, c.shape[1]) + eps
        for k in range(c.shape[1]):
            c[j, k] = c[j, k] / total


@inline
def _divide_columns(c: Any, eps: Any, scratch: Any) -> None:
    for k in range(c.shape[1]):
        for j in range(c.shape[0]):
            scratch[j] = c[j, k]
        total = tree_sum(scratch, c.shape[0]) + eps
        for j in range(c.shape[0]):
            c[j, k] = c[j, k] / total


@inline
def _sinkhorn(c: Any, iterations: Any, eps: Any, scratch: Any) -> None:
    for j in range(c.shape[0]):
        largest = c[j, 0]
        for k in range(1, c.shape[1]):
            largest = c[j, k] if c[j, k] > largest else largest
        for k in range(c.shape[1]):
            c[j, k] = exp(c[j, k] - largest)
            scratch[k] = c[j, k]
        total = tree_sum(scratch, c.shape[1])
        for k in range(c.shape[1]):
            c[j, k] = c[j, k] / total + eps
    _divide_columns(c, eps, scratch)
    for _ in range(iterations - 1):
        _divide_rows(c, eps, scratch)
        _divide_columns(c, eps, scratch)


@inline
def _sinkhorn_4(c: Any, iterations: Any, eps: Any) -> None:
    """_sinkhorn for four streams, held in registers; the tree of four terms is (x0 + x2) + (x1 + x3)."""
    for j in range(4):
        largest = max(max(c[j, 0], c[j, 1]), max(c[j, 2], c[j, 3]))
        for k in range(4):
            c[j, k] = exp(c[j, k] - largest)
        total = (c[j, 0] + c[j, 2]) + (c[j, 1] + c[j, 3])
        for k in range(4):
            c[j, k] = c[j, k] / total + eps
    for iteration in range(iterations):
        if iteration > 0:
            for j in range(4):
                total = ((c[j, 0] + c[j, 2]) + (c[j, 1] + c[j, 3])) + eps
                for k in range(4):
                    c[j, k] = c[j, k] / total
        for k in range(4):
            total = ((c[0, k] + c[2, k]) + (c[1, k] + c[3, k])) + eps
            for j in range(4):
                c[j, k] = c[j, k] / total


@kernel("void(f4[:, ::1], f4[:, ::1], f4[::1], f4[::1], i8, f8, f8, f4[:, ::1], f4[:, ::1], f4[:, :, ::1])")
def _mix(
    flat: Any, fn: Any, scale: Any, base: Any, iterations: Any, eps: Any, rms_eps: Any, pre: Any, post: Any, comb: Any
) -> None:
    rows, n = pre.shape
    m = np.empty((rows, fn.shape[1]), np.float32)
    gemm(flat, fn, m)
    scratch = np.empty(power_of_two(max(flat.shape[1], n)), np.float32)
    small_eps = np.float32(eps)
    for r in range(rows):
        factor = rsqrt(mean_square(flat[r], scratch) + np.float32(rms_eps))
        for i in range(n):
            pre[r, i] = sigmoid((m[r, i] * factor) * scale[0] + base[i]) + small_eps
            post[r, i] = TWO * sigmoid((m[r, n + i] * factor) * scale[1] + base[n + i])
        for j in range(n):
            for k in range(n):
                at = 2 * n + j * n + k
                comb[r, j, k] = (m[r, at] * factor) * scale[2] + base[at]
        if n == 4:
            _sinkhorn_4(comb[r], iterations, small_eps)
        else:
            _sinkhorn(comb[r], iterations, small_eps, scratch)


@inline
def _collapse_row(streams: Any, pre: Any, out: Any) -> None:
    first = streams[0]
    for d in range(out.shape[0]):
        out[d] = pre[0] * first[d]
    for n in range(1, streams.shape[0]):
        part = streams[n]
        for d in range(out.shape[0]):
            out[d] = out[d] + pre[n] * part[d]
    for d in range(out.shape[0]):
        out[d] = bf16(out[d])


@kernel("void(f4[:, :, ::1], f4[:, ::1], f4[:, ::1])")
def _collapse(streams: Any, pre: Any, out: Any) -> None:
    for r in range(out.shape[0]):
        _collapse_row(streams[r], pre[r], out[r])


@kernel("void(f4[:, :, ::1], f4[:, ::1], f4[::1], f8, f4[:, ::1])")
def _collapse_norm(streams: Any, pre: Any, weight: Any, eps: Any, out: Any) -> None:
    scratch = np.empty(power_of_two(out.shape[1]), np.float32)
    for r in range(out.shape[0]):
        _collapse_row(streams[r], pre[r], out[r])
        norm_row(out[r], weight, np.float32(eps), scratch, out[r])


@kernel("void(f4[:, ::1], f4[:, :, ::1], f4[:, ::1], f4[:, :, ::1], f4[:, :, ::1])")
def _expand(y: Any, streams: Any, post: Any, comb: Any, out: Any) -> None:
    rows, n, _ = streams.shape
    for r in range(rows):
        source = y[r]
        for k in range(n):
            target, write = out[r, k], post[r, k]
            for d in range(target.shape[0]):
                target[d] = write * source[d]
            for j in range(n):
                part, carry = streams[r, j], comb[r, j, k]
                for d in range(target.shape[0]):
                    target[d] = target[d] + carry * part[d]
            for d in range(target.shape[0]):
                target[d] = bf16(target[d])


def mix(
    streams: Tensor, weight: MixWeight, iterations: int, eps: float, rms_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """streams [R, N, D] -> pre [R, N], post [R, N], comb [R, N, N]."""
    rows, n, d = streams.shape
    pre, post, comb = torch.empty(rows, n), torch.empty(rows, n), torch.empty(rows, n, n)
    flat = streams.contiguous().numpy().reshape(rows, n * d)
    fn, scale, base = weight.fn.numpy(), weight.scale.numpy(), weight.base.numpy()
    a, b, c = pre.numpy(), post.numpy(), comb.numpy()

    def body(first: int, last: int) -> None:
        part = slice(first, last)
        _mix(flat[part], fn, scale, base, iterations, eps, rms_eps, a[part], b[part], c[part])

    for_row_ranges(rows, body)
    return pre, post, comb


def collapse(streams: Tensor, pre: Tensor, precision: Precision) -> Tensor:
    """streams [R, N, D], pre [R, N] -> [R, D]."""
    out = torch.empty(streams.shape[0], streams.shape[2])
    _collapse(streams.contiguous().numpy(), pre.contiguous().numpy(), out.numpy())
    return out


def collapse_norm(streams: Tensor, pre: Tensor, weight: Tensor, eps: float, precision: Precision) -> Tensor:
    """streams [R, N, D], pre [R, N], weight [D] -> [R, D]."""
    out = torch.empty(streams.shape[0], streams.shape[2])
    _collapse_norm(
        streams.contiguous().numpy(), pre.contiguous().numpy(), weight.contiguous().numpy(), eps, out.numpy()
    )
    return out


def expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, precision: Precision) -> Tensor:
    """y [R, D], streams [R, N, D], post [R, N], comb [R, N, N] -> [R, N, D]."""
    out = torch.empty(streams.shape)
    _expand(
        y.contiguous().numpy(),
        streams.contiguous().numpy(),
        post.contiguous().numpy(),
        comb.contiguous().numpy(),
        out.numpy(),
    )
    return out


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
