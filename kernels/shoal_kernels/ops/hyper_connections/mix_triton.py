# mypy: ignore-errors
"""mix on an accelerator: a skinny product on the tensor cores, then sigmoids and Sinkhorn.

The product over K = N*D is cut into segments of `SEGMENT`, each summed by the tensor core alone; four neighbours are
added in order to a group, and the groups in order to the total. A program of the first kernel writes one segment or
one group; both give the same additions, so the choice follows the number of rows and the bits do not.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal_kernels import triton_lib as lib

SEGMENT, BLOCK_K, GROUP = 256, 64, 4
COLUMNS = 32
"""Columns of a partial sum: the (2 + N) * N products, then the sum of squares, then padding."""
_FINISH_ROWS = 4


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
    PER_PROGRAM: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Sums of streams [rows, K] times fn [M, PARTS, K] over some segments: out [programs, rows, COLS] float32.

    The parts of an output are neighbouring columns of the product.
    """
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.arange(0, COLS * PARTS)
    step = tl.arange(0, STEP)
    first = tl.program_id(1) * (PER_PROGRAM * LENGTH)
    left = streams + row.to(tl.int64)[:, None] * K + step[None, :]
    right = fn + column[:, None] * K + step[None, :]
    index = tl.arange(0, COLS)

    STEPS: tl.constexpr = LENGTH // STEP
    total = tl.zeros((BLOCK_R, COLS), tl.float32)
    product = tl.zeros((BLOCK_R, COLS * PARTS), tl.float32)
    # Eight neighbours are summed within a thread; their sums meet once per segment.
    squares = tl.zeros((BLOCK_R, STEP // 8), tl.float32)
    for i in range(PER_PROGRAM * STEPS):
        k = first + i * STEP
        inside = k + step < K
        a = tl.load(left + k, mask=(row < rows)[:, None] & inside[None, :], other=0.0)
        b = tl.load(right + k, mask=(column < M * PARTS)[:, None] & inside[None, :], other=0.0)
        product = lib.dot(a, tl.trans(b), product)
        wide = a.to(tl.float32)
        squares += tl.sum(tl.reshape(wide * wide, (BLOCK_R, STEP // 8, 8)), 2)
        if (i + 1) % STEPS == 0:
            segment = tl.sum(tl.reshape(product, (BLOCK_R, COLS, PARTS)), 2)
            square = tl.sum(squares, 1)
            total += tl.where(index[None, :] == M, square[:, None], segment)
            product = tl.zeros((BLOCK_R, COLS * PARTS), tl.float32)
            squares = tl.zeros((BLOCK_R, STEP // 8), tl.float32)
    place = (tl.program_id(1) * rows + row).to(tl.int64)[:, None] * COLS + index[None, :]
    tl.store(out + place, total, mask=(row < rows)[:, None])


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
    GROUPS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    COLS: tl.constexpr,
    ITERATIONS: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Coefficients of BLOCK_R rows from partials [GROUPS * PER_GROUP, rows, COLS], for four streams.

    A thread holds its row's 4 x 4 matrix in registers.
    """
    N: tl.constexpr = 4
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    index = tl.arange(0, COLS)
    group = tl.arange(0, BLOCK_G)[:, None, None]
    mask = (group < GROUPS) & (row < rows)[None, :, None]
    at = (group * PER_GROUP * rows + row[None, :, None]).to(tl.int64) * COLS + index[None, None, :]
    sums = tl.load(partials + at, mask=mask, other=0.0)
    for s in tl.static_range(1, PER_GROUP):
        sums += tl.load(partials + at + s * rows * COLS, mask=mask, other=0.0)
    total = tl.sum(sums, 0)

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
    block_r, per_program, num_warps, num_stages = _tile(rows)
    groups = triton.cdiv(n * d, GROUP * SEGMENT)
    programs = groups * (GROUP // per_program)
    partials = torch.empty(programs, rows, COLUMNS, **wide)
    partial_kernel[(triton.cdiv(rows, block_r), programs)](
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
        PER_PROGRAM=per_program,
        BLOCK_R=block_r,
        num_warps=num_warps,
        num_stages=num_stages,
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
        GROUPS=groups,
        PER_GROUP=GROUP // per_program,
        BLOCK_G=triton.next_power_of_2(groups),
        COLS=COLUMNS,
        ITERATIONS=iterations,
        BLOCK_R=_FINISH_ROWS,
        num_warps=4,
        **lib.EXACT_OPTIONS,
    )
    return pre, post, comb


# Rows of a tile, segments of a program, warps, stages. Few rows: many short programs; many: few reads of the weight.
TILES = ((64, 1, 4, 4), (64, GROUP, 4, 4), (256, GROUP, 8, 4))


def _tile(rows: int) -> tuple[int, int, int, int]:
    if rows <= 64:
        return TILES[0]
    return TILES[1] if rows <= 512 else TILES[2]
