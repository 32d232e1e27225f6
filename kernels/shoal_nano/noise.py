"""The coupled sampler's noise: one Gumbel value per (seed, output position, token).

source  dspark.md section 10.2
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox4x32(key: int, counters: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Philox4x32-10 of uint32[n, 4] counters under a 64-bit key -> uint32[n, 4]."""
    c0, c1, c2, c3 = (counters[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF
    for _ in range(10):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ np.uint64(k0), p1 & _LOW, (p0 >> _SHIFT) ^ c3 ^ np.uint64(k1), p0 & _LOW
        k0, k1 = k0 + _KEY_STEPS[0] & 0xFFFFFFFF, k1 + _KEY_STEPS[1] & 0xFFFFFFFF
    return np.stack((c0, c1, c2, c3), 1).astype(np.uint32)


@lru_cache(maxsize=4096)
def gumbel(seed: int, position: int, vocab_size: int, domain: int = 0) -> NDArray[np.float64]:
    """float64[vocab_size] noise of one output position."""
    counters = np.zeros((-(-vocab_size // 4), 4), np.uint32)
    counters[:, 0] = np.arange(len(counters))
    counters[:, 1:] = position & 0xFFFFFFFF, position >> 32, domain
    u = (philox4x32(seed, counters).reshape(-1)[:vocab_size].astype(np.float64) + 0.5) * 2.0**-32
    result: NDArray[np.float64] = -np.log(-np.log(u))
    return result
