# mypy: ignore-errors
"""Top-p, top-k, min-p and log-probabilities in Triton, with the bits of the host: no sort, no sum whose order is free.

One program filters one row. Softmax terms and their sum follow `shoal_kernels.arith`; masses are whole numbers, so
their sums have no order. The boundary of the kept prefix is found bit by bit among the few tokens that it can lie in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal_kernels import arith
from shoal_kernels.ops.sampling import noise
from shoal_kernels.triton_lib import EXACT_OPTIONS, IS_INTERPRETED

_LOG2E, _MAGIC = tl.constexpr(arith.LOG2E), tl.constexpr(arith.ROUND_MAGIC)
_LN2_HIGH, _LN2_LOW = tl.constexpr(arith.LN2_HIGH), tl.constexpr(arith.LN2_LOW)
_EXP_LOW, _EXP_HIGH = tl.constexpr(arith.EXP_LOW), tl.constexpr(arith.EXP_HIGH)
_E0, _E1, _E2, _E3, _E4, _E5 = (tl.constexpr(c) for c in arith.EXP_POLYNOMIAL)
_L0, _L1, _L2, _L3, _L4, _L5, _L6, _L7, _L8 = (tl.constexpr(c) for c in arith.LOG_POLYNOMIAL)
_SQRT_HALF, _FIXED_POINT = tl.constexpr(arith.SQRT_HALF), tl.constexpr(noise.FIXED_POINT)
_ONE = tl.constexpr(1 << 42)
"""One token in a packed sum; the mass is what is below."""
_INTERPRETED = tl.constexpr(IS_INTERPRETED)
_OFF = 1 << 62
_BLOCK = 4096


@triton.jit
def _exp(x):
    """arith.exp."""
    clamped = tl.where(x > _EXP_LOW, x, _EXP_LOW)
    clamped = tl.where(clamped < _EXP_HIGH, clamped, _EXP_HIGH)
    shifted = clamped * _LOG2E + _MAGIC
    n = shifted - _MAGIC
    r = (clamped - n * _LN2_HIGH) - n * _LN2_LOW
    p = ((((r * _E0 + _E1) * r + _E2) * r + _E3) * r + _E4) * r + _E5
    p = (p * (r * r) + r) + 1.0
    exponent = (shifted.to(tl.int32, bitcast=True) - (0x4B400000 - 127)) << 23
    return tl.where(x < _EXP_LOW, 0.0, p * exponent.to(tl.float32, bitcast=True))


@triton.jit
def _log(x):
    """arith.log of a positive normal value."""
    bits = x.to(tl.int32, bitcast=True)
    e = ((bits >> 23) - 126).to(tl.float32)
    m = ((bits & 0x007FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    small = m < _SQRT_HALF
    e = tl.where(small, e - 1.0, e)
    f = tl.where(small, (m + m) - 1.0, m - 1.0)
    z = f * f
    p = ((((f * _L0 + _L1) * f + _L2) * f + _L3) * f + _L4) * f + _L5
    p = ((p * f + _L6) * f + _L7) * f + _L8
    y = (p * f) * z
    y = y + e * _LN2_LOW
    y = y - z * 0.5
    return (f + y) + e * _LN2_HIGH


@triton.jit
def _largest(z, vocab, BLOCK: tl.constexpr):
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(z + at, mask=at < vocab, other=float("-inf")))
    return tl.max(best, 0), best


@triton.jit
def _tree_sum(z, largest, scratch, vocab, LEVELS: tl.constexpr, BLOCK: tl.constexpr):
    """arith.tree_sum(arith.exp(z - largest)) of a row of over 2^(LEVELS - 1) tokens; scratch: float32 [vocab]."""
    lane = tl.arange(0, BLOCK)
    half: tl.constexpr = 1 << (LEVELS - 1)
    for start in range(0, half, BLOCK):
        at = start + lane
        low = _exp(tl.load(z + at, mask=at < half, other=float("-inf")) - largest)
        inside = (at < half) & (half + at < vocab)
        high = _exp(tl.load(z + half + at, mask=inside, other=float("-inf")) - largest)
        tl.store(scratch + at, low + high, mask=at < half)
    for level in tl.static_range(1, LEVELS):
        # A thread reads what others wrote once less than a block is left; before, an element stays with its thread.
        if (half >> level) < BLOCK:
            tl.debug_barrier()
        for start in range(0, half >> level, BLOCK):
            at = start + lane
            inside = at < half >> level
            low = tl.load(scratch + at, mask=inside, other=0.0)
            tl.store(scratch + at, low + tl.load(scratch + (half >> level) + at, mask=inside, other=0.0), mask=inside)
    tl.debug_barrier()
    return tl.load(scratch)


@triton.jit
def _order(x):
    """uint32 that orders like x, zeros alike."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)


