"""How the sum over K of a linear is cut on an accelerator: a function of the weight's shape only."""

from __future__ import annotations

from functools import cache

STEP = 128
"""Segments start at multiples of this many K."""
_TILE = 128
_BLOCKS = 132
_SHORTEST = 4
_MOST = 8
"""Blocks of a cluster, which adds the partial sums of a tile."""


@cache
def segment_depth(columns: int, depth: int) -> int:
    """K of one segment; the last one may be shorter.

    A few rows must fill the chip by cutting K, many rows fill it without; a row's bits must not depend on which of the
    two it met. So the cut is fixed by the weight: `columns` outputs in all groups, `depth` inputs in each. The partial
    sums of the segments, each in float32 over K ascending, are added in the order of the segments.
    """
    tiles = -(-columns // _TILE)
    steps = -(-depth // STEP)
    segments = max(1, min(round(_BLOCKS / tiles), steps // _SHORTEST, _MOST))
    return -(-steps // segments) * STEP
