"""Tile sizes of the TileLang linear. They do not change a bit of the result, so they may follow the number of rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

TILE_COLUMNS = 128
"""Outputs of one block: two warpgroups of 64."""
MOST_DEPTH = 16384
"""K that the scales of one tile have room for."""
MULTIPROCESSORS = 132
_SHARED_BYTES = 220 * 1024
_TILES = (16, 32, 48, 64, 96, 128, 192, 256)
# Clocks of one step of 64 of K: what a warpgroup needs to dequantise and to wait, however few the rows; and per step
# of its copy of the weight tile, when every multiprocessor copies.
_LEAST_CLOCKS, _COPY_CLOCKS = 300, 470
_SPLIT_CLOCKS = 3000
PITCH = TILE_COLUMNS + 4
"""Floats between the rows of partial sums in shared memory: warps write columns of them without bank conflicts."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One compiled shape.

    rows    rows of a tile
    step    K of one pipeline stage
    stages  pipeline stages
    split   1: one block computes all segments; else one each of a cluster of as many, which adds their sums
    pair    2: two blocks take tiles of neighbouring outputs and the same rows, and share one copy of the input
    """

    rows: int
    step: int
    stages: int
    split: int
    pair: int = 1


@cache
def choose(rows: int, width: int, depth: int, segments: int, quantised: bool) -> Plan:
    """The plan with the least estimated time for `rows` rows and a weight [width, depth] cut into `segments`."""
    best, least = plan(_TILES[0], 1, quantised), float("inf")
    columns = -(-width // TILE_COLUMNS)
    steps = -(-depth // 64)
    for tile in _TILES:
        for split in {1, segments}:
            if tile > (256 if segments == 1 else 192 if split == 1 else 128):
                continue  # the sums of a segment and of those before would not fit
            blocks = columns * -(-rows // tile) * split
            waves = -(-blocks // MULTIPROCESSORS)
            clocks = waves * (steps / split) * max(_LEAST_CLOCKS, 4.2 * tile) + (_SPLIT_CLOCKS if split > 1 else 0)
            if clocks < least:
                best, least = plan(tile, split, quantised), clocks
    return best


def plan(tile: int, split: int, quantised: bool) -> Plan:
    """The plan of a tile size. Steps are as deep as leaves four stages: each costs a fixed number of instructions."""
    fixed = 18 * 1024 + (tile * PITCH * 4 if split > 1 else 2 * min(tile, 128) * 128)
    for step, stages in ((128, 4), (64, 8), (64, 4)):
        weight_bytes = TILE_COLUMNS * step * (1 if quantised else 2)
        if (quantised or step == 64) and fixed + stages * (weight_bytes + tile * step * 2) <= _SHARED_BYTES:
            break
    return Plan(tile, step, stages, split)
