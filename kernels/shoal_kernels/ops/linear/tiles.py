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
# Seconds on an H200, fitted to measurements: a step of 64 of K by the rows of the tile, for FP8 and bfloat16 weights.
_STEP = {
    True: {16: 230e-9, 48: 260e-9, 128: 480e-9, 192: 585e-9, 256: 720e-9},
    False: {rows: max(300e-9, 260e-9 + 1.2e-9 * rows) for rows in (16, 48, 96, 128, 160, 192)},
}
# A launch, what a block of a cluster adds to its steps, and what it costs to park the sums of a segment.
_LAUNCH, _CLUSTER, _PARK = 3e-6, {True: 3e-6, False: 4e-6}, 5e-6
# Rows of a tile that a cluster shares.
_CLUSTER_ROWS = {True: 48, False: 96}


@dataclass(frozen=True, slots=True)
class Plan:
    """One compiled shape.

    rows    rows of a tile
    step    K of one pipeline stage
    stages  pipeline stages
    split   1: one block computes all segments; else one each of a cluster of as many, which adds their sums
    """

    rows: int
    step: int
    stages: int
    split: int

    @property
    def parked(self) -> bool:
        """Whether a block that computes all segments keeps the sums of earlier ones in memory, not in registers."""
        return self.rows > 192


@cache
def choose(rows: int, width: int, depth: int, segments: int, quantised: bool) -> Plan:
    """The plan with the least estimated time for `rows` rows and a weight [width, depth] cut into `segments`."""
    columns, steps = -(-width // TILE_COLUMNS), -(-depth // 64)

    def seconds(tile: int, split: int) -> float:
        rounds = -(-columns * -(-rows // tile) * split // MULTIPROCESSORS)
        extra = _CLUSTER[quantised] if split > 1 else _PARK * (segments - 1) if tile > 192 else 0.0
        return _LAUNCH + rounds * (steps / split * _STEP[quantised][tile] + extra)

    choices = [(tile, 1) for tile in _STEP[quantised]]
    if segments > 1:
        choices += [(tile, segments) for tile in _STEP[quantised] if tile <= _CLUSTER_ROWS[quantised]]
    return plan(*min(choices, key=lambda choice: seconds(*choice)), quantised)


def plan(tile: int, split: int, quantised: bool) -> Plan:
    """The plan of a tile size. Steps are as deep as leaves four stages: each costs a fixed number of instructions."""
    fixed = 18 * 1024 + (tile * (TILE_COLUMNS + 4) * 4 if split > 1 else 2 * min(tile, 128) * 128)
    for step, stages in ((128, 4), (64, 8), (64, 6), (64, 4)):
        weight_bytes = TILE_COLUMNS * step * (1 if quantised else 2)
        if (quantised or step == 64) and fixed + stages * (weight_bytes + tile * step * 2) <= _SHARED_BYTES:
            break
    return Plan(tile, step, stages, split)
