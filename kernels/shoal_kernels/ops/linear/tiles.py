"""Tile sizes of the TileLang linear. They do not change a bit of the result, so they may follow the number of rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

TILE_COLUMNS = 128
"""Outputs of one block: two warpgroups of 64."""
MOST_DEPTH = 16384
"""K that the scales of one tile have room for."""
MULTIPROCESSORS = 132
_SHARED_BYTES = 226 * 1024
_TILES = (16, 48, 96, 128, 160, 192, 256)
# Seconds on an H200, fitted to measurements: a step of 64 of K and a row of the tile in it, for FP8 and for bfloat16
# weights, a launch, and what a block of a cluster adds to its steps.
_STEP, _STEP_ROW, _STEP_LEAST = {True: 200e-9, False: 260e-9}, {True: 2.25e-9, False: 1.2e-9}, 300e-9
_LAUNCH, _CLUSTER = 3e-6, 4e-6


@dataclass(frozen=True, slots=True)
class Plan:
    """One compiled shape.

    rows     rows of a tile
    columns  outputs of a tile: 64 of each consuming warpgroup
    step     K of one pipeline stage
    stages   pipeline stages
    split    1: one block computes all segments; else one each of a cluster of as many, which adds their sums
    """

    rows: int
    columns: int
    step: int
    stages: int
    split: int

    @property
    def parked(self) -> bool:
        """Whether a block that computes all segments keeps the sums of earlier ones in memory, not in registers."""
        return self.rows > (192 if self.columns == 128 else 64)

    @property
    def turns(self) -> bool:
        """Whether warpgroups multiply in turns: where a product takes longer than to decode its operand."""
        return self.rows >= 96


@cache
def choose(rows: int, width: int, depth: int, segments: int, quantised: bool) -> Plan:
    """The plan with the least estimated time for `rows` rows and a weight [width, depth] cut into `segments`."""
    columns, steps = -(-width // TILE_COLUMNS), -(-depth // 64)

    def seconds(tile: int, split: int) -> float:
        rounds = -(-columns * -(-rows // tile) * split // MULTIPROCESSORS)
        step = max(_STEP_LEAST, _STEP[quantised] + _STEP_ROW[quantised] * tile)
        return _LAUNCH + rounds * (steps / split * step + (_CLUSTER if split > 1 else 0))

    most = {segments: 96, 1: 256 if quantised else 192}
    choices = [(tile, split) for split, largest in most.items() for tile in _TILES if tile <= largest]
    return plan(*min(choices, key=lambda choice: seconds(*choice)), quantised)


def plan(tile: int, split: int, quantised: bool, columns: int = TILE_COLUMNS) -> Plan:
    """The plan of a tile size: steps as deep as leaves four stages, and as many stages as there is room for.

    A stage is given back about two steps after its bytes are there, so few stages would wait for memory.
    """
    fixed = columns * 128 + 2048 + (columns * (tile if tile <= 128 else tile // 2) * 2 if split == 1 else 0)
    for step in (128, 64):
        stage = columns * step * (1 if quantised else 2) + tile * step * 2
        stages = min(8 * 128 // step, (_SHARED_BYTES - fixed) // stage)
        if (quantised or step == 64) and stages >= 4:
            break
    return Plan(tile, columns, step, stages, split)
