# mypy: ignore-errors
"""Pieces of the row-wise Triton kernels: the arithmetic of `arith`, number formats, and rows held as pairs.

A row of even size is held as two vectors, its even and its odd values: rotation mixes the two of a pair, and a byte of
FP4 holds them. `exp`, `log` and what is made of them follow the operations of `shoal_kernels.arith` one by one, so with
`EXACT_OPTIONS` they have its bits. Scales that are powers of two are handled by their ue8m0 byte, in integers.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from shoal_kernels.triton_lib import E2M1_MAX, E4M3_MAX, IS_INTERPRETED, Q4NV_FLOOR, Q4UE_FLOOR, Q8_FLOOR, round_bf16
from shoal_kernels.triton_lib import round_e4m3 as _round_e4m3

_INTERPRETED = tl.constexpr(IS_INTERPRETED)
WINDOW, MAIN, INDEX = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def exp(x):
    """arith.exp."""
    clamped = tl.where(x > -87.0, x, -87.0)
    clamped = tl.where(clamped < 88.0, clamped, 88.0)
    shifted = clamped * 1.44269504088896341 + 12582912.0
    n = shifted - 12582912.0
    r = (clamped - n * 0.693359375) - n * -2.12194440e-4
    p = 1.9875691500e-4 * r + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    p = (p * (r * r) + r) + 1.0
    exponent = (shifted.to(tl.int32, bitcast=True) - 0x4B400000 + 127) << 23
    result = p * exponent.to(tl.float32, bitcast=True)
    result = tl.where(x < -87.0, 0.0, result)
    return tl.where(x == x, result, x)


@triton.jit
def log(x):
    """arith.log."""
    bits = x.to(tl.int32, bitcast=True)
    e = ((bits >> 23) - 126).to(tl.float32)
    m = ((bits & 0x007FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    small = m < 0.707106781186547524
    e = tl.where(small, e - 1.0, e)
    f = tl.where(small, (m + m) - 1.0, m - 1.0)
    z = f * f
    p = 7.0376836292e-2 * f + -1.1514610310e-1
    p = p * f + 1.1676998740e-1
    p = p * f + -1.2420140846e-1
    p = p * f + 1.4249322787e-1
    p = p * f + -1.6668057665e-1
    p = p * f + 2.0000714765e-1
    p = p * f + -2.4999993993e-1
    p = p * f + 3.3333331174e-1
    y = (p * f) * z
    y = y + e * -2.12194440e-4
    y = y - z * 0.5
    result = (f + y) + e * 0.693359375
    result = tl.where(x < 1.1754943508222875e-38, float("-inf"), result)
    result = tl.where(x < 0.0, float("nan"), result)
    result = tl.where(x == float("inf"), float("inf"), result)
    return tl.where(x == x, result, x)


@triton.jit
def softplus(x):
    """arith.softplus: max(x, 0) + ln(1 + e^-|x|)."""
    small = exp(-tl.abs(x))
    u = 1.0 + small
    d = u - 1.0
    tail = tl.where(d == 0.0, small, log(u) * tl.math.div_rn(small, tl.where(d == 0.0, 1.0, d)))
    return tl.where(x > 0.0, x, 0.0) + tail


@triton.jit
def sigmoid(x):
    """arith.sigmoid."""
    return tl.math.div_rn(1.0, 1.0 + exp(-x))


@triton.jit
def rsqrt(x):
    """arith.rsqrt: both steps correctly rounded."""
    return tl.math.div_rn(1.0, tl.math.sqrt_rn(x))


@triton.jit
def tree_sum(x, SIZE: tl.constexpr):
    """arith.tree_sum of up to 64 values. Sums of two only, so that no layout can change the order."""
    tl.static_assert(SIZE <= 64)
    if SIZE >= 64:
        x = tl.sum(tl.reshape(x, [2, 32]), 0)
    if SIZE >= 32:
        x = tl.sum(tl.reshape(x, [2, 16]), 0)
    if SIZE >= 16:
        x = tl.sum(tl.reshape(x, [2, 8]), 0)
    if SIZE >= 8:
        x = tl.sum(tl.reshape(x, [2, 4]), 0)
    if SIZE >= 4:
        x = tl.sum(tl.reshape(x, [2, 2]), 0)
    return tl.sum(x, 0)


@triton.jit
def bf16_value(x):
    """float32 -> the float32 value of the nearest bfloat16."""
    return round_bf16(x).to(tl.float32)


@triton.jit
def q8_byte(amax):
    """ue8m0 byte of a Q8 group: 2^ceil(log2(amax / 448)); 448 is 1.75 * 2^8, so the mantissa decides in integers."""
    bits = tl.maximum(amax, Q8_FLOOR).to(tl.int32, bitcast=True)
    return ((bits + 0x1FFFFF) >> 23) - 8


@triton.jit
def q4ue_byte(amax):
    """ue8m0 byte of a Q4ue group: 2^ceil(log2(amax / 6)); 6 is 1.5 * 2^2."""
    bits = tl.maximum(amax, Q4UE_FLOOR).to(tl.int32, bitcast=True)
    return ((bits + 0x3FFFFF) >> 23) - 2


@triton.jit
def power_of_two(byte):
    """2^(byte - 127) for an int32 ue8m0 byte in [1, 254]."""
    return (byte << 23).to(tl.float32, bitcast=True)


@triton.jit
def inverse_power_of_two(byte):
    """2^(127 - byte) for an int32 ue8m0 byte in [1, 253]."""
    return ((254 - byte) << 23).to(tl.float32, bitcast=True)


@triton.jit
def with_sign(magnitude, bits):
    """A non-negative float32 with bit 31 of `bits` as its sign; Triton's own minus turns a zero into +0."""
    return (magnitude.to(tl.int32, bitcast=True) | (bits & -2147483648)).to(tl.float32, bitcast=True)


