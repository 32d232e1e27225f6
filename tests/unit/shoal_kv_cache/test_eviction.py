"""What goes first: tenants over their quota, and what is least likely to be asked for again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from shoal_kv_cache.core.candidates import Rows
from shoal_kv_cache.core.changes import Changes
from shoal_kv_cache.core.entries import BLOCK_TOKENS, Entry, Form, Group, Key, Kind
from shoal_kv_cache.core.eviction import Policy
from shoal_kv_cache.core.history import History
from shoal_kv_cache.core.holdings import Holdings
from shoal_kv_cache.core.index import Index
from shoal_kv_cache.core.leases import Leases
from shoal_kv_cache.core.origins import Origins
from shoal_kv_cache.core.quotas import Quotas

BLOCK = Form(128, (10,), "uint8", 10)
WINDOW = Form(128, (30,), "uint8", 30)
ONE = Group("k", "n", b"one")


def group_of(tenant: str) -> Group:
    return Group("k", "n", tenant.encode())


def hashes_of(name: str, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{name}/{place}".encode()).digest() for place in range(count)]


def put(index: Index, name: str, count: int, tenant: str) -> None:
    hashes = hashes_of(name, count)
    parents = [bytes(32), *hashes]
    entries = [
        Entry(Key(Kind.BLOCK, hashes[n]), group_of(tenant), parents[n], (n + 1) * BLOCK_TOKENS, BLOCK, 0)
        for n in range(count)
    ]
    index.store(entries, range(count), Changes())


def held(index: Index, tenant: str) -> int:
    usage = index.groups().get(group_of(tenant))
    return usage[0].used_bytes if usage else 0


def test_a_tenant_over_its_quota_loses_its_own_first() -> None:
    index = Index(Leases(max_leases=4), max_entries=1000, quotas=Quotas(ram_bytes=200, ram_bytes_of={b"big": 1000}))
    put(index, "a", 30, "greedy")
    put(index, "b", 30, "big")
    assert index.evict_ram(80, Changes()) == 80
    assert (held(index, "greedy"), held(index, "big")) == (220, 300)


def test_room_for_a_tenant_that_would_pass_its_quota_comes_from_its_own() -> None:
    index = Index(Leases(max_leases=4), max_entries=1000, quotas=Quotas(ram_bytes=200))
    put(index, "a", 20, "one")
    put(index, "b", 20, "two")
    index.evict_ram(50, Changes(), tenant_tag=b"two")
    assert (held(index, "one"), held(index, "two")) == (200, 150)


def test_what_a_quota_does_not_yield_comes_from_all() -> None:
    index = Index(Leases(max_leases=4), max_entries=1000, quotas=Quotas(ram_bytes=200))
    put(index, "a", 25, "one")
    put(index, "b", 15, "two")
    assert index.evict_ram(400, Changes()) == 400
    assert len(index) == 0


class Lru:
    """The baseline: worth falls with the time since the last use."""

    def __init__(self, holdings: Holdings, history: History) -> None:
        self._history = history

    def scores(self, rows: Rows) -> NDArray[np.float64]:
        return -self._history.ages(rows).astype(np.float64)


class Cache:
    """A small memory: chains are asked for, and what is missing is stored."""

    def __init__(
        self, blocks: int, policy: Callable[[Holdings, History], Policy] | None = None, *, snapshot_tokens: int = 2560
    ) -> None:
        self.index = Index(Leases(max_leases=4), max_entries=1000, policy=policy, snapshot_tokens=snapshot_tokens)
        self._size = blocks * BLOCK.size_bytes

    def turn(self, now_s: float, hashes: list[bytes], *snapshots: int) -> int:
        """How many leading blocks were there."""
        index, changes = self.index, Changes()
        index.expire(now_s, changes)
        found = index.find(ONE, hashes)
        last = found.snapshots[-1] if found.snapshots else None
        index.pin("turn", "owner", 1e9, found, block_count=found.block_count, snapshot=last)
        parents = [bytes(32), *hashes]
        entries = [
            Entry(Key(Kind.BLOCK, hashes[n]), ONE, parents[n], (n + 1) * BLOCK_TOKENS, BLOCK, 0)
            for n in range(found.block_count, len(hashes))
        ] + [
            Entry(Key(Kind.SNAPSHOT, hashes[n]), ONE, parents[n], (n + 1) * BLOCK_TOKENS, WINDOW, 0) for n in snapshots
        ]
        excess = index.usage()[0].used_bytes + sum(one.size_bytes for one in entries) - self._size
        if excess <= 0 or index.evict_ram(excess, changes) >= excess:
            index.store(entries, range(len(entries)), changes)
        index.release("turn", changes)
        return found.block_count

    def has_snapshot(self, block_hash: bytes) -> bool:
        return Key(Kind.SNAPSHOT, block_hash) in self.index


def one_document(number: int) -> list[bytes]:
    """A prompt read once, that begins as all of its job."""
    return [b"\x07" * 32, *hashes_of(f"document {number}", 9)]


@pytest.mark.parametrize(("policy", "kept"), [(None, 20), (Lru, 0)])
def test_a_scan_ten_times_the_cache_leaves_a_conversation_whole_where_lru_loses_it(
    policy: Callable[[Holdings, History], Policy] | None, kept: int
) -> None:
    cache = Cache(40, policy)
    for turn in range(10):
        cache.turn(20.0 * turn, hashes_of("talk", 11 + turn))
    for number in range(40):
        cache.turn(181.0 + number, one_document(number))
    assert cache.turn(240.0, hashes_of("talk", 20)) == kept


def test_what_comes_back_soon_after_it_was_evicted_is_known_for_it() -> None:
    cache = Cache(40)
    cache.turn(0.0, hashes_of("talk", 15))
    cache.index.evict_ram(15 * BLOCK.size_bytes, Changes())
    cache.turn(20.0, hashes_of("new", 15))
    assert cache.turn(20.0, hashes_of("talk", 15)) == 0
    cache.index.evict_ram(10 * BLOCK.size_bytes, Changes())
    assert (cache.index.depth(ONE, hashes_of("new", 15)), cache.index.depth(ONE, hashes_of("talk", 15))) == (5, 15)


def test_a_snapshot_that_a_later_one_replaces_goes_first_and_one_where_chains_branch_does_not() -> None:
    cache = Cache(40)
    trunk = hashes_of("trunk", 5)
    talk = trunk + hashes_of("talk", 8)
    cache.turn(0.0, trunk + hashes_of("else", 3))
    cache.turn(1.0, talk[:9], 4, 8)
    cache.turn(2.0, talk, 12)
    assert all(cache.has_snapshot(talk[n]) for n in (4, 8, 12))
    cache.index.evict_ram(1, Changes())
    assert [cache.has_snapshot(talk[n]) for n in (4, 8, 12)] == [True, False, True]
    assert len(cache.index) == 16 + 2


def test_per_byte_a_snapshot_is_worth_what_a_replay_would_run() -> None:
    # 30 bytes for as many tokens as 30 bytes of blocks have (384): more, and the tail goes with its snapshot last.
    for snapshot_tokens, goes in ((512, False), (256, True)):
        cache = Cache(40, snapshot_tokens=snapshot_tokens)
        cache.turn(0.0, hashes_of("a", 4), 3)
        cache.turn(0.0, hashes_of("b", 4))
        cache.index.evict_ram(1, Changes())
        assert cache.has_snapshot(hashes_of("a", 4)[3]) is not goes


def test_an_origin_is_judged_by_its_last_waits_and_an_unknown_one_evenly() -> None:
    origins = Origins()
    for _ in range(300):
        origins.waits(1, has_returned=False)
        origins.returns(1, 16.0, has_returned=False)
        origins.waits(2, has_returned=False)
    talks, scans, unknown, later = origins.chances(np.array([1, 2, 3, 1 + 256]))
    assert talks > 0.97
    assert scans < 0.01
    assert unknown == later == 0.5
    assert abs(origins.pace(1) - 4.0) < 0.01


def test_a_conversation_that_is_silent_for_many_of_its_pauses_has_rather_ended() -> None:
    # One of tools that answer within seconds, and one of a reader who takes minutes and comes back half of the time.
    quick, slow = [b"\x01" * 32, *hashes_of("quick", 9)], [b"\x02" * 32, *hashes_of("slow", 9)]
    for silent_s, gone in ((20.0, slow), (1000.0, quick)):
        cache = Cache(1000)
        for turn in range(3):
            cache.turn(300.0 * turn, slow)
        for turn in range(10):
            cache.turn(600.0 + 2 * turn, quick)
        cache.index.expire(618.0 + silent_s, Changes())
        cache.index.evict_ram(10 * BLOCK.size_bytes, Changes())
        assert [cache.index.depth(ONE, one) for one in (quick, slow)] == [
            10 * (one is not gone) for one in (quick, slow)
        ]


def block_of(name: int) -> bytes:
    return bytes([name]) * 32


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 400)), min_size=2, max_size=60), st.integers(1, 7))
def test_of_single_blocks_those_go_that_are_least_likely_to_be_asked_for_next(
    turns: list[tuple[int, int]], count: int
) -> None:
    cache = Cache(1000)
    origins, last = Origins(), dict[int, tuple[float, float, bool]]()
    now_s = 0.0
    cache.index.expire(now_s, Changes())
    for name, pause_s in turns:
        now_s += pause_s
        cache.turn(now_s, [block_of(name)])
        if name not in last:
            origins.waits(name, has_returned=False)
            last[name] = now_s, origins.pace(name), False
        else:
            since_s, pace, has_returned = last[name]
            origins.returns(name, now_s - since_s, has_returned=has_returned)
            origins.waits(name, has_returned=True)
            last[name] = now_s, pace + (np.log2(now_s - since_s) - pace) / 8, True
    worth = {}
    for name, (since_s, pace, has_returned) in last.items():
        chance = float(origins.chances(np.array([name + 256 * has_returned]))[0])
        usual_s, waited_s = 2 ** (round(pace * 4) / 4), now_s - since_s
        still_waits = chance * usual_s / (usual_s + waited_s)
        worth[name] = still_waits / (still_waits + 1 - chance) / (usual_s + waited_s)
    cache.index.evict_ram(min(count, len(worth)) * BLOCK.size_bytes, Changes())
    kept = [worth[name] for name in worth if Key(Kind.BLOCK, block_of(name)) in cache.index]
    gone = [worth[name] for name in worth if Key(Kind.BLOCK, block_of(name)) not in cache.index]
    assert len(gone) == min(count, len(worth))
    assert not kept or max(gone) <= min(kept) * (1 + 1e-9)
