"""How much of a cached prefix is used, and what is stored of a token stream."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal_common.chains import HashChain
from shoal_common.kv_cache_client import Prefix
from shoal_engine.cached_prefix import ChosenHit, block_items, choose_hit, read_prefix, snapshot_item

ROOT = b"r" * 32


@pytest.mark.parametrize(
    ("hit", "replay", "reach", "chosen"),
    [
        (0, 0, 640, ChosenHit(0, True)),
        (384, 0, 640, ChosenHit(384, True)),
        (0, 384, 640, ChosenHit(384, False)),
        (0, 1024, 640, ChosenHit(1024, False)),
        # 1024 - 640 = 384 is no further than the snapshot: going on from there runs fewer rows.
        (384, 1024, 640, ChosenHit(384, True)),
        (384, 1152, 640, ChosenHit(1152, False)),
    ],
)
def test_the_way_with_fewer_encoder_rows_is_taken(hit: int, replay: int, reach: int, chosen: ChosenHit) -> None:
    assert choose_hit(hit, replay, reach) == chosen


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 2000))
def test_the_choice_never_runs_more_rows_than_the_other_way(hit: int, more: int, reach: int) -> None:
    hit, replay = hit * 128, (hit + more) * 128 if more else 0
    chosen = choose_hit(hit, replay, reach)
    begins = chosen.tokens if chosen.has_snapshot else max(0, chosen.tokens - reach)
    assert begins >= (max(0, replay - reach) if replay else 0)
    assert begins >= hit


class Unread:
    """A prefix whose blocks are there, and not worth their loading."""

    def __init__(self, present_tokens: int) -> None:
        self.present_tokens = present_tokens

    async def blocks(self, end_tokens: int) -> None:
        raise AssertionError("nothing is read")

    async def snapshot(self) -> None:
        raise AssertionError("nothing is read")


async def test_where_nothing_is_used_of_what_is_there_the_branch_is_known() -> None:
    miss = ChosenHit(0, True)
    assert await read_prefix(cast(Prefix, Unread(0)), miss) is None
    rows = await read_prefix(cast(Prefix, Unread(384)), miss)
    assert rows is not None
    assert (rows.hit_tokens, list(rows.blocks), rows.branch_tokens) == (0, [], 384)


def test_blocks_are_named_by_the_tokens_below_them() -> None:
    chain = HashChain(ROOT, range(300))
    items = block_items(chain, 1, [b"b" * 10], "kv")
    assert [one.spec.block_hash for one in items] == [chain.hashes[1]]
    assert items[0].parent_hash == chain.hashes[0]
    assert (items[0].spec.position_begin, items[0].spec.position_end) == (128, 256)


def test_blocks_beyond_the_known_tokens_are_left_out() -> None:
    chain = HashChain(ROOT, range(300))
    assert block_items(chain, 2, [b"b" * 10], "kv") == []


@pytest.mark.parametrize("window", [16, 128])
def test_a_snapshot_is_named_by_the_block_that_ends_at_it(window: int) -> None:
    chain = HashChain(ROOT, range(300))
    item = snapshot_item(chain, 256, b"s" * (3 * window * 5), "kv", layers=3, window=window)
    assert item is not None
    assert item.spec.shape == (3, window, 5)
    assert (item.spec.position_begin, item.spec.position_end) == (256 - window, 256)
    assert item.spec.block_hash == chain.hashes[1]
    assert snapshot_item(chain, 384, b"", "kv", layers=3, window=window) is None
