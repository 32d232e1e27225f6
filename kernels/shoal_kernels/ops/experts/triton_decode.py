# mypy: ignore-errors
"""Words of `packing` to bfloat16 operands of a dot product."""

from __future__ import annotations

import triton
import triton.language as tl

from shoal_kernels.triton_lib import IS_INTERPRETED

_INTERPRETED = tl.constexpr(IS_INTERPRETED)

# One pair of bfloat16 each: bring the bits to their place, mask them, multiply by the scale.
_IN_PLACE = tl.constexpr("{.reg .b32 t; and.b32 t, $1, 0x81C081C0; mul.rn.bf16x2 $0, t, $2;}")
_TURN_6 = tl.constexpr("{.reg .b32 t; shf.r.wrap.b32 t, $1, $1, 6; and.b32 t, t, 0x81C081C0; mul.rn.bf16x2 $0, t, $2;}")
_TURN_4 = tl.constexpr("{.reg .b32 t; shf.r.wrap.b32 t, $1, $1, 4; and.b32 t, t, 0x81C081C0; mul.rn.bf16x2 $0, t, $2;}")
_LEFT_6 = tl.constexpr("{.reg .b32 t; shl.b32 t, $1, 6; and.b32 t, t, 0x81C081C0; mul.rn.bf16x2 $0, t, $2;}")
_LEFT_2 = tl.constexpr("{.reg .b32 t; shl.b32 t, $1, 2; and.b32 t, t, 0x81C081C0; mul.rn.bf16x2 $0, t, $2;}")
_REST = tl.constexpr("{.reg .b32 t; shl.b32 t, $2, 2; lop3.b32 $0, $1, t, 0x0C180C18, 0xE4;}")
_FP8_EVEN = tl.constexpr("{.reg .b32 t; and.b32 t, $1, 0x87F087F0; mul.rn.bf16x2 $0, t, $2;}")
_FP8_ODD = tl.constexpr(
    "{.reg .b32 t, l; shf.r.wrap.b32 t, $1, $1, 4; shl.b32 l, $1, 4; and.b32 t, t, 0x87808780;"
    " lop3.b32 t, l, 0x00700070, t, 0xEA; mul.rn.bf16x2 $0, t, $2;}"
)


@triton.jit
def _shr(x, bits: tl.constexpr):
    return (x >> bits) & ((1 << (32 - bits)) - 1)


@triton.jit
def _rotr(x, bits: tl.constexpr):
    return _shr(x, bits) | (x << (32 - bits))


@triton.jit
def _values(pairs, scale):
    """Host arithmetic: int32 [N, 16] pairs of bfloat16 bits -> float32 [N, 32], times the scale [N, 1]."""
    low, high = pairs << 16, pairs & -65536
    bits = tl.reshape(tl.join(low, high), (pairs.shape[0], 32))
    return bits.to(tl.float32, bitcast=True) * scale


@triton.jit
def fp4_rest(a, b):
    """The third word of an FP4 block, made of the bits that its two words have over."""
    if _INTERPRETED:
        return (a & 0x0C180C18) | ((b << 2) & 0x30603060)
    return tl.inline_asm_elementwise(_REST, "=r,r,r", [a, b], tl.int16, True, 2)


@triton.jit
def _fp4(word, scale, MOVE: tl.constexpr, ASM: tl.constexpr):
    if _INTERPRETED:
        if MOVE > 0:
            moved = _rotr(word, MOVE)
        elif MOVE < 0:
            moved = word << (-MOVE)
        else:
            moved = word
        return _values(moved & -2118090304, scale)
    return tl.inline_asm_elementwise(ASM, "=r,r,r", [word, scale], tl.bfloat16, True, 2)


@triton.jit
def decode_fp4(a, b, rest, scale, PLANE: tl.constexpr):
    """Plane of an FP4 block: [N, 32], times the scale [N, 1] of `load_scale`."""
    if PLANE == 6:
        return _fp4(rest, scale, 4, _TURN_4)
    if PLANE == 7:
        return _fp4(rest, scale, -2, _LEFT_2)
    word = a if PLANE < 3 else b
    if PLANE % 3 == 0:
        return _fp4(word, scale, 0, _IN_PLACE)
    if PLANE % 3 == 1:
        return _fp4(word, scale, 6, _TURN_6)
    return _fp4(word, scale, -6, _LEFT_6)


@triton.jit
def decode_fp8(word, scale, ODD: tl.constexpr):
    """One of the two planes of an FP8 word: [N, 32], times the scale [N, 1] of `load_scale`."""
    if _INTERPRETED:
        odd = (_rotr(word, 4) & -2021619840) | ((word << 4) & 0x00700070)
        return _values(odd if ODD else word & -2014279696, scale)
    if ODD:
        return tl.inline_asm_elementwise(_FP8_ODD, "=r,r,r", [word, scale], tl.bfloat16, True, 2)
    return tl.inline_asm_elementwise(_FP8_EVEN, "=r,r,r", [word, scale], tl.bfloat16, True, 2)


@triton.jit
def load_words(words, rows, mask, MASKED: tl.constexpr):
    """A word tile of `rows`: int16 [N, 32], in the interpreter int32 [N, 16]."""
    HALVES: tl.constexpr = 1 if _INTERPRETED else 2
    pointers = words if _INTERPRETED else words.to(tl.pointer_type(tl.int16))
    pointers += rows[:, None] * (16 * HALVES) + tl.arange(0, 16 * HALVES)[None, :]
    stored = tl.load(pointers, mask=mask[:, None], other=0) if MASKED else tl.load(pointers)
    # Chunk t holds columns t, t + 4, t + 8 and t + 12.
    columns = tl.permute(tl.reshape(stored, (rows.shape[0], 4, 4, HALVES)), (0, 2, 1, 3))
    return tl.reshape(columns, (rows.shape[0], 16 * HALVES))


@triton.jit
def load_scale(scales, rows, mask, plane, MASKED: tl.constexpr):
    """Exponent fields uint8 [N] of a plane -> the multiplier [N, 1]: bfloat16 bits, in the interpreter float32."""
    pointers = scales + rows * 8 + plane
    field = tl.load(pointers, mask=mask, other=1) if MASKED else tl.load(pointers)
    if _INTERPRETED:
        return (field.to(tl.int32) << 23).to(tl.float32, bitcast=True)[:, None]
    return (field.to(tl.int16) << 7)[:, None]


@triton.jit
def decode_block(words, scales, rows, mask, step, FP4: tl.constexpr, MASKED: tl.constexpr):
    """A whole block of K: [N, 256] in the order of K; `step` rows stand between two words of a block."""
    planes = ()
    if FP4:
        a, b = load_words(words, rows, mask, MASKED), load_words(words + 16 * step, rows, mask, MASKED)
        c = fp4_rest(a, b)
    for plane in tl.static_range(8):
        scale = load_scale(scales, rows, mask, plane, MASKED)
        if FP4:
            planes += (decode_fp4(a, b, c, scale, plane),)
        else:
            word = load_words(words + (plane // 2) * (16 * step), rows, mask, MASKED)
            planes += (decode_fp8(word, scale, plane % 2),)
    low = tl.join(tl.join(planes[0], planes[1]), tl.join(planes[2], planes[3]))
    high = tl.join(tl.join(planes[4], planes[5]), tl.join(planes[6], planes[7]))
    # [N, 32, bit 0, bit 1, bit 2 of the plane]
    ordered = tl.permute(tl.join(low, high), (0, 4, 3, 2, 1))
    return tl.reshape(ordered, (ordered.shape[0], 256))