@triton.jit
def to_e4m3(x):
    """float32 -> uint8 byte of the nearest e4m3, ties to even, saturating."""
    if _INTERPRETED:
        value = _round_e4m3(tl.minimum(tl.maximum(x, -E4M3_MAX), E4M3_MAX))
        bits = tl.abs(value).to(tl.int32, bitcast=True)
        normal = (bits >> 20) - (120 << 3)
        small = (tl.abs(value) * 512.0).to(tl.int32)
        sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
        return (tl.where(tl.abs(value) >= 0.015625, normal, small) | sign).to(tl.uint8)
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def from_e4m3(byte):
    """uint8 e4m3 byte -> float32."""
    if _INTERPRETED:
        magnitude = byte.to(tl.int32) & 0x7F
        normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        value = tl.where(magnitude >= 8, normal, magnitude.to(tl.float32) * 0.001953125)
        value = tl.where(magnitude == 0x7F, float("nan"), value)
        return with_sign(value, byte.to(tl.int32) << 24)
    return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def e4m3_value(x):
    """float32 -> the float32 value of the nearest e4m3, saturating, with the sign of zero kept."""
    return from_e4m3(to_e4m3(x))


@triton.jit
def e2m1_code(x):
    """float32 -> int32 code of the nearest e2m1, ties to even, saturating; the sign in bit 3."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Below 1 the step is 1/2: so is the unit in the last place of 1.5 * 2^22. From 1 on, one bit of mantissa is kept.
    small = (tl.abs(x) + 6291456.0).to(tl.int32, bitcast=True) - 0x4AC00000
    large = ((magnitude + 0x1FFFFF + ((magnitude >> 22) & 1)) >> 22) - 252
    code = tl.minimum(tl.where(magnitude < 0x3F800000, small, large), 7)
    return code | ((bits >> 28) & 8)


@triton.jit
def e2m1_value(x):
    """float32 -> the float32 value of the nearest e2m1, ties to even, saturating, with the sign of zero kept."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    small = (tl.abs(x) + 6291456.0) - 6291456.0
    large = ((magnitude + 0x1FFFFF + ((magnitude >> 22) & 1)) & -0x400000).to(tl.float32, bitcast=True)
    value = tl.minimum(tl.where(magnitude < 0x3F800000, small, large), 6.0)
    return with_sign(value, bits)


@triton.jit
def from_e2m1(code):
    """int32 code, 0 .. 15 -> float32."""
    magnitude = code & 7
    normal = ((magnitude + 252) << 22).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, normal)
    return with_sign(value, code << 28)


@triton.jit
def q8_value(x, axis: tl.constexpr):
    """Dequantised Q8 of groups of 32 along `axis`."""
    byte = q8_byte(tl.max(tl.abs(x), axis, keep_dims=True))
    return e4m3_value(x * inverse_power_of_two(byte)) * power_of_two(byte)


@triton.jit
def q4ue_value(x, axis: tl.constexpr):
    """Dequantised Q4ue of groups of 32 along `axis`."""
    byte = q4ue_byte(tl.max(tl.abs(x), axis, keep_dims=True))
    return e2m1_value(x * inverse_power_of_two(byte)) * power_of_two(byte)


@triton.jit
def load_pairs(pointer, DIM: tl.constexpr, PAIRS: tl.constexpr):
    """A row of DIM values as (even, odd), float32 [PAIRS] each, zero beyond the row."""
    i = tl.arange(0, 2 * PAIRS)
    x = tl.load(pointer + i, mask=i < DIM, other=0.0).to(tl.float32)
    return tl.split(tl.reshape(x, [PAIRS, 2]))


@triton.jit
def store_pairs(pointer, even, odd, DIM: tl.constexpr, PAIRS: tl.constexpr):
    """Inverse of `load_pairs`, as bfloat16."""
    i = tl.arange(0, 2 * PAIRS)
    x = tl.reshape(tl.join(even, odd), [2 * PAIRS])
    tl.store(pointer + i, round_bf16(x), mask=i < DIM)


