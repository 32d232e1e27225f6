# mypy: ignore-errors
"""Pieces that the Ascend kernels share: number formats as expressions on integer codes, and the size of the device.

Only kernel builders import this module: it needs TileLang. The functions build expressions (arguments and results are
int32 or float32 expressions unless said otherwise); they are the formats of `shoal_kernels.formats`, bit by bit.
"""

import tilelang.ascend.language as T

CUBE_CORES, VECTOR_CORES = 32, 64
"""Cores of an Ascend 950: the grid of a kernel that multiplies, and of one that does not."""

ROW_TILE = 64
"""Rows of a product's tile. Fixed: the order of its sums must not follow the number of rows."""

Q8_FLOOR, Q4UE_FLOOR, E4M3_MAX, E2M1_MAX = 1e-4, 6.0 * 2.0**-126, 448.0, 6.0


def f32(value):
    """A float32 constant."""
    return T.float32(value)


def integer(code):
    """A byte as int32."""
    return T.cast(code, "int32")


def as_float(bits):
    """int32 bits -> the float32 they are."""
    return T.reinterpret(bits, "float32")


def power_of_two_byte(amax, floor, largest):
    """ue8m0 byte of the scale of a group: the power of two at or above max(amax, floor) / largest."""
    quotient = T.max(amax, f32(floor)) / f32(largest)
    return ((T.reinterpret(quotient, "int32") + 0x007FFFFF) >> 23) & 0xFF


def inverse_of_byte(byte):
    """float32 reciprocal of the power of two of a ue8m0 byte between 1 and 253."""
    return as_float((254 - byte) << 23)


def ue8m0(byte):
    """ue8m0 byte -> float32; byte 0 is the subnormal 2^-127."""
    return as_float(T.if_then_else(byte == 0, 1 << 22, byte << 23))


def e4m3(byte):
    """e4m3 byte -> float32."""
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    subnormal = T.cast(mantissa, "float32") * f32(2.0**-9)
    magnitude = T.if_then_else(exponent == 0, subnormal, as_float(((exponent + 120) << 23) | (mantissa << 20)))
    return T.if_then_else((byte & 128) != 0, -magnitude, magnitude)


def e2m1(code):
    """e2m1 code (0 .. 15) -> float32; from code 2 on the three bits are exponent and mantissa of a float."""
    magnitude = code & 7
    bits = T.if_then_else(
        magnitude == 0, 0, T.if_then_else(magnitude == 1, 0x3F000000, 0x3F000000 + magnitude * 0x400000)
    )
    return as_float(bits | ((code & 8) << 28))


def e2m1_code(x):
    """float32 -> e2m1 code: nearest, ties to the even code, saturating at 6; the sign of -0 stays."""
    m = T.abs(x)
    code = T.cast(m > f32(0.25), "int32") + T.cast(m >= f32(0.75), "int32") + T.cast(m > f32(1.25), "int32")
    code = code + T.cast(m >= f32(1.75), "int32") + T.cast(m > f32(2.5), "int32") + T.cast(m >= f32(3.5), "int32")
    code = code + T.cast(m > f32(5.0), "int32")
    return code | ((T.reinterpret(x, "int32") >> 28) & 8)


def nibble(byte, index):
    """The code of value `index` of a byte that holds two, the lower index in the low nibble."""
    return (integer(byte) >> ((index % 2) * 4)) & 15


def clamped(x, largest):
    """x within +-largest."""
    return T.min(T.max(x, f32(-largest)), f32(largest))


def sigmoid(x):
    """1 / (1 + e^-x)."""
    return f32(1.0) / (f32(1.0) + T.exp(-x))


def bf16(x):
    """float32 -> bfloat16, nearest even."""
    return T.cast(x, "bfloat16")


def wide(x):
    """bfloat16 -> float32."""
    return T.cast(x, "float32")
