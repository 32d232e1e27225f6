"""How far each tier carries a prefix, and which tiers are worth loading from."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from shoal_kv_cache.core.entries import BLOCK_TOKENS
from shoal_kv_cache.core.found import Usable
from shoal_kv_cache.core.load_rate import LoadRate


class Level(IntEnum):
    """Where a payload lies, nearest first; numbers as in the proto's Tier. ABSENT: nowhere that is known."""

    ABSENT = 0
    RAM = 1
    SSD = 2
    PEERS = 3
    REMOTE = 4


class Wish(NamedTuple):
    """What is asked for: see AcquireRequest. `max_blocks` bounds the usable prefix."""

    max_blocks: int
    want_replay: bool
    blocks_only: bool
    replay_reach_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """Where the blocks of a chain and the snapshots at their ends lie.

    levels      one Level per block, from position 0
    snapshots   Level of the snapshot at the end of a block, by block index; the nearest
    """

    levels: bytes
    snapshots: Mapping[int, Level]


class Reach(NamedTuple):
    """What the tiers down to `level` have together: see TierHit."""

    level: Level
    present_blocks: int
    hit_blocks: int
    replay_blocks: int
    load_bytes: int
    load_s: float

    def pinned_blocks(self, wish: Wish) -> int:
        """Blocks that the answer offers."""
        return max(self.hit_blocks, self.replay_blocks) if wish.want_replay else self.hit_blocks

    def saved_tokens(self, wish: Wish) -> int:
        """Positions that need not be computed."""
        replay = self.replay_blocks * BLOCK_TOKENS
        return max(self.hit_blocks * BLOCK_TOKENS, replay - min(replay, wish.replay_reach_tokens))


def reaches_of(
    found: Whereabouts,
    wish: Wish,
    *,
    levels: Sequence[Level],
    block_bytes: int,
    snapshot_bytes: int,
    rates: Mapping[Level, LoadRate],
) -> list[Reach]:
    """One Reach per level, nearest first. Invariant: each is at least as deep as the one before."""
    return [_reach(found, wish, level, block_bytes, snapshot_bytes, rates) for level in levels]


def reaches_in_memory(usable: Usable, wish: Wish, levels: Sequence[Level]) -> list[Reach]:
    """The same where this node has blocks, and all that it has of the chain is in memory: its disk adds nothing."""
    present = usable.present_tokens // BLOCK_TOKENS
    bound = min(present, wish.max_blocks)
    hit = bound if wish.blocks_only else usable.hit_tokens // BLOCK_TOKENS
    replay = bound if wish.want_replay and bound > hit else 0
    return [
        Reach(level=one, present_blocks=present, hit_blocks=hit, replay_blocks=replay, load_bytes=0, load_s=0.0)
        for one in levels
    ]


def choose(reaches: Sequence[Reach], wish: Wish, *, recompute_tokens_per_s: float, budget_s: float) -> Reach:
    """The reach with the least time to load it and to compute the rest; the nearest of equals.

    recompute_tokens_per_s   0: computing is never worth it, the deepest reach that fits the budget is taken
    budget_s                 what takes longer to load is left out, but for the nearest reach
    """
    in_time = [one for index, one in enumerate(reaches) if not index or one.load_s <= budget_s]
    most = max(one.saved_tokens(wish) for one in in_time)

    def cost(one: Reach) -> tuple[float, float, int]:
        missing = most - one.saved_tokens(wish)
        if not recompute_tokens_per_s:
            # A longer prefix without a snapshot saves nothing by itself, and is pinned for those who asked.
            return (float(missing), float(-one.pinned_blocks(wish)), one.level)
        return (one.load_s + missing / recompute_tokens_per_s, 0.0, one.level)

    return min(in_time, key=cost)


def _reach(
    found: Whereabouts,
    wish: Wish,
    level: Level,
    block_bytes: int,
    snapshot_bytes: int,
    rates: Mapping[Level, LoadRate],
) -> Reach:
    present = _leading(found.levels, level)
    usable = min(present, wish.max_blocks)
    at = None if wish.blocks_only else _last_snapshot(found.snapshots, usable, level)
    hit = usable if wish.blocks_only else 0 if at is None else at + 1
    replay = usable if wish.want_replay and usable > hit else 0
    pinned = found.levels[: max(hit, replay)]
    sizes = {
        one: pinned.count(one) * block_bytes + (snapshot_bytes if at is not None and found.snapshots[at] == one else 0)
        for one in rates
        if Level.RAM < one <= level
    }
    # Tiers load side by side.
    load_s = max((rates[one].estimate_s(size) for one, size in sizes.items()), default=0.0)
    return Reach(
        level=level,
        present_blocks=present,
        hit_blocks=hit,
        replay_blocks=replay,
        load_bytes=sum(sizes.values()),
        load_s=load_s,
    )


def _leading(levels: bytes, deepest: Level) -> int:
    """Blocks before the first that lies deeper than `deepest` or nowhere."""
    first = levels.translate(_out_of(deepest)).find(1)
    return len(levels) if first < 0 else first


@functools.cache
def _out_of(deepest: Level) -> bytes:
    """Translation table: 1 for what lies deeper or nowhere."""
    return bytes(not Level.RAM <= one <= deepest for one in range(256))


def _last_snapshot(snapshots: Mapping[int, Level], blocks: int, deepest: Level) -> int | None:
    usable = (index for index, level in snapshots.items() if index < blocks and Level.RAM <= level <= deepest)
    return max(usable, default=None)
