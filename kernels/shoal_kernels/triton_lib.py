# mypy: ignore-errors
"""Pieces that the Triton kernels share: number formats, dot products, launch options.

Kernels that give the bits of the host are launched with `EXACT_OPTIONS`: without fused multiply-add, a product and a
sum are two IEEE operations, as in `shoal_kernels.arith`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

IS_INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on host tensors."""

EXACT_OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}


@functools.cache
def grids_overlap(device: torch.device) -> bool:
    """Whether a grid can be launched before the one in front of it has ended, and wait inside (from SM90 on)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


_INTERPRETED = tl.constexpr(IS_INTERPRETED)
Q8_FLOOR, Q4UE_FLOOR, Q4NV_FLOOR = tl.constexpr(1e-4), tl.constexpr(6.0 * 2.0**-126), tl.constexpr(6.0 * 2.0**-9)
E4M3_MAX, E2M1_MAX = tl.constexpr(448.0), tl.constexpr(6.0)


@triton.jit
def dot(a, b, acc):
    """acc + a @ b with bf16 operands and a float32 accumulator; the interpreter has no bf16, so it takes float32."""
    if _INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def round_bf16(x):
    """float32 -> the nearest bfloat16, ties to even. The interpreter's own cast truncates, so bits are rounded."""
    if _INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        kept = tl.where(x == x, rounded, bits)
        return kept.to(tl.float32, bitcast=True).to(tl.bfloat16)
    return x.to(tl.bfloat16)


@triton.jit
def decode_ue8m0(byte):
    """ue8m0 byte (any integer type) -> float32 2^(byte - 127); byte 0 is the subnormal 2^-127."""
    exponent = byte.to(tl.int32)
    bits = tl.where(exponent == 0, 1 << 22, exponent << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def power_of_two_scale(quotient):
    """The power of two at or above a positive float32, and its ue8m0 byte (int32)."""
    bits = (quotient.to(tl.int32, bitcast=True) + 0x007FFFFF) & 0x7F800000
    return bits.to(tl.float32, bitcast=True), bits >> 23


@triton.jit
def round_e4m3(x):
    """float32 within +-448 -> the float32 value of the nearest e4m3, ties to even."""
    magnitude = tl.abs(x)
    exponent = (magnitude.to(tl.int32, bitcast=True) >> 23) - 127
    exponent = tl.maximum(exponent, -6)
    step = ((exponent - 3 + 127) << 23).to(tl.float32, bitcast=True)
    # Adding and taking away 1.5 * 2^23 steps rounds to a multiple of the step, ties to even.
    magic = step * 12582912.0
    rounded = (magnitude + magic) - magic
    return tl.where(x < 0, -rounded, rounded)


@triton.jit
def cast_q8(groups, axis: tl.constexpr):
    """Q8 of float32 groups of 32 along `axis`, dequantised: the float32 value that e4m3 byte and scale stand for."""
    amax = tl.maximum(tl.max(tl.abs(groups), axis, keep_dims=True), Q8_FLOOR)
    scale, _ = power_of_two_scale(tl.math.div_rn(amax, E4M3_MAX))
    inverse = tl.math.div_rn(1.0, scale)
    clamped = tl.minimum(tl.maximum(groups * inverse, -E4M3_MAX), E4M3_MAX)
    return round_e4m3(clamped) * scale


def empty_like_rows(x: torch.Tensor, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """An output tensor on the device of `x`."""
    return torch.empty(shape, dtype=dtype, device=x.device)