@triton.jit
def norm_pairs(even, odd, even_weight, odd_weight, eps, DIM: tl.constexpr):
    """RMS norm of a row with its float32 weight, rounded to bfloat16 values.

    The weight comes loaded: Triton keeps the order of memory accesses, and one behind the sum would wait for it.
    """
    factor = rsqrt(tl.math.div_rn(tl.sum(even * even + odd * odd, 0), DIM * 1.0) + eps)
    return bf16_value((even * factor) * even_weight), bf16_value((odd * factor) * odd_weight)


@triton.jit
def load_angles(cos_sin, position, FREQUENCIES: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr):
    """cos and sin of every pair of a row at a position; 1 and 0 for the pairs that are not rotated."""
    pair = tl.arange(0, PAIRS) - (DIM // 2 - FREQUENCIES)
    is_rotated = (pair >= 0) & (pair < FREQUENCIES)
    angles = cos_sin + position * (2 * FREQUENCIES) + pair
    return tl.load(angles, mask=is_rotated, other=1.0), tl.load(angles + FREQUENCIES, mask=is_rotated, other=0.0)


@triton.jit
def rotate_pairs(even, odd, cos, sin, FREQUENCIES: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr):
    """Rotate the last FREQUENCIES pairs of a row, rounded to bfloat16 values."""
    pair = tl.arange(0, PAIRS) - (DIM // 2 - FREQUENCIES)
    is_rotated = (pair >= 0) & (pair < FREQUENCIES)
    new_even, new_odd = even * cos - odd * sin, even * sin + odd * cos
    return bf16_value(tl.where(is_rotated, new_even, even)), bf16_value(tl.where(is_rotated, new_odd, odd))


@triton.jit
def store_record(even, odd, data, scales, KIND: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr):
    """Encode a row and store its data and its scales; DIM is a multiple of 32."""
    GROUP: tl.constexpr = 8 if KIND == MAIN else 16
    GROUPS: tl.constexpr = PAIRS // GROUP
    even, odd = tl.reshape(even, [GROUPS, GROUP]), tl.reshape(odd, [GROUPS, GROUP])
    amax = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 1, keep_dims=True)
    if KIND == MAIN:
        byte = to_e4m3(tl.math.div_rn(tl.maximum(amax, Q4NV_FLOOR), E2M1_MAX))
        inverse = tl.math.div_rn(1.0, from_e4m3(byte))
    elif KIND == WINDOW:
        byte = q8_byte(amax)
        inverse = inverse_power_of_two(byte)
    else:
        byte = q4ue_byte(amax)
        inverse = inverse_power_of_two(byte)
    if KIND == WINDOW:
        i = tl.arange(0, 2 * PAIRS)
        both = tl.reshape(tl.join(to_e4m3(even * inverse), to_e4m3(odd * inverse)), [2 * PAIRS])
        tl.store(data + i, both, mask=i < DIM)
    else:
        i = tl.arange(0, PAIRS)
        both = e2m1_code(even * inverse) | (e2m1_code(odd * inverse) << 4)
        tl.store(data + i, tl.reshape(both, [PAIRS]).to(tl.uint8), mask=i < DIM // 2)
    group = tl.arange(0, GROUPS)
    tl.store(scales + group, tl.reshape(byte, [GROUPS]).to(tl.uint8), mask=group < DIM // (2 * GROUP))


@functools.cache
def programs_at_once(device: torch.device) -> int:
    """Programs for a grid that a device runs in one round, two to a multiprocessor."""
    if device.type != "cuda":
        return 8
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x contiguous at an address of 16 bytes. Triton compiles another order of a sum for another alignment."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def aligned_rows(x: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """x [R, D] for a kernel that sums over its rows: the tensor, its row stride in units, and the unit (STEP).

    The unit is 16 bytes wherever D allows it, however far apart the rows are and however many: so the compiled kernel,
    and with it the order of the sum, follow from D alone. Rows that lie otherwise are copied.
    """
    step = 16 // x.element_size()
    step = step if x.shape[1] % step == 0 else 1
    if x.stride(1) != 1 or x.stride(0) % step or x.data_ptr() % 16:
        x = aligned(x)
    return x, x.stride(0) // step, step


def row_parts(dim: int) -> tuple[int, int, bool]:
    """A row of `dim` values as PARTS x SIZE, and whether up to SIZE more follow; both are powers of two.

    So a long row leaves few lanes idle: 5120 is 4 x 1024 + 1024, where one power of two would be 8192.
    """
    head = max(32, triton.next_power_of_2(dim + 1) // 2)
    if dim <= head:
        size = min(head, 1024)
        return head // size, size, False
    size = max(32, triton.next_power_of_2(dim - head))
    return head // size, size, True


def pairs_of(dim: int) -> int:
    """PAIRS for a row of `dim` values: a power of two with room for the formats' groups."""
    return max(16, triton.next_power_of_2(dim) // 2)
