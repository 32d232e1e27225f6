# mypy: ignore-errors
"""mix on an accelerator: a skinny product on the tensor cores, then sigmoids and Sinkhorn.

The product over K = N*D is cut into segments of `SEGMENT`, each summed by the tensor core alone and written as a
partial sum; the second kernel adds the segments in order. Cut and tile are fixed, so a row's bits do not depend on its
batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from shoal_kernels import triton_lib as lib

SEGMENT, BLOCK_K, BLOCK_R = 1280, 64, 64
WARPS = 4
COLUMNS = 32
"""Columns of a partial sum: the (2 + N) * N products, then the sum of squares, then padding."""
_FINISH_ROWS, _FINISH_WARPS = 4, 1


@triton.jit(do_not_specialize=["rows"])
def partial_kernel(
    streams,
    fn,
    out,
    rows,
    K: tl.constexpr,
    M: tl.constexpr,
    PARTS: tl.constexpr,
    COLS: tl.constexpr,
    LENGTH: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Sums over one segment of streams [rows, K] times fn [M, PARTS, K]: out [segments, rows, COLS] float32.

    The parts of an output are neighbouring columns of the product. Squares are summed by the tensor core too, as the
    diagonal of the tile times itself: a tile that a product reads from shared memory and a sum reads from registers
    loses a buffer in Triton's pipeline (3.6, 3.7), and the next load overwrites what the product still reads.
    """
    if OVERLAPS:
        gdc_launch_dependents()  # The second kernel waits for this one, but is there when it ends.
    # From the last rows to the first: if streams were written just now, the last of them are still in the L2 cache.
    row = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, COLS * PARTS)
    step = tl.arange(0, STEP)
    first = tl.program_id(0) * LENGTH
    left = streams + row.to(tl.int64)[:, None] * K + step[None, :]
    right = fn + column[:, None] * K + step[None, :]

    product = tl.zeros((BLOCK, COLS * PARTS), tl.float32)
    squares = tl.zeros((BLOCK, BLOCK), tl.float32)
    for i in range(LENGTH // STEP):
        k = first + i * STEP
        inside = k + step < K
        a = tl.load(left + k, mask=(row < rows)[:, None] & inside[None, :], other=0.0)
        b = tl.load(right + k, mask=(column < M * PARTS)[:, None] & inside[None, :], other=0.0)
        product = lib.dot(a, tl.trans(b), product)
        squares = lib.dot(a, tl.trans(a), squares)

    index, own = tl.arange(0, COLS), tl.arange(0, BLOCK)
    sums = tl.sum(tl.reshape(product, (BLOCK, COLS, PARTS)), 2)
    square = tl.sum(tl.where(own[:, None] == own[None, :], squares, 0.0), 1)
    place = (tl.program_id(0) * rows + row).to(tl.int64)[:, None] * COLS + index[None, :]
    tl.store(out + place, tl.where(index[None, :] == M, square[:, None], sums), mask=(row < rows)[:, None])


@triton.jit
def _scaled(a, b, c, d, eps):
    """Four values over their positive sum plus eps; the sum as the host's tree of four."""
    # Shorter than a division, and 39 of these wait for each other.
    root = tl.math.rsqrt(((a + c) + (b + d)) + eps)
    inverse = root * root
    return a * inverse, b * inverse, c * inverse, d * inverse


@triton.jit
def _softmax(a, b, c, d, eps):
    largest = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = _scaled(tl.exp(a - largest), tl.exp(b - largest), tl.exp(c - largest), tl.exp(d - largest), 0.0)
    return a + eps, b + eps, c + eps, d + eps


@triton.jit
def _column(values, index, c: tl.constexpr):
    return tl.sum(tl.where(index[None, :] == c, values, 0.0), 1)


@triton.jit
def _four(values, index, c: tl.constexpr):
    return (
        _column(values, index, c),
        _column(values, index, c + 1),
        _column(values, index, c + 2),
        _column(values, index, c + 3),
    )


@triton.jit
def _store_four(to, row, rows, j: tl.constexpr, a, b, c, d):
    at, mask = to + row.to(tl.int64) * 16 + j * 4, row < rows
    tl.store(at, a, mask=mask)
    tl.store(at + 1, b, mask=mask)
    tl.store(at + 2, c, mask=mask)
    tl.store(at + 3, d, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def finish_kernel(
    partials,
    scale,
    base,
    pre,
    post,
    comb,
    rows,
    eps,
    rms_eps,
    K: tl.constexpr,
    SEGMENTS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    COLS: tl.constexpr,
    ITERATIONS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Coefficients of BLOCK rows from partials [SEGMENTS, rows, COLS], for four streams.

    A lane holds its row's 4 x 4 matrix in registers.
    """
    N: tl.constexpr = 4
    if OVERLAPS:
        gdc_wait()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = tl.arange(0, COLS)
    # Rows vary fastest: the lanes of a warp then hold the rows, each lane all segments of its row, and the sum over
    # them stays in registers.
    place = tl.arange(0, BLOCK_S * BLOCK)
    segment, place_row = place // BLOCK, tl.program_id(0) * BLOCK + place % BLOCK
    mask = ((segment < SEGMENTS) & (place_row < rows))[:, None]
    at = (segment * rows + place_row).to(tl.int64)[:, None] * COLS + index[None, :]
    total = tl.sum(tl.reshape(tl.load(partials + at, mask=mask, other=0.0), (BLOCK_S, BLOCK, COLS)), 0)

    mean = tl.math.div_rn(_column(total, index, N * (N + 2)), K * 1.0)
    factor = tl.math.div_rn(1.0, tl.math.sqrt_rn(mean + rms_eps))
    kind = tl.minimum(index // N, 2)
    is_output = index < N * (N + 2)
    slope = tl.load(scale + kind)
    offset = tl.load(base + index, mask=is_output, other=0.0)
    products = tl.where(is_output[None, :], total, 0.0)
    m = (products * factor[:, None]) * slope[None, :] + offset[None, :]

    gate = 1.0 / (1.0 + tl.exp(-m))
    seat = row.to(tl.int64)[:, None] * N + index[None, :]
    tl.store(pre + seat, gate + eps, mask=(row < rows)[:, None] & (index < N)[None, :])
    tl.store(post + seat - N, 2.0 * gate, mask=(row < rows)[:, None] & (kind == 1)[None, :])

    a0, a1, a2, a3 = _softmax(*_four(m, index, 2 * N), eps)
    b0, b1, b2, b3 = _softmax(*_four(m, index, 3 * N), eps)
    c0, c1, c2, c3 = _softmax(*_four(m, index, 4 * N), eps)
    d0, d1, d2, d3 = _softmax(*_four(m, index, 5 * N), eps)
    a0, b0, c0, d0 = _scaled(a0, b0, c0, d0, eps)
    a1, b1, c1, d1 = _scaled(a1, b1, c1, d1, eps)
    a2, b2, c2, d2 = _scaled(a2, b2, c2, d2, eps)
    a3, b3, c3, d3 = _scaled(a3, b3, c3, d3, eps)
    for _ in range(ITERATIONS - 1):
        a0, a1, a2, a3 = _scaled(a0, a1, a2, a3, eps)
        b0, b1, b2, b3 = _scaled(b0, b1, b2, b3, eps)
        c0, c1, c2, c3 = _scaled(c0, c1, c2, c3, eps)
        d0, d1, d2, d3 = _scaled(d0, d1, d2, d3, eps)
        a0, b0, c0, d0 = _scaled(a0, b0, c0, d0, eps)
        a1, b1, c1, d1 = _scaled(a1, b1, c1, d1, eps)
        a2, b2, c2, d2 = _scaled(a2, b2, c2, d2, eps)
        a3, b3, c3, d3 = _scaled(a3, b3, c3, d3, eps)
    _store_four(comb, row, rows, 0, a0, a1, a2, a3)
    _store_four(comb, row, rows, 1, b0, b1, b2, b3)
    _store_four(comb, row, rows, 2, c0, c1, c2, c3)
    _store_four(comb, row, rows, 3, d0, d1, d2, d3)


def mix(streams: Tensor, weight, iterations: int, eps: float, rms_eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """streams [R, 4, D] -> pre [R, 4], post [R, 4], comb [R, 4, 4]."""
    rows, n, d = streams.shape
    if n != 4:
        raise ValueError(f"this kernel mixes four streams, got {n}")
    wide = {"dtype": torch.float32, "device": streams.device}
    pre, post, comb = torch.empty(rows, n, **wide), torch.empty(rows, n, **wide), torch.empty(rows, n, n, **wide)
    if rows == 0:
        return pre, post, comb
    # With many rows the waiting programs are in the way: 26.3 us against 24.9 at 1,536 rows, 11.4 against 12.5 at 360.
    overlaps = rows <= 512 and lib.grids_overlap(streams.device)
    segments = triton.cdiv(n * d, SEGMENT)
    partials = torch.empty(segments, rows, COLUMNS, **wide)
    partial_kernel[(segments, triton.cdiv(rows, BLOCK_R))](
        streams.contiguous(),
        weight.fn,
        partials,
        rows,
        K=n * d,
        M=(2 + n) * n,
        PARTS=weight.fn.shape[1],
        COLS=COLUMNS,
        LENGTH=SEGMENT,
        STEP=BLOCK_K,
        BLOCK=BLOCK_R,
        OVERLAPS=overlaps,
        num_warps=WARPS,
        num_stages=_stages(rows),
        **lib.EXACT_OPTIONS,
    )
    finish_kernel[(triton.cdiv(rows, _FINISH_ROWS),)](
        partials,
        weight.scale,
        weight.base,
        pre,
        post,
        comb,
        rows,
        eps,
        rms_eps,
        K=n * d,
        SEGMENTS=segments,
        BLOCK_S=triton.next_power_of_2(segments),
        COLS=COLUMNS,
        ITERATIONS=iterations,
        BLOCK=_FINISH_ROWS,
        OVERLAPS=overlaps,
        num_warps=_FINISH_WARPS,
        **lib.EXACT_OPTIONS,
        **({"launch_pdl": True} if overlaps else {}),
    )
    return pre, post, comb


def _stages(rows: int) -> int:
    """Loads in flight: many where a multiprocessor has one program, fewer where it has three or four."""
    return 6 if rows <= 512 else 4
