# mypy: ignore-errors
"""Hyper-connections on an accelerator: mix in two launches, everything between mixes in one pass over a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal_kernels import triton_lib as lib
from shoal_kernels.ops.hyper_connections.mix_triton import mix

__all__ = ["collapse", "collapse_norm", "collapse_norm_cast", "expand", "expand_norm", "mix"]

_CHUNK, _WARPS = 1024, 8


@triton.jit
def row_kernel(
    y,
    streams,
    post,
    comb,
    pre,
    weight,
    after,
    collapsed,
    cast,
    eps,
    N: tl.constexpr,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    EXPAND: tl.constexpr,
    COLLAPSE: tl.constexpr,
    NORM: tl.constexpr,
    CAST: tl.constexpr,
):
    """One row: expand into `after`, collapse (and norm) into `collapsed`, Q8 into `cast`, each if asked for.

    Everything is loaded before anything is computed: stores may alias, so a load after a store would wait for it.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, CHUNK)
    CHUNKS: tl.constexpr = (D + CHUNK - 1) // CHUNK
    sources, written, scales = (), (), ()
    for c in tl.static_range(CHUNKS):
        d = c * CHUNK + at
        for n in tl.static_range(N):
            value = tl.load(streams + (row * N + n) * D + d, mask=d < D, other=0.0)
            sources = sources + (value,)  # noqa: RUF005
        if EXPAND:
            written = written + (tl.load(y + row * D + d, mask=d < D, other=0.0),)  # noqa: RUF005
        if NORM and not EXPAND:
            scales = scales + (tl.load(weight + d, mask=d < D, other=0.0),)  # noqa: RUF005
    reads, writes, carries = (), (), ()
    for n in tl.static_range(N):
        if COLLAPSE:
            reads = reads + (tl.load(pre + row * N + n),)  # noqa: RUF005
        if EXPAND:
            writes = writes + (tl.load(post + row * N + n),)  # noqa: RUF005
            for k in tl.static_range(N):
                carries = carries + (tl.load(comb + (row * N + n) * N + k),)  # noqa: RUF005

    kept = ()
    squares = tl.zeros((CHUNK,), tl.float32)
    for c in tl.static_range(CHUNKS):
        d = c * CHUNK + at
        x = tl.zeros((CHUNK,), tl.float32)
        for k in tl.static_range(N):
            if EXPAND:
                value = writes[k] * written[c].to(tl.float32)
                for j in tl.static_range(N):
                    value = value + carries[j * N + k] * sources[c * N + j].to(tl.float32)
                rounded = lib.round_bf16(value)
                tl.store(after + (row * N + k) * D + d, rounded, mask=d < D)
            else:
                rounded = sources[c * N + k]
            if COLLAPSE:
                part = reads[k] * rounded.to(tl.float32)
                x = part if k == 0 else x + part
        if COLLAPSE:
            rounded = lib.round_bf16(x)
            if NORM:
                x = rounded.to(tl.float32)
                squares += x * x
                kept = kept + (x,)  # noqa: RUF005
            else:
                tl.store(collapsed + row * D + d, rounded, mask=d < D)

    if NORM:
        mean = tl.math.div_rn(tl.sum(squares, 0), D * 1.0)
        factor = tl.math.div_rn(1.0, tl.math.sqrt_rn(mean + eps))
        for c in tl.static_range(CHUNKS):
            d = c * CHUNK + at
            # With expand there are no registers to hold them from the start.
            scale = tl.load(weight + d, mask=d < D, other=0.0) if EXPAND else scales[c]
            rounded = lib.round_bf16((kept[c] * factor) * scale)
            tl.store(collapsed + row * D + d, rounded, mask=d < D)
            if CAST:
                groups = tl.reshape(rounded.to(tl.float32), (CHUNK // 32, 32))
                values = tl.reshape(lib.cast_q8(groups, 1), (CHUNK,))
                tl.store(cast + row * D + d, values.to(tl.bfloat16), mask=d < D)


def _launch(streams, *, y=None, post=None, comb=None, pre=None, weight=None, eps=0.0, cast=False):
    """The outputs that the arguments ask for: (after, collapsed, cast), each a tensor or None."""
    rows, n, d = streams.shape
    source = streams.contiguous()
    after = torch.empty_like(source) if y is not None else None
    collapsed = lib.empty_like_rows(source, rows, d, dtype=source.dtype) if pre is not None else None
    values = torch.empty_like(collapsed) if cast else None
    if rows:
        chunk = min(_CHUNK, max(triton.next_power_of_2(d), 32))
        # A pointer that is not used is any pointer.
        arguments = [
            source if t is None else t.contiguous() for t in (post, comb, pre, weight, after, collapsed, values)
        ]
        row_kernel[(rows,)](
            source if y is None else y.contiguous(),
            source,
            *arguments,
            eps,
            N=n,
            D=d,
            CHUNK=chunk,
            EXPAND=y is not None,
            COLLAPSE=pre is not None,
            NORM=weight is not None,
            CAST=cast,
            num_warps=_WARPS,
            **lib.EXACT_OPTIONS,
        )
    return after, collapsed, values


def collapse(streams: Tensor, pre: Tensor, precision) -> Tensor:
    """streams [R, N, D], pre [R, N] -> [R, D]."""
    return _launch(streams, pre=pre)[1]


def collapse_norm(streams: Tensor, pre: Tensor, weight: Tensor, eps: float, precision) -> Tensor:
    """streams [R, N, D], pre [R, N], weight [D] -> [R, D]."""
    return _launch(streams, pre=pre, weight=weight, eps=eps)[1]


def collapse_norm_cast(streams: Tensor, pre: Tensor, weight: Tensor, eps: float, precision) -> tuple[Tensor, Tensor]:
    """streams [R, N, D], pre [R, N], weight [D] -> [R, D] and its Q8 values."""
    _, normed, values = _launch(streams, pre=pre, weight=weight, eps=eps, cast=precision.cast_activations)
    return normed, normed if values is None else values


def expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, precision) -> Tensor:
    """y [R, D], streams [R, N, D], post [R, N], comb [R, N, N] -> [R, N, D]."""
    return _launch(streams, y=y, post=post, comb=comb)[0]


def expand_norm(
    y: Tensor,
    streams: Tensor,
    post: Tensor,
    comb: Tensor,
    pre: Tensor,
    weight: Tensor,
    eps: float,
    cast: bool,
    precision,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """expand, then collapse_norm or collapse_norm_cast of the new streams, in one pass."""
    q8 = cast and precision.cast_activations
    after, normed, values = _launch(streams, y=y, post=post, comb=comb, pre=pre, weight=weight, eps=eps, cast=q8)
    return after, normed, (values if q8 else normed) if cast else None
