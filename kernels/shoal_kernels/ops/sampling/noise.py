"""Philox4x32-10 and the Gumbel noise made of it, with bits that every platform can repeat.

The uniform h of 32 bits gives u = (h + 1/2) * 2^-32 and the noise -ln(-ln(1 - u)). 1 - u is exact in float64, and the
float64 logarithm is our own sequence of IEEE operations, precise near 1 where the noise is large. The result is
rounded to float32.

Sources: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011); dspark specification, section 10.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
TOKEN_DOMAIN, CHOICE_DOMAIN = 0, 1
MASK_32 = 0xFFFFFFFF

FIXED_POINT = 2.0**40

LN2_HIGH_64, LN2_LOW_64 = 6.93147180369123816490e-01, 1.90821492927058770002e-10
# Minimax coefficients of (ln(1 + f) - 2s) / s with s = f / (2 + f), as a polynomial in s^2.
LOG_SERIES = (
    6.666666666666735130e-01,
    3.999999999940941908e-01,
    2.857142874366239149e-01,
    2.222219843214978396e-01,
    1.818357216161805012e-01,
    1.531383769920937332e-01,
    1.479819860511658591e-01,
)
SQRT_HALF_64 = 0.70710678118654752440


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """Ten rounds of Philox4x32: counter int64 [..., 4], key int64 [..., 2] (values below 2^32) -> int64 [..., 4]."""
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key.unbind(-1)
    for _ in range(ROUNDS):
        # The int64 product wraps, but its 64 bits are those of the unsigned product.
        p0, p1 = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1
        c0, c1, c2, c3 = (
            ((p1 >> 32) & MASK_32) ^ c1 ^ k0,
            p1 & MASK_32,
            ((p0 >> 32) & MASK_32) ^ c3 ^ k1,
            p0 & MASK_32,
        )
        k0, k1 = (k0 + WEYL_0) & MASK_32, (k1 + WEYL_1) & MASK_32
    return torch.stack((c0, c1, c2, c3), dim=-1)


def gumbel(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Noise of every token id: seeds int64 [R] (bits of the uint64 seed), positions int64 [R] -> float32 [R, V]."""
    blocks = torch.arange(-(-vocab_size // 4), dtype=torch.int64, device=seeds.device)
    rows = seeds.shape[0]
    zero = torch.zeros(rows, blocks.shape[0], dtype=torch.int64, device=seeds.device)
    counter = torch.stack(
        (
            blocks[None, :] + zero,
            (positions & MASK_32)[:, None] + zero,
            ((positions >> 32) & MASK_32)[:, None] + zero,
            zero + TOKEN_DOMAIN,
        ),
        dim=-1,
    )
    key = torch.stack((seeds & MASK_32, (seeds >> 32) & MASK_32), dim=-1)[:, None, :]
    h = philox4x32(counter, key.expand(rows, blocks.shape[0], 2)).flatten(1)[:, :vocab_size]
    u = (h.to(torch.float64) + 0.5) * 2.0**-32
    return (-log64(-log64(1.0 - u))).to(torch.float32)


def choice_seed(seed: int, choice: int) -> int:
    """Seed of choice i of a request with n > 1: the seed itself for choice 0, else 64 bits of Philox under it."""
    if choice == 0:
        return seed
    counter = torch.tensor([choice, 0, 0, CHOICE_DOMAIN], dtype=torch.int64)
    key = torch.tensor([seed & MASK_32, (seed >> 32) & MASK_32], dtype=torch.int64)
    words = philox4x32(counter, key)
    return int(words[0]) | int(words[1]) << 32


def log64(x: Tensor) -> Tensor:
    """ln x of positive normal float64 values by a fixed sequence of IEEE operations; error below 1 ulp."""
    bits = x.view(torch.int64)
    e = ((bits >> 52) - 1022).to(torch.float64)
    m = ((bits & 0x000FFFFFFFFFFFFF) | 0x3FE0000000000000).view(torch.float64)  # in [1/2, 1)
    small = m < SQRT_HALF_64
    e = torch.where(small, e - 1.0, e)
    f = torch.where(small, (m + m) - 1.0, m - 1.0)
    s = f / (2.0 + f)
    z = s * s
    series = torch.full_like(z, LOG_SERIES[6])
    for coefficient in LOG_SERIES[5::-1]:
        series = series * z + coefficient
    r = series * z
    half = (f * f) * 0.5
    return e * LN2_HIGH_64 - ((half - (s * (half + r) + e * LN2_LOW_64)) - f)
