# mypy: ignore-errors
"""Scores as sort keys: 16-bit codes that order bfloat16 scores as unsigned integers.

0 is "not allowed", -inf (and NaN) is the smallest allowed key, +0 and -0 are one key.
"""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST_BF16_KEY = tl.constexpr(0xFF7F)
LAST_BLOCK_KEY = tl.constexpr(0xFFFF)
COARSE = 8
"""Entries of a coarse block: its largest score is kept beside the scores. The k best entries lie in the k best blocks
by (largest score, then lower block), since each better block holds an entry that ranks before all of a worse one."""


@triton.jit
def sort_key(bits):
    """Bits of a bfloat16 score (int16) -> key as int32 in 0x007F .. 0xFF80."""
    bits = bits.to(tl.int32) & 0xFFFF
    bits = tl.where((bits & 0x7FFF) > 0x7F80, 0xFF80, bits)
    bits = tl.where(bits == 0x8000, 0, bits)
    return tl.where(bits >= 0x8000, bits ^ 0xFFFF, bits | 0x8000)