@triton.jit
def _mass(p):
    """round(p * 2^40), ties to even: above 2^23 a float32 is whole already."""
    scaled = p * _FIXED_POINT
    return tl.where(scaled < 8388608.0, (scaled + 8388608.0) - 8388608.0, scaled).to(tl.int64)


@triton.jit
def _is_beyond(packed, most, limit):
    """Whether more than `most` tokens or more than `limit` of mass are in a packed sum."""
    return (packed // _ONE > most) | (packed % _ONE > limit)


@triton.jit
def _least_key(lanes, most):
    """A key that at least most + 1 tokens reach: as many lanes hold a token of it. 0 if there are fewer lanes."""
    keys, bound = _order(lanes), tl.zeros([], tl.uint32)
    for bit in range(32):
        trial = bound | (tl.full([], 0x80000000, tl.uint32) >> bit)
        bound = tl.where(tl.sum((keys >= trial).to(tl.int32), 0) > most, trial, bound)
    return bound


@triton.jit
def _add(a1, b1, c1, a2, b2, c2):
    return a1 + a2, b1 + b2, c1 + c2


@triton.jit
def _totals(a, b, c):
    if _INTERPRETED:
        return tl.sum(a, 0), tl.sum(b, 0), tl.sum(c, 0)
    return tl.reduce((a, b, c), 0, _add)


@triton.jit
def _candidate(keys, shares, held, level, BLOCK: tl.constexpr):
    """Key and share of the candidate number `level` of every lane, and whether there is one."""
    at, inside = level * BLOCK + tl.arange(0, BLOCK), level < held
    key = tl.load(keys + at, mask=inside, other=0).to(tl.uint32, bitcast=True)
    return key, _mass(tl.load(shares + at, mask=inside, other=0.0)), inside


@triton.jit
def _filter_row(
    z, stride, limits, mosts, floors, keys, shares, out, vocab, room, LEVELS: tl.constexpr, BLOCK: tl.constexpr
):
    """room: length of a row of keys and shares, whole blocks."""
    row = tl.program_id(0).to(tl.int64)
    z, out, keys, shares = z + row * stride, out + row * vocab, keys + row * room, shares + row * room
    limit, most, floor = tl.load(limits + row), tl.load(mosts + row), tl.load(floors + row)
    largest, lanes = _largest(z, vocab, BLOCK)
    total = _tree_sum(z, largest, shares, vocab, LEVELS, BLOCK)
    sums = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(z + at, mask=at < vocab, other=float("-inf"))
        p = tl.math.div_rn(_exp(x - largest), total)
        sums += _mass(p)
        tl.store(out + at, p, mask=at < vocab)
    mass = tl.sum(sums, 0)
    by_mass, by_count = mass > limit, most < vocab
    bounded = by_mass | by_count
    boundary, ties, tied = tl.zeros([], tl.uint32), tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    if bounded:
        # Tokens of at most `least` each cannot make up what is beyond the limit, so the boundary lies above them.
        least = tl.where(by_mass, (mass - limit - 1) // vocab, -1)
        lowest = tl.zeros([], tl.uint32)
        if by_count:
            lowest = _least_key(lanes, most)
        # Every lane keeps its own list of candidates: their order does not matter, and no thread waits for another.
        held = tl.zeros([BLOCK], tl.int32)
        tl.debug_barrier()
        for start in range(0, vocab, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(z + at, mask=at < vocab, other=float("-inf"))
            p, key = tl.load(out + at, mask=at < vocab, other=0.0), _order(x)
            chosen = (at < vocab) & (key >= lowest) & (_mass(p) > least)
            place = held * BLOCK + tl.arange(0, BLOCK)
            tl.store(keys + place, key.to(tl.int32, bitcast=True), mask=chosen)
            tl.store(shares + place, p, mask=chosen)
            held += chosen.to(tl.int32)
        deepest = tl.max(held, 0)
        # The boundary is the largest key that too many tokens or too much mass reach; two bits per look. A count and a
        # mass share one number: there are fewer than 2^22 tokens, and all masses are below 2^41.
        for look in range(16):
            one = tl.full([], 0x40000000, tl.uint32) >> (2 * look)
            first, second, third = boundary + one, boundary + 2 * one, boundary + 3 * one
            sum1, sum2, sum3 = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
            for level in range(deepest):
                key, part, inside = _candidate(keys, shares, held, level, BLOCK)
                part = tl.where(inside, part + _ONE, 0)
                sum1 += tl.where(key >= first, part, 0)
                sum2 += tl.where(key >= second, part, 0)
                sum3 += tl.where(key >= third, part, 0)
            sum1, sum2, sum3 = _totals(sum1, sum2, sum3)
            boundary = tl.where(_is_beyond(sum1, most, limit), first, boundary)
            boundary = tl.where(_is_beyond(sum2, most, limit), second, boundary)
            boundary = tl.where(_is_beyond(sum3, most, limit), third, boundary)
        above, equal, each = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
        for level in range(deepest):
            key, part, inside = _candidate(keys, shares, held, level, BLOCK)
            above += tl.where(inside & (key > boundary), part + _ONE, 0)
            is_tie = inside & (key == boundary)
            equal += is_tie.to(tl.int64)
            each = tl.maximum(each, tl.where(is_tie, part, 0))
        before, tied, _ = _totals(above, equal, equal)
        share = tl.max(each, 0)
        # Tokens of the boundary's value stay, lower ids first, for as long as the mass before them is in the limit.
        fit = tl.where(share > 0, (limit - before % _ONE) // tl.maximum(share, 1) + 1, vocab)
        ties = tl.minimum(most - before // _ONE, fit)
    least_share = tl.math.div_rn(_exp(largest - largest), total) * floor
    seen = tl.zeros([], tl.int64)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(z + at, mask=at < vocab, other=float("-inf"))
        p, key = tl.load(out + at, mask=at < vocab, other=0.0), _order(x)
        keep = (key >= boundary) | (bounded == 0)
        if ties < tied:
            is_tie = (key == boundary) & (at < vocab)
            keep = keep & ((is_tie == 0) | (seen + tl.cumsum(is_tie.to(tl.int32), 0) <= ties))
            seen += tl.sum(is_tie.to(tl.int64), 0)
        tl.store(out + at, tl.where(keep & (p >= least_share), x, float("-inf")), mask=at < vocab)


@triton.jit
def _logprobs_row(z, stride, out, vocab, LEVELS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    z, out = z + row * stride, out + row * vocab
    largest, _ = _largest(z, vocab, BLOCK)
    log_total = _log(_tree_sum(z, largest, out, vocab, LEVELS, BLOCK))
    # Other threads hold the scratch that is overwritten.
    tl.debug_barrier()
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(z + at, mask=at < vocab, other=float("-inf"))
        tl.store(out + at, (x - largest) - log_total, mask=at < vocab)


def _blocks(vocab: int) -> dict[str, int]:
    width = triton.next_power_of_2(max(vocab, 2))
    block = min(_BLOCK, width)
    return {"LEVELS": width.bit_length() - 1, "BLOCK": block}


def filter_logits(z: Tensor, top_p: Sequence[float], top_k: Sequence[int], min_p: Sequence[float]) -> Tensor:
    """z [R, V] after temperature -> [R, V] with the removed tokens at -inf."""
    rows, vocab = z.shape
    z = z if z.stride(1) == 1 else z.contiguous()
    blocks = _blocks(vocab)
    room = triton.cdiv(vocab, blocks["BLOCK"]) * blocks["BLOCK"]
    out, shares = torch.empty(rows, vocab, device=z.device), torch.empty(rows, room, device=z.device)
    keys = torch.empty(rows, room, dtype=torch.int32, device=z.device)
    limits = [math.floor(p * noise.FIXED_POINT) if p < 1.0 else _OFF for p in top_p]
    mosts = [min(k, vocab) if k > 0 else vocab for k in top_k]
    whole = torch.tensor([limits, mosts], dtype=torch.int64).to(z.device, non_blocking=True)
    floors = torch.tensor(min_p, dtype=torch.float32).to(z.device, non_blocking=True)
    if rows:
        _filter_row[(rows,)](
            z,
            z.stride(0),
            whole[0],
            whole[1],
            floors,
            keys,
            shares,
            out,
            vocab,
            room,
            **blocks,
            num_warps=16,
            **EXACT_OPTIONS,
        )
    return out


def logprobs(z: Tensor) -> Tensor:
    """z [R, V] -> log-softmax [R, V]."""
    rows, vocab = z.shape
    z = z if z.stride(1) == 1 else z.contiguous()
    out = torch.empty(rows, vocab, device=z.device)
    if rows:
        _logprobs_row[(rows,)](z, z.stride(0), out, vocab, **_blocks(vocab), num_warps=8, **EXACT_OPTIONS)
    return out
