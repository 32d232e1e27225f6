"""The index against a naive model: what is visible, what is pinned, whose room is free."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from shoal_kv_cache.core.changes import Changes
from shoal_kv_cache.core.entries import BLOCK_TOKENS, Entry, Key, Kind
from shoal_kv_cache.core.index import Acquisition, Index
from shoal_kv_cache.core.leases import Lease, Leases, TooManyLeases

ROOT = b"\xff" * 32


def hash_of(chain: int, depth: int) -> bytes:
    return bytes([chain, depth]) + bytes(30)


def entry(chain: int, depth: int, kind: Kind = Kind.BLOCK, *, location: int = 0, numerics_id: str = "n") -> Entry:
    block_hash = hash_of(chain, depth)
    parent = hash_of(chain, depth - 1) if depth else ROOT
    end = (depth + 1) * BLOCK_TOKENS
    return Entry(
        key=Key(kind, block_hash),
        parent_hash=parent if kind is Kind.BLOCK else block_hash,
        kv_id="k",
        numerics_id=numerics_id,
        tenant_tag=b"",
        position_begin=end - BLOCK_TOKENS,
        position_end=end,
        shape=(4,),
        dtype="uint8",
        size_bytes=4,
        checksum=0,
        location=location,
    )


def acquire(
    index: Index,
    lease_id: str,
    hashes: list[bytes],
    *,
    max_hit: int = 1 << 20,
    replay: bool = False,
    blocks: bool = False,
) -> Acquisition:
    return index.acquire(
        lambda keys: Lease(lease_id, "owner", keys, 10.0),
        hashes,
        kv_id="k",
        numerics_id="n",
        max_hit_tokens=max_hit,
        want_replay=replay,
        blocks_only=blocks,
    )


def index_of(*entries: Entry, max_leases: int = 16) -> Index:
    index = Index(Leases(max_leases=max_leases))
    index.store(entries, Changes())
    return index


CHAIN = [hash_of(1, depth) for depth in range(5)]


def test_a_prefix_without_a_snapshot_is_usable_only_by_replay() -> None:
    index = index_of(*(entry(1, depth) for depth in range(3)))
    found = acquire(index, "plain", CHAIN)
    assert (found.hit_tokens, found.replay_tokens, found.present_tokens, found.entries) == (0, 0, 384, ())
    found = acquire(index, "replay", CHAIN, replay=True)
    assert (found.hit_tokens, found.replay_tokens, len(found.entries)) == (0, 384, 3)


def test_the_hit_ends_at_the_last_snapshot_below_the_bound() -> None:
    snapshots = [entry(1, depth, Kind.SNAPSHOT) for depth in (0, 2, 3)]
    index = index_of(*(entry(1, depth) for depth in range(4)), *snapshots)
    assert acquire(index, "a", CHAIN).hit_tokens == 512
    found = acquire(index, "b", CHAIN, max_hit=384)
    assert found.hit_tokens == 384
    assert [one.key.kind for one in found.entries] == [Kind.BLOCK] * 3 + [Kind.SNAPSHOT]
    assert acquire(index, "c", CHAIN, max_hit=256).hit_tokens == 128


def test_a_snapshot_past_a_missing_block_is_no_hit() -> None:
    index = index_of(entry(1, 0), entry(1, 2), entry(1, 2, Kind.SNAPSHOT))
    assert acquire(index, "a", CHAIN).hit_tokens == 0


def test_entries_of_another_pair_are_never_returned() -> None:
    index = index_of(entry(1, 0, numerics_id="other"), entry(1, 0, Kind.SNAPSHOT, numerics_id="other"))
    assert acquire(index, "a", CHAIN, replay=True).present_tokens == 0


def test_blocks_only_pins_exactly_the_blocks_below_the_bound() -> None:
    index = index_of(*(entry(1, depth) for depth in range(4)), entry(1, 3, Kind.SNAPSHOT))
    found = acquire(index, "a", CHAIN, max_hit=256, blocks=True)
    assert found.hit_tokens == 256
    assert [one.position_end for one in found.entries] == [128, 256]


def test_pinned_entries_are_not_evicted_and_leaves_go_before_parents() -> None:
    index = index_of(*(entry(1, depth, location=depth) for depth in range(3)))
    acquire(index, "a", CHAIN[:1], replay=True)
    order = []
    changes = Changes()
    while index.evict(changes):
        order = [one.location for one in changes.freed]
    assert order == [2, 1]
    index.release("a", changes)
    assert index.evict(changes)
    assert len(index) == 0


def test_a_dropped_entry_is_invisible_at_once_and_keeps_its_room_until_unpinned() -> None:
    index = index_of(entry(1, 0, location=7))
    acquire(index, "a", CHAIN, replay=True)
    changes = Changes()
    assert index.drop(Key(Kind.BLOCK, CHAIN[0]), changes)
    assert changes.freed == []
    assert acquire(index, "b", CHAIN, replay=True).present_tokens == 0
    index.store([entry(1, 0, location=8)], Changes())
    assert acquire(index, "c", CHAIN, replay=True).entries[0].location == 8
    index.release("c", changes)
    index.release("a", changes)
    assert [one.location for one in changes.freed] == [7]


def test_a_duplicate_gives_its_room_back_and_is_not_announced() -> None:
    index = index_of(entry(1, 0, location=1))
    changes = Changes()
    assert index.store([entry(1, 0, location=2)], changes) == 0
    assert [one.location for one in changes.freed] == [2]
    assert changes.stored == []


def test_leases_end_with_their_time_and_with_their_owner() -> None:
    index = index_of(entry(1, 0))
    acquire(index, "a", CHAIN, replay=True)
    assert index.expire(9.9, Changes()) == []
    assert index.expire(10.0, Changes()) == ["a"]
    acquire(index, "b", CHAIN, replay=True)
    assert index.release_owner("someone else", Changes()) == []
    assert index.release_owner("owner", Changes()) == ["b"]
    assert len(index.leases) == 0


def test_the_bound_on_leases_pins_nothing_new() -> None:
    index = index_of(entry(1, 0), max_leases=1)
    acquire(index, "a", CHAIN, replay=True)
    try:
        acquire(index, "b", CHAIN, replay=True)
    except TooManyLeases:
        pass
    else:
        raise AssertionError("a second lease was opened")
    index.release("a", Changes())
    assert not index.leases.is_pinned(Key(Kind.BLOCK, CHAIN[0]))


@given(st.lists(st.tuples(st.sampled_from("sardev"), st.integers(0, 2), st.integers(0, 3), st.booleans()), max_size=80))
def test_every_location_is_held_by_one_visible_or_pinned_entry_and_freed_once(
    steps: list[tuple[str, int, int, bool]],
) -> None:
    index = Index(Leases(max_leases=8))
    held: set[int] = set()
    next_location = 0
    opened = 0
    for what, chain, depth, flag in steps:
        changes = Changes()
        kind = Kind.SNAPSHOT if flag else Kind.BLOCK
        if what == "s":
            next_location += 1
            held.add(next_location)
            index.store([entry(chain, depth, kind, location=next_location)], changes)
        elif what == "a" and len(index.leases) < 8:
            opened += 1
            acquire(index, f"l{opened}", [hash_of(chain, one) for one in range(4)], replay=flag)
        elif what == "r":
            index.release(f"l{opened - depth}", changes)
        elif what == "d":
            index.drop(Key(kind, hash_of(chain, depth)), changes)
        elif what == "e":
            index.evict(changes)
        elif what == "v":
            index.release_owner("owner", changes)
        for one in changes.freed:
            held.remove(one.location)
    changes = Changes()
    index.release_owner("owner", changes)
    while index.evict(changes):
        pass
    assert len(index) == 0
    assert held == {one.location for one in changes.freed}
