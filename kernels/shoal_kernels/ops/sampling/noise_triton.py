# mypy: ignore-errors
"""The noise of `noise.py` on a device: Philox, the exact Gumbel in float64, and a float32 one of bounded error.

The exact logarithms of a whole vocabulary would cost more than the matrix product before them. So every token gets the
float32 noise, and only the tokens that could still win after its error get the exact one, see `best_of_tile`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shoal_kernels.ops.sampling import noise
from shoal_kernels.triton_lib import IS_INTERPRETED

_INTERPRETED = tl.constexpr(IS_INTERPRETED)
_M0, _M1 = tl.constexpr(noise.MULTIPLIER_0), tl.constexpr(noise.MULTIPLIER_1)
_W0, _W1 = tl.constexpr(noise.WEYL_0), tl.constexpr(noise.WEYL_1)
_ROUNDS, _DOMAIN = tl.constexpr(noise.ROUNDS), tl.constexpr(noise.TOKEN_DOMAIN)
_G0, _G1, _G2, _G3, _G4, _G5, _G6 = (tl.constexpr(c) for c in noise.LOG_SERIES)
_LN2_HIGH, _LN2_LOW = tl.constexpr(noise.LN2_HIGH_64), tl.constexpr(noise.LN2_LOW_64)
_SQRT_HALF = tl.constexpr(noise.SQRT_HALF_64)
_NEGATIVE_LN2 = tl.constexpr(-0.6931471805599453)
_NO_ID = tl.constexpr(0x7FFFFFFF)

FAST_ERROR = tl.constexpr(2.0e-5)
"""At least |gumbel_fast(h) - gumbel_exact(h)| for each of the 2^32 values of h; a test on the device tries them all."""
_ROUNDING = tl.constexpr(2.0**-21)


@triton.jit
def philox(block, low, high, k0, k1):
    """The 32-bit words (uint32) of token ids 4 * block .. 4 * block + 3.

    low, high  halves of the output index; k0, k1: halves of the seed. All uint32, broadcast with each other.
    """
    c0, c1, c2, c3 = block, low, high, _DOMAIN
    for _ in tl.static_range(_ROUNDS):
        p0, p1 = c0.to(tl.uint64) * _M0, c2.to(tl.uint64) * _M1
        c0, c2 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0, (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = p1.to(tl.uint32), p0.to(tl.uint32)
        k0, k1 = k0 + _W0, k1 + _W1
    return c0, c1, c2, c3


@triton.jit
def _log64(x):
    """noise.log64: a fixed sequence of IEEE operations, so the kernel must not fuse multiply and add."""
    bits = x.to(tl.int64, bitcast=True)
    e = ((bits >> 52) - 1022).to(tl.float64)
    m = ((bits & 0x000FFFFFFFFFFFFF) | 0x3FE0000000000000).to(tl.float64, bitcast=True)
    small = m < _SQRT_HALF
    e = tl.where(small, e - 1.0, e)
    f = tl.where(small, (m + m) - 1.0, m - 1.0)
    s = f / (f + 2.0)
    z = s * s
    r = ((((((z * _G6 + _G5) * z + _G4) * z + _G3) * z + _G2) * z + _G1) * z + _G0) * z
    half = (f * f) * 0.5
    return e * _LN2_HIGH - ((half - (s * (half + r) + e * _LN2_LOW)) - f)


@triton.jit
def gumbel_exact(h):
    """The noise of word h: the bits of `noise.gumbel`."""
    u = (h.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    zero = u - u
    return (zero - _log64(zero - _log64(1.0 - u))).to(tl.float32)


@triton.jit
def _fast_log2(x):
    if _INTERPRETED:
        return tl.log2(x)
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def gumbel_fast(h):
    """The noise of word h within FAST_ERROR, in float32.

    -ln(1 - u) is a series where u < 1/8, because there lg2 near 1 has no relative precision; elsewhere 1 - u is made of
    the complement of h.
    """
    small = h < 0x20000000
    t = (tl.where(small, h, h ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    p = tl.fma(t, 0.16666667, 0.2)
    p = tl.fma(p, t, 0.25)
    p = tl.fma(p, t, 0.33333334)
    p = tl.fma(p, t, 0.5)
    p = tl.fma(p, t, 1.0)
    e = tl.where(small, p * t, _fast_log2(t) * _NEGATIVE_LN2)
    return _fast_log2(e) * _NEGATIVE_LN2


@triton.jit
def noise_of(token, low, high, k0, k1):
    """Exact noise of one token id (int32) per row."""
    c0, c1, c2, c3 = philox((token >> 2).to(tl.uint32), low, high, k0, k1)
    at = token & 3
    return gumbel_exact(tl.where(at < 2, tl.where(at == 0, c0, c1), tl.where(at == 2, c2, c3)))


@triton.jit
def _merge(a1, z1, i1, s1, a2, z2, i2, s2):
    """Of two best tokens the better one, ties to the smaller id, and the largest score below the best."""
    wins = (a2 > a1) | ((a2 == a1) & (i2 < i1))
    second = tl.maximum(tl.maximum(s1, s2), tl.minimum(a1, a2))
    return tl.where(wins, a2, a1), tl.where(wins, z2, z1), tl.where(wins, i2, i1), second


@triton.jit
def _best(a, z, ids, s):
    """Best score, its logit, its id and the second score of every row of [rows, tokens]."""
    if _INTERPRETED:
        # The interpreter takes seconds for a reduction with a function of ours.
        best = tl.max(a, 1)
        token = tl.min(tl.where(a == best[:, None], ids, _NO_ID), 1)
        chosen = ids == token[:, None]
        second = tl.maximum(tl.max(tl.where(chosen, float("-inf"), a), 1), tl.max(s, 1))
        return best, tl.max(tl.where(chosen, z, float("-inf")), 1), token, second
    return tl.reduce((a, z, ids, s), 1, _merge)


@triton.jit
def _score_pair(z0, z1, pair, low, high, k0, k1, greedy):
    """z plus fast noise of token ids 2 * pair and 2 * pair + 1."""
    c0, c1, c2, c3 = philox((pair >> 1).to(tl.uint32), low, high, k0, k1)
    is_first = (pair & 1) == 0
    a0 = z0 + gumbel_fast(tl.where(is_first, c0, c2))
    a1 = z1 + gumbel_fast(tl.where(is_first, c1, c3))
    return tl.where(greedy, z0, a0), tl.where(greedy, z1, a1)


@triton.jit
def _score_four(z0, z1, z2, z3, block, low, high, k0, k1, greedy):
    """z plus fast noise of token ids 4 * block .. 4 * block + 3: a whole block of the generator."""
    c0, c1, c2, c3 = philox(block.to(tl.uint32), low, high, k0, k1)
    a0, a1, a2, a3 = z0 + gumbel_fast(c0), z1 + gumbel_fast(c1), z2 + gumbel_fast(c2), z3 + gumbel_fast(c3)
    return tl.where(greedy, z0, a0), tl.where(greedy, z1, a1), tl.where(greedy, z2, a2), tl.where(greedy, z3, a3)


@triton.jit
def _unseen(a, ids, seen_score, seen_id):
    """The score, or -inf for what an earlier pass looked at."""
    return tl.where((a < seen_score) | ((a == seen_score) & (ids > seen_id)), a, float("-inf"))


@triton.jit
def _better(a0, z0, i0, a1, z1, i1, seen_score, seen_id):
    """_merge of two single tokens that were not seen."""
    a0 = _unseen(a0, i0, seen_score[:, None], seen_id[:, None])
    a1 = _unseen(a1, i1, seen_score[:, None], seen_id[:, None])
    none = tl.full(z0.shape, float("-inf"), tl.float32)
    return _merge(a0, z0, i0, none, a1, z1, i1, none)


@triton.jit
def _pass(
    z,
    first,
    low,
    high,
    k0,
    k1,
    greedy,
    seen_score,
    seen_id,
    SLICE: tl.constexpr,
    HAS_FOURS: tl.constexpr,
):
    """One look at z [rows, tokens] past what was seen, SLICE tokens at a time: more would not fit into registers."""
    rows: tl.constexpr = z.shape[0]
    half: tl.constexpr = z.shape[1] // 2
    if z.shape[1] > SLICE:
        left, right = tl.split(tl.permute(tl.reshape(z, [rows, 2, half]), (0, 2, 1)))
        a1, z1, i1, s1 = _pass(left, first, low, high, k0, k1, greedy, seen_score, seen_id, SLICE, HAS_FOURS)
        a2, z2, i2, s2 = _pass(right, first + half, low, high, k0, k1, greedy, seen_score, seen_id, SLICE, HAS_FOURS)
        return _merge(a1, z1, i1, s1, a2, z2, i2, s2)
    words = low[:, None], high[:, None], k0[:, None], k1[:, None], greedy[:, None]
    if HAS_FOURS:
        fours: tl.constexpr = z.shape[1] // 4
        even, odd = tl.split(tl.reshape(z, [rows, fours, 2, 2]))
        z0, z2 = tl.split(even)
        z1, z3 = tl.split(odd)
        block = (first >> 2) + tl.arange(0, fours)[None, :]
        if _INTERPRETED:
            a0, a1, a2, a3 = _score_four(z0, z1, z2, z3, block, words[0], words[1], words[2], words[3], words[4])
        else:
            a0, a1, a2, a3 = tl.map_elementwise(
                _score_four, z0, z1, z2, z3, block, words[0], words[1], words[2], words[3], words[4]
            )
        ids = tl.zeros(z0.shape, tl.int32) + block * 4
        low_half = _better(a0, z0, ids, a1, z1, ids + 1, seen_score, seen_id)
        high_half = _better(a2, z2, ids + 2, a3, z3, ids + 3, seen_score, seen_id)
        a, found, token, second = _merge(
            low_half[0], low_half[1], low_half[2], low_half[3], high_half[0], high_half[1], high_half[2], high_half[3]
        )
    else:
        z0, z1 = tl.split(tl.reshape(z, [rows, half, 2]))
        pair = (first >> 1) + tl.arange(0, half)[None, :]
        if _INTERPRETED:
            a0, a1 = _score_pair(z0, z1, pair, words[0], words[1], words[2], words[3], words[4])
        else:
            # Element by element, so that the state of one generator is alive at a time.
            a0, a1 = tl.map_elementwise(_score_pair, z0, z1, pair, words[0], words[1], words[2], words[3], words[4])
        ids = tl.zeros(z0.shape, tl.int32) + pair * 2
        a, found, token, second = _better(a0, z0, ids, a1, z1, ids + 1, seen_score, seen_id)
    return _best(a, found, token, second)


@triton.jit
def _may_win(second, value, greedy):
    """1 where a token whose score is at most `second` could have an exact value of at least `value`."""
    error = 2.0 * FAST_ERROR + tl.abs(second) * _ROUNDING
    hopeful = (second > float("-inf")) & (second + error >= value) & (greedy == 0)
    return hopeful.to(tl.int32)


@triton.jit
def best_of_tile(z, first, low, high, k0, k1, greedy, SLICE: tl.constexpr, HAS_FOURS: tl.constexpr):
    """The token of every row of z [rows, tokens] among ids first .. (first divisible by 4): value [rows], id [rows].

    The value is the exact z + noise. -inf never wins over a finite value; a row of -inf gives its first id. Scores with
    the fast noise are looked at in descending order for as long as one of them, after its error, could still win:
    nearly always once.
    low, high, k0, k1  uint32 [rows], halves of output index and seed
    greedy             bool [rows]: no noise
    SLICE              tokens looked at together
    HAS_FOURS          a thread has four neighbouring tokens, so that it uses whole blocks of the generator; else two
    """
    score = tl.full([z.shape[0]], float("inf"), tl.float32)
    seen = tl.full([z.shape[0]], -1, tl.int32)
    value = tl.full([z.shape[0]], float("-inf"), tl.float32)
    token = tl.full([z.shape[0]], _NO_ID, tl.int32)
    again, more = tl.full([], 0, tl.int32), tl.full([], 1, tl.int32)
    while more > 0:
        # `more` is 1 here; as the compiler does not know that, it cannot hold the noise of one look for the next.
        zero = more - 1
        u = zero.to(tl.uint32)
        score, found, seen, second = _pass(
            z, first + zero, low + u, high + u, k0 + u, k1 + u, greedy, score, seen, SLICE, HAS_FOURS
        )
        exact = tl.where(greedy, found, found + noise_of(seen, low, high, k0, k1))
        exact = tl.where(score > float("-inf"), exact, float("-inf"))
        better = (exact > value) | ((exact == value) & (seen < token))
        better = better & ((greedy == 0) | (again == 0))
        value, token = tl.where(better, exact, value), tl.where(better, seen, token)
        more = tl.max(_may_win(second, value, greedy), 0)
        again += 1
    return value, token
