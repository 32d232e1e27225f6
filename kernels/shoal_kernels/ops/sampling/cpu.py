"""Compiled filters and coupled arg-max."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal_kernels.arith_nb import INF, ZERO, exp, log, power_of_two, tree_sum
from shoal_kernels.jit import bits_of, float_of, inline, kernel
from shoal_kernels.ops.sampling import noise
from shoal_kernels.ops.sampling.edit_cpu import edit_logits

__all__ = ["coupled_argmax", "edit_logits", "filter_logits", "logprobs"]

_MULTIPLIER_0, _MULTIPLIER_1 = np.int64(noise.MULTIPLIER_0), np.int64(noise.MULTIPLIER_1)
_WEYL_0, _WEYL_1, _MASK = np.int64(noise.WEYL_0), np.int64(noise.WEYL_1), np.int64(noise.MASK_32)
_ROUNDS, _DOMAIN = noise.ROUNDS, np.int64(noise.TOKEN_DOMAIN)
_G0, _G1, _G2, _G3, _G4, _G5, _G6 = noise.LOG_SERIES
_LN2_HIGH, _LN2_LOW, _SQRT_HALF = noise.LN2_HIGH_64, noise.LN2_LOW_64, noise.SQRT_HALF_64
_FIXED_POINT = np.float32(noise.FIXED_POINT)
_OFF = 1 << 62
# The noise is at most -ln(-ln(1 - 2^-33)) = 33 ln 2 < this.
_LARGEST_NOISE = np.float32(22.875)


@inline
def _log64(x: Any) -> Any:
    """noise.log64 of one value."""
    bits = bits_of(x)
    e = np.float64((bits >> 52) - 1022)
    m = float_of(np.int64((bits & 0x000FFFFFFFFFFFFF) | 0x3FE0000000000000))
    small = m < _SQRT_HALF
    e = e - 1.0 if small else e
    f = (m + m) - 1.0 if small else m - 1.0
    s = f / (2.0 + f)
    z = s * s
    r = ((((((_G6 * z + _G5) * z + _G4) * z + _G3) * z + _G2) * z + _G1) * z + _G0) * z
    half = (f * f) * 0.5
    return e * _LN2_HIGH - ((half - (s * (half + r) + e * _LN2_LOW)) - f)


@inline
def _random_block(block: Any, seed: Any, position: Any, out: Any) -> None:
    """The 32 random bits of token ids 4 * block .. 4 * block + 3."""
    c0, c1, c2, c3 = np.int64(block), position & _MASK, (position >> 32) & _MASK, _DOMAIN
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c2 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, ((p0 >> 32) & _MASK) ^ c3 ^ k1
        c1, c3 = p1 & _MASK, p0 & _MASK
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    out[0], out[1], out[2], out[3] = c0, c1, c2, c3


@inline
def _gumbel(h: Any) -> Any:
    u = (np.float64(h) + 0.5) * 2.0**-32
    return np.float32(-_log64(-_log64(1.0 - u)))


@inline
def _bound(h: Any) -> Any:
    """A cheap number that is at least _gumbel(h): -ln(-ln(1 - u)) <= -ln u, and the exponent of u bounds that."""
    exponent = (bits_of(np.float64(h) + 0.5) >> 52) - 1023
    return np.float32(np.float64(32 - exponent) * 0.69315 + 1e-5)


@kernel("void(f4[:, ::1], i8[::1], i8[::1], b1[::1], i8[::1])")
def _coupled_argmax(z: Any, seeds: Any, positions: Any, is_greedy: Any, tokens: Any) -> None:
    vocab = z.shape[1]
    h = np.empty(4, np.int64)
    for r in range(z.shape[0]):
        row = z[r]
        largest = -INF
        for v in range(vocab):
            largest = row[v] if row[v] > largest else largest
        token = 0
        while token < vocab - 1 and row[token] != largest:
            token += 1
        if is_greedy[r]:
            tokens[r] = token
            continue
        _random_block(token // 4, seeds[r], positions[r], h)
        best = row[token] + _gumbel(h[token % 4])
        for block in range((vocab + 3) // 4):
            start = block * 4
            stop = min(start + 4, vocab)
            # No noise is needed where even the largest noise would lose.
            hopeful = False
            for v in range(start, stop):
                hopeful = hopeful or row[v] + _LARGEST_NOISE >= best
            if hopeful:
                _random_block(block, seeds[r], positions[r], h)
                for v in range(start, stop):
                    if row[v] + _bound(h[v - start]) < best:
                        continue
                    value = row[v] + _gumbel(h[v - start])
                    if value > best or (value == best and v < token):
                        best, token = value, v
        tokens[r] = token


@kernel("void(f4[:, ::1], i8[::1], i8[::1], b1[::1], i8[::1], f4[::1])")
def _coupled_margins(z: Any, seeds: Any, positions: Any, is_greedy: Any, tokens: Any, margins: Any) -> None:
    vocab = z.shape[1]
    h = np.empty(4, np.int64)
    for r in range(z.shape[0]):
        row, token = z[r], tokens[r]
        # The largest logit but the winner's is near the runner-up: a bound to begin with.
        near = 0 if token != 0 else vocab - 1
        for v in range(vocab):
            near = v if v != token and row[v] > row[near] else near
        if is_greedy[r] or vocab == 1:
            margins[r] = row[token] - row[near] if vocab > 1 else INF
            continue
        _random_block(token // 4, seeds[r], positions[r], h)
        best = row[token] + _gumbel(h[token % 4])
        _random_block(near // 4, seeds[r], positions[r], h)
        second = row[near] + _gumbel(h[near % 4])
        for block in range((vocab + 3) // 4):
            start = block * 4
            stop = min(start + 4, vocab)
            hopeful = False
            for v in range(start, stop):
                hopeful = hopeful or (v != token and row[v] + _LARGEST_NOISE >= second)
            if hopeful:
                _random_block(block, seeds[r], positions[r], h)
                for v in range(start, stop):
                    if v == token or row[v] + _bound(h[v - start]) < second:
                        continue
                    value = row[v] + _gumbel(h[v - start])
                    second = value if value > second else second
        margins[r] = best - second


@inline
def _order(x: Any) -> Any:
    """A non-negative int64 below 2^32 that orders like x."""
    bits = bits_of(x + ZERO)
    return np.int64(bits ^ 0x7FFFFFFF if bits < 0 else bits) + 0x80000000


@inline
def _last_kept(keys: Any, mass: Any, limit: Any, most: Any, counts: Any, masses: Any) -> Any:
    """Boundary of the kept prefix (descending key, ascending id): key value, and how many tokens of that key stay.

    A token stays while the mass before it is at most `limit` and fewer than `most` tokens come before it.
    """
    prefix, shift, before, mass_before = 0, 21, 0, 0
    for level in range(3):
        bins = 1 << (10 if level == 2 else 11)
        counts[:bins] = 0
        masses[:bins] = 0
        for v in range(keys.shape[0]):
            if level == 0 or keys[v] >> (shift + (10 if level == 2 else 11)) == prefix:
                at = (keys[v] >> shift) & (bins - 1)
                counts[at] += 1
                masses[at] += mass[v]
        at = bins - 1
        while at >= 0 and before + counts[at] <= most and mass_before + masses[at] <= limit:
            before += counts[at]
            mass_before += masses[at]
            at -= 1
        if at < 0:
            return -1, 0
        prefix = (prefix << (10 if level == 2 else 11)) | at
        shift -= 10 if level == 1 else 11
    kept = 0
    for v in range(keys.shape[0]):
        if keys[v] == prefix and mass_before <= limit and before < most:
            kept += 1
            before += 1
            mass_before += mass[v]
    return prefix, kept


@kernel("void(f4[:, ::1], i8[::1], i8[::1], f4[::1], f4[:, ::1])")
def _filter(z: Any, limits: Any, most: Any, floors: Any, out: Any) -> None:
    rows, vocab = z.shape
    p, scratch = np.empty(vocab, np.float32), np.empty(power_of_two(vocab), np.float32)
    keys, mass = np.empty(vocab, np.int64), np.empty(vocab, np.int64)
    counts, masses = np.empty(2048, np.int64), np.empty(2048, np.int64)
    for r in range(rows):
        row, target = z[r], out[r]
        largest = -INF
        for v in range(vocab):
            largest = row[v] if row[v] > largest else largest
        for v in range(vocab):
            p[v] = exp(row[v] - largest)
            scratch[v] = p[v]
        total = tree_sum(scratch, vocab)
        highest = ZERO
        for v in range(vocab):
            p[v] = p[v] / total
            highest = p[v] if p[v] > highest else highest
            mass[v] = np.int64(np.rint(p[v] * _FIXED_POINT))
            keys[v] = _order(row[v])
        key, ties = _last_kept(keys, mass, limits[r], most[r], counts, masses)
        floor = highest * floors[r]
        for v in range(vocab):
            keep = keys[v] > key
            if keys[v] == key and ties > 0:
                keep = True
                ties -= 1
            target[v] = row[v] if keep and p[v] >= floor else -INF


def filter_logits(z: Tensor, top_p: Sequence[float], top_k: Sequence[int], min_p: Sequence[float]) -> Tensor:
    """z [R, V] after temperature -> [R, V] with the removed tokens at -inf."""
    out = torch.empty(z.shape)
    limits = np.array([math.floor(p * noise.FIXED_POINT) if p < 1.0 else _OFF for p in top_p], dtype=np.int64)
    most = np.array([min(k, z.shape[1]) if k > 0 else z.shape[1] for k in top_k], dtype=np.int64)
    _filter(z.contiguous().numpy(), limits, most, np.array(min_p, dtype=np.float32), out.numpy())
    return out


def coupled_argmax(z: Tensor, seeds: Tensor, positions: Tensor, is_greedy: Tensor) -> Tensor:
    """z [R, V] -> int64 [R]."""
    tokens = torch.empty(z.shape[0], dtype=torch.int64)
    _coupled_argmax(
        z.contiguous().numpy(),
        seeds.contiguous().numpy(),
        positions.contiguous().numpy(),
        is_greedy.contiguous().numpy(),
        tokens.numpy(),
    )
    return tokens


@kernel("void(f4[:, ::1], f4[:, ::1])")
def _logprobs(z: Any, out: Any) -> None:
    rows, vocab = z.shape
    scratch = np.empty(power_of_two(vocab), np.float32)
    for r in range(rows):
        row, target = z[r], out[r]
        largest = -INF
        for v in range(vocab):
            largest = row[v] if row[v] > largest else largest
        for v in range(vocab):
            shifted = row[v] - largest
            target[v] = shifted
            scratch[v] = exp(shifted)
        total = log(tree_sum(scratch, vocab))
        for v in range(vocab):
            target[v] = target[v] - total


def logprobs(z: Tensor) -> Tensor:
    """z [R, V] -> log-softmax [R, V]."""
    out = torch.empty(z.shape)
    _logprobs(z.contiguous().numpy(), out.numpy())
    return out


def coupled_margins(z: Tensor, seeds: Tensor, positions: Tensor, is_greedy: Tensor, tokens: Tensor) -> Tensor:
    """z [R, V], tokens int64 [R] -> float32 [R]."""
    margins = torch.empty(z.shape[0], dtype=torch.float32)
    _coupled_margins(
        z.contiguous().numpy(),
        seeds.contiguous().numpy(),
        positions.contiguous().numpy(),
        is_greedy.contiguous().numpy(),
        tokens.contiguous().numpy(),
        margins.numpy(),
    )
    return margins
