"""What each tier adds to a prefix, and when it is worth its time, against a naive count."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal_kv_cache.core.load_rate import LoadRate
from shoal_kv_cache.core.prefix_plan import Level, Reach, Whereabouts, Wish, choose, reaches_of

LEVELS = [Level.RAM, Level.SSD, Level.PEERS, Level.REMOTE]
BLOCK, SNAPSHOT = 10, 100


def rates() -> dict[Level, LoadRate]:
    return {level: LoadRate(bytes_per_s=10.0 ** (5 - level), latency_s=0.01) for level in LEVELS}


def reaches(found: Whereabouts, wish: Wish) -> list[Reach]:
    return reaches_of(found, wish, levels=LEVELS, block_bytes=BLOCK, snapshot_bytes=SNAPSHOT, rates=rates())


FOUND = st.lists(st.sampled_from(list(Level)), max_size=12).flatmap(
    lambda levels: st.builds(
        Whereabouts,
        levels=st.just(bytes(levels)),
        snapshots=st.dictionaries(st.integers(0, 11), st.sampled_from(LEVELS), max_size=4),
    )
)
WISHES = st.builds(
    Wish,
    max_blocks=st.integers(0, 12),
    want_replay=st.booleans(),
    blocks_only=st.booleans(),
    replay_reach_tokens=st.sampled_from([0, 256, 10_000]),
)


@given(FOUND, WISHES)
def test_a_reach_counts_what_its_tiers_hold_without_a_gap(found: Whereabouts, wish: Wish) -> None:
    for one in reaches(found, wish):
        present = 0
        while present < len(found.levels) and Level.RAM <= found.levels[present] <= one.level:
            present += 1
        usable = min(present, wish.max_blocks)
        ends = [at + 1 for at, level in found.snapshots.items() if level <= one.level and at < usable]
        assert one.present_blocks == present
        assert one.hit_blocks == (usable if wish.blocks_only else max(ends, default=0))
        assert one.replay_blocks == (usable if wish.want_replay and usable > one.hit_blocks else 0)


@given(FOUND, WISHES)
def test_a_deeper_tier_never_takes_anything_away(found: Whereabouts, wish: Wish) -> None:
    found_reaches = reaches(found, wish)
    for nearer, deeper in itertools.pairwise(found_reaches):
        assert deeper.present_blocks >= nearer.present_blocks
        assert deeper.hit_blocks >= nearer.hit_blocks
        assert deeper.pinned_blocks(wish) >= nearer.pinned_blocks(wish)


def test_only_bytes_that_are_not_in_memory_are_loaded() -> None:
    found = Whereabouts(levels=bytes([1, 2, 1, 2, 2]), snapshots={1: Level.RAM, 3: Level.SSD})
    ram, ssd, _, _ = reaches(found, Wish(max_blocks=5, want_replay=False, blocks_only=False))
    assert (ram.hit_blocks, ram.load_bytes) == (0, 0)
    assert (ssd.hit_blocks, ssd.load_bytes) == (4, 2 * BLOCK + SNAPSHOT)


@given(FOUND, WISHES, st.sampled_from([0.0, 1.0, 1e3, 1e9]), st.sampled_from([0.0, 0.05, 1e9]))
def test_the_choice_is_in_time_and_costs_no_more_than_any_other(
    found: Whereabouts, wish: Wish, tokens_per_s: float, budget_s: float
) -> None:
    options = reaches(found, wish)
    chosen = choose(options, wish, recompute_tokens_per_s=tokens_per_s, budget_s=budget_s)
    assert chosen.level is Level.RAM or chosen.load_s <= budget_s
    for other in options:
        if other.load_s > budget_s:
            continue
        if tokens_per_s:
            gained_s = (other.saved_tokens(wish) - chosen.saved_tokens(wish)) / tokens_per_s
            assert gained_s <= other.load_s - chosen.load_s + 1e-9
        else:
            assert other.saved_tokens(wish) <= chosen.saved_tokens(wish)


@pytest.mark.parametrize(("tokens_per_s", "level"), [(0.0, Level.SSD), (100.0, Level.SSD), (1e6, Level.RAM)])
def test_a_tier_that_loads_slower_than_computing_is_left_out(tokens_per_s: float, level: Level) -> None:
    found = Whereabouts(levels=bytes([1, 1, 2, 2]), snapshots={1: Level.RAM, 3: Level.SSD})
    wish = Wish(max_blocks=4, want_replay=False, blocks_only=False)
    assert choose(reaches(found, wish), wish, recompute_tokens_per_s=tokens_per_s, budget_s=60.0).level is level


def test_replay_that_saves_nothing_loads_nothing_from_slow_tiers() -> None:
    found = Whereabouts(levels=bytes([1, 2, 2]), snapshots={0: Level.RAM})
    wish = Wish(max_blocks=3, want_replay=True, blocks_only=False, replay_reach_tokens=10_000)
    assert choose(reaches(found, wish), wish, recompute_tokens_per_s=1000.0, budget_s=60.0).level is Level.RAM
