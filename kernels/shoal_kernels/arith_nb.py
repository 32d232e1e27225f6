"""The definitions of `arith` and the value casts of `formats` as numba helpers; the same bits.

Every constant is a numpy scalar: a Python float would lift the arithmetic to float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal_kernels import arith, formats
from shoal_kernels.jit import bits_of, float_of, inline

ZERO, HALF, ONE, TWO = np.float32(0.0), np.float32(0.5), np.float32(1.0), np.float32(2.0)
INF, NAN = np.float32(np.inf), np.float32(np.nan)
_LOG2E, _MAGIC = np.float32(arith.LOG2E), np.float32(arith.ROUND_MAGIC)
_LN2_HIGH, _LN2_LOW = np.float32(arith.LN2_HIGH), np.float32(arith.LN2_LOW)
_EXP_LOW, _EXP_HIGH = np.float32(arith.EXP_LOW), np.float32(arith.EXP_HIGH)
_E0, _E1, _E2, _E3, _E4, _E5 = (np.float32(c) for c in arith.EXP_POLYNOMIAL)
_L0, _L1, _L2, _L3, _L4, _L5, _L6, _L7, _L8 = (np.float32(c) for c in arith.LOG_POLYNOMIAL)
_SQRT_HALF, _SMALLEST_NORMAL = np.float32(arith.SQRT_HALF), np.float32(1.1754943508222875e-38)
_Q8_FLOOR, _Q4UE_FLOOR = np.float32(formats.Q8_FLOOR), np.float32(formats.Q4UE_FLOOR)
_E4M3_MAX, _E2M1_MAX = np.float32(formats.E4M3_MAX), np.float32(formats.E2M1_MAX)
_E4M3_MAX_BITS, _E4M3_NORMAL_BITS = np.int32(0x43E00000), np.int32(0x3C800000)  # 448 and 2^-6
_E4M3_SUBNORMAL_MAGIC = np.float32(24576.0)  # 1.5 * 2^23 * 2^-9
_T0, _T1, _T2, _T3, _T4, _T5, _T6 = (np.float32(t) for t in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0))
_SIGN = np.int32(-0x80000000)
_MAGNITUDE = np.int32(0x7FFFFFFF)


@inline
def exp(x: Any) -> Any:
    """arith.exp of one value."""
    c = x if x > _EXP_LOW else _EXP_LOW
    c = c if c < _EXP_HIGH else _EXP_HIGH
    shifted = c * _LOG2E + _MAGIC
    n = shifted - _MAGIC
    r = (c - n * _LN2_HIGH) - n * _LN2_LOW
    p = ((((_E0 * r + _E1) * r + _E2) * r + _E3) * r + _E4) * r + _E5
    p = (p * (r * r) + r) + ONE
    result = p * float_of(np.int32((bits_of(shifted) - 0x4B400000 + 127) << 23))
    result = ZERO if x < _EXP_LOW else result
    return result if x == x else x


@inline
def log(x: Any) -> Any:
    """arith.log of one value."""
    bits = bits_of(x)
    e = np.float32(np.int32((bits >> 23) - 126))
    m = float_of(np.int32((bits & 0x007FFFFF) | 0x3F000000))
    small = m < _SQRT_HALF
    e = e - ONE if small else e
    f = (m + m) - ONE if small else m - ONE
    z = f * f
    p = (((((((_L0 * f + _L1) * f + _L2) * f + _L3) * f + _L4) * f + _L5) * f + _L6) * f + _L7) * f + _L8
    y = (p * f) * z
    y = y + e * _LN2_LOW
    y = y - z * HALF
    result = (f + y) + e * _LN2_HIGH
    result = -INF if x < _SMALLEST_NORMAL else result
    result = NAN if x < ZERO else result
    result = INF if x == INF else result
    return result if x == x else x


@inline
def log1p(x: Any) -> Any:
    """arith.log1p of one value."""
    u = ONE + x
    d = u - ONE
    return x if d == ZERO else log(u) * (x / d)


@inline
def sigmoid(x: Any) -> Any:
    """arith.sigmoid of one value."""
    return ONE / (ONE + exp(-x))


@inline
def silu(x: Any) -> Any:
    """arith.silu of one value."""
    return x / (ONE + exp(-x))


@inline
def softplus(x: Any) -> Any:
    """arith.softplus of one value."""
    return (x if x > ZERO else ZERO) + log1p(exp(-abs(x)))


@inline
def rsqrt(x: Any) -> Any:
    """arith.rsqrt of one value."""
    return ONE / np.sqrt(x)


@inline
def tree_sum(buffer: Any, count: Any) -> Any:
    """arith.tree_sum of buffer[:count]. The buffer is overwritten and must reach to the next power of two."""
    width = 1
    while width < count:
        width *= 2
    for i in range(count, width):
        buffer[i] = ZERO
    while width > 1:
        width //= 2
        low, high = buffer[:width], buffer[width : 2 * width]
        for i in range(width):
            low[i] = low[i] + high[i]
    return buffer[0] + ZERO if count > 0 else ZERO


@inline
def power_of_two(count: Any) -> Any:
    """Smallest power of two that is at least `count`, at least 1."""
    width = 1
    while width < count:
        width *= 2
    return width


@inline
def bf16(x: Any) -> Any:
    """x rounded to bfloat16, nearest, ties to even; NaN stays NaN."""
    bits = bits_of(x)
    rounded = float_of(np.int32((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000))
    return rounded if x == x else x


@inline
def amax_bits(x: Any, start: Any, stop: Any) -> Any:
    """Bits of max |x[start:stop]|; integer comparison, because a float maximum would not vectorise."""
    part = x[start:stop]
    largest = np.int32(0)
    for i in range(part.shape[0]):
        magnitude = np.int32(bits_of(part[i]) & _MAGNITUDE)
        largest = magnitude if magnitude > largest else largest
    return largest


@inline
def ue8m0_scale_bits(quotient: Any) -> Any:
    """Bits of the smallest power of two that is at least `quotient`."""
    return np.int32((bits_of(quotient) + 0x007FFFFF) & 0x7F800000)


@inline
def q8_scale_bits(largest: Any) -> Any:
    """Scale of a Q8 group whose largest magnitude has these bits."""
    amax = float_of(largest)
    amax = amax if amax > _Q8_FLOOR else _Q8_FLOOR
    return ue8m0_scale_bits(amax / _E4M3_MAX)


@inline
def q4ue_scale_bits(largest: Any) -> Any:
    """Scale of a Q4ue group whose largest magnitude has these bits."""
    amax = float_of(largest)
    amax = amax if amax > _Q4UE_FLOOR else _Q4UE_FLOOR
    return ue8m0_scale_bits(amax / _E2M1_MAX)


@inline
def e4m3_magnitude(x: Any) -> Any:
    """|x| rounded to the nearest e4m3 value, saturating at 448."""
    magnitude = np.int32(bits_of(x) & _MAGNITUDE)
    magnitude = magnitude if magnitude < _E4M3_MAX_BITS else _E4M3_MAX_BITS
    normal = float_of(np.int32((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) & -0x100000))
    subnormal = (float_of(magnitude) + _E4M3_SUBNORMAL_MAGIC) - _E4M3_SUBNORMAL_MAGIC
    return normal if magnitude >= _E4M3_NORMAL_BITS else subnormal


@inline
def with_sign(magnitude: Any, signed: Any) -> Any:
    """`magnitude` with the sign bit of `signed`."""
    return float_of(np.int32(bits_of(magnitude) | (bits_of(signed) & _SIGN)))


@inline
def e2m1_code(x: Any) -> Any:
    """Three-bit code of |x|: nearest, ties to the even code, saturating."""
    m = abs(x)
    return (
        np.int32(m > _T0)
        + np.int32(m >= _T1)
        + np.int32(m > _T2)
        + np.int32(m >= _T3)
        + np.int32(m > _T4)
        + np.int32(m >= _T5)
        + np.int32(m > _T6)
    )


@inline
def e2m1_magnitude(x: Any) -> Any:
    """|x| rounded to the nearest e2m1 value: the sum of the steps that its code has climbed."""
    m = abs(x)
    result = HALF if m > _T0 else ZERO
    result = ONE if m >= _T1 else result
    result = np.float32(1.5) if m > _T2 else result
    result = TWO if m >= _T3 else result
    result = np.float32(3.0) if m > _T4 else result
    result = np.float32(4.0) if m >= _T5 else result
    return np.float32(6.0) if m > _T6 else result


@inline
def q8_row(x: Any, out: Any) -> None:
    """out = dequantised Q8 of the vector x; its length is a multiple of 32. out may be x."""
    for start in range(0, x.shape[0], 32):
        source, target = x[start : start + 32], out[start : start + 32]
        scale = float_of(q8_scale_bits(amax_bits(source, 0, 32)))
        inverse = ONE / scale
        for i in range(32):
            y = source[i] * inverse
            target[i] = with_sign(e4m3_magnitude(y), y) * scale
