"""Tile sizes of the TileLang linear. They do not change a bit of the result, so they may follow the number of rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

TILE_COLUMNS = 128
"""Outputs of one block: two warpgroups of 64."""
MOST_DEPTH = 16384
"""K that the scales of one tile have room for."""
_MULTIPROCESSORS = 132
_SHARED_BYTES = 220 * 1024
_TILES = (16, 32, 48, 64, 96, 128, 192, 256)
# Clocks of one step of 64 of K: what a warpgroup needs to dequantise and to wait, however few the rows; and per step
# of its copy of the weight tile, when every multiprocessor copies.
_LEAST_CLOCKS, _COPY_CLOCKS = 300, 470
_MERGE_CLOCKS = 4000
_MERGE_BYTES_PER_CLOCK = 2000


@dataclass(frozen=True, slots=True)
class Plan:
    """One compiled shape.

    rows    rows of a tile
    step    K of one pipeline stage
    stages  pipeline stages
    blocks  blocks that share a multiprocessor
    merged  one block computes all segments; else one each, and partial sums are added afterwards
    """

    rows: int
    step: int
    stages: int
    blocks: int
    merged: bool


@cache
def choose(rows: int, width: int, depth: int, segments: int, quantised: bool) -> Plan:
    """The plan with the least estimated time for `rows` rows and a weight [width, depth] cut into `segments`."""
    best, least = _TILES[0], float("inf")
    best_merged = True
    columns = -(-width // TILE_COLUMNS)
    steps = -(-depth // 64)
    for tile in _TILES:
        for merged in (True, False) if segments > 1 else (True,):
            if tile > 192 and merged and segments > 1:
                continue  # both accumulators would not fit the registers
            blocks = columns * -(-rows // tile) * (1 if merged else segments)
            waves = -(-blocks // _MULTIPROCESSORS)
            clocks = waves * (steps / (1 if merged else segments)) * max(_LEAST_CLOCKS, 4.2 * tile)
            if not merged:
                clocks += _MERGE_CLOCKS + rows * width * segments * 8 / _MERGE_BYTES_PER_CLOCK
            if clocks < least:
                best, best_merged, least = tile, merged, clocks
    return plan(best, best_merged, quantised)


def plan(tile: int, merged: bool, quantised: bool) -> Plan:
    """The plan of a tile size: small tiles share a multiprocessor, so that one computes while another waits."""
    blocks = 2 if tile <= 64 else 1
    step = 64
    weight_bytes = TILE_COLUMNS * step * (1 if quantised else 2)
    fixed = 8 * 1024 + 2 * min(tile, 128) * 128 + 2048
    stages = (_SHARED_BYTES // blocks - fixed) // (weight_bytes + tile * step * 2)
    return Plan(tile, step, 8 if stages >= 8 else 4, blocks, merged)
