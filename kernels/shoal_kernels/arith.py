"""Arithmetic whose bits are defined by this file: fixed sequences of IEEE operations.

Library GEMMs, sums, exp and log choose their order and their polynomials by shape, CPU and version, so a row's bits
would depend on its batch. In float32 every result here is a fixed sequence of separate IEEE additions, multiplications,
divisions and square roots. Any implementation that follows the same sequence gives the same bits on any CPU, for any
batch and any number of threads. `arith_nb` repeats the definitions for numba.

float64 tensors (precision EXACT) take the library functions: there the error is far below what anyone compares.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG2E = 1.44269504088896341
# ln 2 in two float32 steps: the first has so few bits that n * LN2_HIGH is exact for |n| < 2^9.
LN2_HIGH = 0.693359375
LN2_LOW = -2.12194440e-4
EXP_LOW, EXP_HIGH = -87.0, 88.0
# Adding and taking away 1.5 * 2^23 rounds a small float32 to the nearest integer, ties to even.
ROUND_MAGIC = 12582912.0
EXP_POLYNOMIAL = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
SQRT_HALF = 0.707106781186547524
LOG_POLYNOMIAL = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)


def matmul(x: Tensor, w: Tensor) -> Tensor:
    """x[..., K] times w[..., K, N] (leading axes broadcast): sum over K, ascending, starting from +0."""
    if x.dtype == torch.float64:
        return torch.matmul(x.unsqueeze(-2), w.to(torch.float64)).squeeze(-2)
    # The empty product has the shape of the result.
    total = (x[..., :0] @ w[..., :0, :]) if w.dim() == 2 else (x.unsqueeze(-2)[..., :0] @ w[..., :0, :]).squeeze(-2)
    for k in range(x.shape[-1]):
        total += x[..., k : k + 1] * w[..., k, :]
    return total


def tree_sum(x: Tensor) -> Tensor:
    """Sum over the last axis as a pairwise tree: zero-pad to a power of two, then add the upper half to the lower.

    More zero padding gives the same bits, so rows of different length may share one padded tensor.
    """
    if x.dtype == torch.float64:
        return x.sum(-1)
    size = x.shape[-1]
    width = 1 << max(size - 1, 0).bit_length()
    if width != size:
        x = torch.nn.functional.pad(x, (0, width - size))
    while width > 1:
        width //= 2
        x = x[..., :width] + x[..., width:]
    return x[..., 0] + 0.0


def exp(x: Tensor) -> Tensor:
    """e^x. float32: 0 below -87 (so no subnormals), saturates above 88; relative error below 2e-7; NaN stays NaN."""
    if x.dtype == torch.float64:
        return torch.exp(x)
    clamped = torch.where(x > EXP_LOW, x, EXP_LOW)
    clamped = torch.where(clamped < EXP_HIGH, clamped, EXP_HIGH)
    shifted = clamped * LOG2E + ROUND_MAGIC
    n = shifted - ROUND_MAGIC
    r = (clamped - n * LN2_HIGH) - n * LN2_LOW
    p = torch.full_like(r, EXP_POLYNOMIAL[0])
    for coefficient in EXP_POLYNOMIAL[1:]:
        p = p * r + coefficient
    p = (p * (r * r) + r) + 1.0
    exponent = (shifted.view(torch.int32) - 0x4B400000 + 127) << 23  # bits of ROUND_MAGIC
    result = p * exponent.view(torch.float32)
    result = torch.where(x < EXP_LOW, 0.0, result)
    return torch.where(x == x, result, x)


def log(x: Tensor) -> Tensor:
    """ln x of positive normal values. float32: subnormals and 0 give -inf, negative values NaN, inf gives inf."""
    if x.dtype == torch.float64:
        return torch.log(x)
    bits = x.view(torch.int32)
    e = ((bits >> 23) - 126).to(torch.float32)
    m = ((bits & 0x007FFFFF) | 0x3F000000).view(torch.float32)  # in [1/2, 1)
    small = m < SQRT_HALF
    e = torch.where(small, e - 1.0, e)
    f = torch.where(small, (m + m) - 1.0, m - 1.0)
    z = f * f
    p = torch.full_like(f, LOG_POLYNOMIAL[0])
    for coefficient in LOG_POLYNOMIAL[1:]:
        p = p * f + coefficient
    y = (p * f) * z
    y = y + e * LN2_LOW
    y = y - z * 0.5
    result = (f + y) + e * LN2_HIGH
    result = torch.where(x < 1.1754943508222875e-38, -torch.inf, result)
    result = torch.where(x < 0.0, torch.nan, result)
    result = torch.where(x == torch.inf, torch.inf, result)
    return torch.where(x == x, result, x)


def log1p(x: Tensor) -> Tensor:
    """ln(1 + x) for x >= 0, accurate for small x: the rounding error of 1 + x is divided out again."""
    if x.dtype == torch.float64:
        return torch.log1p(x)
    u = 1.0 + x
    d = u - 1.0
    return torch.where(d == 0.0, x, log(u) * (x / torch.where(d == 0.0, 1.0, d)))


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x)."""
    return 1.0 / (1.0 + exp(-x))


def silu(x: Tensor) -> Tensor:
    """x / (1 + e^-x)."""
    return x / (1.0 + exp(-x))


def softplus(x: Tensor) -> Tensor:
    """ln(1 + e^x) = max(x, 0) + ln(1 + e^-|x|)."""
    return torch.where(x > 0.0, x, 0.0) + log1p(exp(-x.abs()))


def sqrt(x: Tensor) -> Tensor:
    """Correctly rounded square root. By way of float64, because some builds of torch are an ulp off in float32.

    The square root of a float32 is never so near to a rounding boundary that the float64 error could cross it.
    """
    return torch.sqrt(x.to(torch.float64)).to(x.dtype)


def rsqrt(x: Tensor) -> Tensor:
    """1 / sqrt(x), both steps correctly rounded."""
    return 1.0 / sqrt(x)
