"""How the sum over K of a linear is cut on an accelerator: a function of the weight's shape only."""

from __future__ import annotations

from functools import cache

UNIT = 256
"""Segments start at multiples of this many K."""
_TILE = 128
_BLOCKS = 132
_MOST = 8


@cache
def segment_count(columns: int, depth: int) -> int:
    """Segments of a weight with `columns` outputs in all groups and `depth` inputs in each.

    A few rows must fill the chip by cutting K, many rows fill it without; a row's bits must not depend on which of the
    two it met. So the cut is fixed by the weight. The partial sums of the segments, each in float32 over K ascending,
    are added in the order of the segments. Of u units segment i of n has units i * u // n .. (i + 1) * u // n.

    A power of two: the blocks of a cluster are placed two multiprocessors at a time (three left many of them idle).
    """
    tiles, units = -(-columns // _TILE), -(-depth // UNIT)
    count = _MOST
    while count > 1 and (count * tiles > _BLOCKS or 2 * count > units):
        count //= 2
    return count
