# mypy: ignore-errors
"""Scores as sort keys: 16-bit codes that order bfloat16 scores as unsigned integers.

0 is "not allowed", -inf (and NaN) is the smallest allowed key, +0 and -0 are one key. Kept in int16 tensors.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shoal_kernels.triton_lib import round_bf16

LARGEST_BF16_KEY = tl.constexpr(0xFF7F)
LAST_BLOCK_KEY = tl.constexpr(0xFFFF)
COARSE = 8
"""Entries of a coarse block: its largest key is kept beside the keys. The k best entries lie in the k best blocks by
(largest key, then lower block), since each better block holds an entry that ranks before all of a worse one."""


@triton.jit
def sort_key(score):
    """float32 score -> key as int32 in 0x007F .. 0xFF80."""
    bits = round_bf16(score).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    bits = tl.where((bits & 0x7FFF) > 0x7F80, 0xFF80, bits)
    bits = tl.where(bits == 0x8000, 0, bits)
    return tl.where(bits >= 0x8000, bits ^ 0xFFFF, bits | 0x8000)


@triton.jit
def _scores_of_keys(keys, out, total, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < total
    key = tl.load(keys + row * width + place, mask=inside, other=0).to(tl.int32) & 0xFFFF
    bits = tl.where(key >= 0x8000, key & 0x7FFF, key ^ 0xFFFF)
    bits = tl.where(key == 0, 0xFF80, bits)
    tl.store(out + row * total + place, bits.to(tl.int16), mask=inside)


def scores_of_keys(keys, out, total):
    """keys int16 [R, width] -> out bfloat16 [R, total], as int16 bits: -inf where not allowed."""
    if out.numel():
        grid = out.shape[0], triton.cdiv(total, 1024)
        _scores_of_keys[grid](keys, out, total, keys.shape[1], BLOCK=1024)
