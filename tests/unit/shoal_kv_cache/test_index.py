"""The index against a naive one: what is visible, what is pinned, whose room is free, and in which order things go."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shoal_kv_cache.core import holdings, in_memory, lookup, pins, storing
from shoal_kv_cache.core.changes import Changes
from shoal_kv_cache.core.entries import BLOCK_TOKENS, Entry, Form, Group, Key, Kind
from shoal_kv_cache.core.found import NO_LOCATION, NO_SLAB, Copy, Found
from shoal_kv_cache.core.in_memory import InMemory
from shoal_kv_cache.core.index import Index
from shoal_kv_cache.core.leases import Leases, TooManyLeases
from shoal_kv_cache.core.results import Outcome
from shoal_kv_cache.core.table import IndexFull
from unit.shoal_kv_cache import naive_index
from unit.shoal_kv_cache.naive_index import NaiveIndex

SEGMENT = 4
DEPTH = 11
FORKS = (0, 3, 6, 9)  # branch n has the blocks of branch 0 up to here
GROUPS = (Group("k", "n", b"one"), Group("k", "n", b"two"))
BLOCK = Form(128, (8,), "uint8", 8)
WINDOW = Form(128, (2, 128, 1), "uint8", 96)
ROOT = b"\xff" * 32


@pytest.fixture(autouse=True, scope="module")
def _short_segments() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (holdings, in_memory, lookup, pins, storing, naive_index):
            patch.setattr(module, "SEGMENT_BLOCKS", SEGMENT)
        yield


def hash_of(branch: int, depth: int) -> bytes:
    if depth < 0:
        return ROOT
    return hashlib.sha256(f"{branch if depth >= FORKS[branch] else 0}/{depth}".encode()).digest()


CHAINS = [[hash_of(branch, depth) for depth in range(DEPTH)] for branch in range(len(FORKS))]


def entry(branch: int, depth: int, kind: Kind = Kind.BLOCK, group: Group = GROUPS[0]) -> Entry:
    return Entry(
        key=Key(kind, hash_of(branch, depth)),
        group=group,
        parent_hash=hash_of(branch, depth - 1),
        position_end=(depth + 1) * BLOCK_TOKENS,
        form=BLOCK if kind is Kind.BLOCK else WINDOW,
        checksum=depth,
    )


def index_with(*entries: Entry, max_leases: int = 8, max_entries: int = 256) -> Index:
    made = Index(Leases(max_leases=max_leases), max_entries=max_entries)
    made.store(entries, range(len(entries)), Changes())
    return made


def acquire(made: Index, lease_id: str, branch: int = 0, *, blocks: int | None = None) -> None:
    found = made.find(GROUPS[0], CHAINS[branch])
    usable = found.usable(Copy.ANY, max_hit_tokens=1 << 20)
    count = found.block_count if blocks is None else blocks
    made.pin(lease_id, "owner", 10.0, found, block_count=count, snapshot=usable.snapshot)


def chain(branch: int, begin: int, end: int, *snapshots: int) -> list[Entry]:
    blocks = [entry(branch, depth) for depth in range(begin, end)]
    return blocks + [entry(branch, depth, Kind.SNAPSHOT) for depth in snapshots]


def test_the_hit_ends_at_the_last_snapshot_below_the_bound_and_replay_at_the_last_block() -> None:
    found = index_with(*chain(0, 0, 6, 1, 3)).find(GROUPS[0], CHAINS[0])
    usable = found.usable(Copy.RAM, max_hit_tokens=1 << 20)
    assert (usable.hit_tokens, usable.replay_tokens, usable.present_tokens) == (512, 768, 768)
    usable = found.usable(Copy.RAM, max_hit_tokens=500)
    assert (usable.hit_tokens, usable.replay_tokens, usable.present_tokens) == (256, 384, 768)


def test_a_prefix_on_disk_counts_only_when_the_disk_counts() -> None:
    made = index_with(*chain(0, 0, 4, 3))
    for one in chain(0, 0, 4, 3):
        made.set_location(one, 7, Changes())
    assert made.evict_ram(96 + 8, Changes()) == 96 + 8
    found = made.find(GROUPS[0], CHAINS[0])
    assert found.slabs.tolist() == [0, 1, 2, NO_SLAB]
    assert found.usable(Copy.RAM, max_hit_tokens=1 << 20).replay_tokens == 384
    usable = found.usable(Copy.ANY, max_hit_tokens=1 << 20)
    assert usable.hit_tokens == 512
    assert usable.snapshot is not None
    assert (usable.snapshot.slab, usable.snapshot.location) == (None, 7)
    assert found.load_bytes(usable, with_replay=False) == 8 + 96


def test_a_chain_asked_for_from_its_middle_is_found_from_there() -> None:
    found = index_with(*chain(0, 0, 10, 8)).find(GROUPS[0], CHAINS[0][5:], 5)
    assert found.block_count == 5
    assert found.usable(Copy.RAM, max_hit_tokens=1 << 20).hit_tokens == 9 * 128


def test_the_first_block_of_a_segment_needs_no_parent() -> None:
    made = index_with(*chain(0, SEGMENT, 2 * SEGMENT))
    assert made.depth(GROUPS[0], CHAINS[0][SEGMENT:], SEGMENT) == SEGMENT
    assert made.depth(GROUPS[0], CHAINS[0]) == 0


def test_orphans_and_forms_that_differ_are_not_kept() -> None:
    made = index_with(*chain(0, 0, 2))
    changes = Changes()
    other = Form(128, (9,), "uint8", 9)
    odd = [Entry(one.key, one.group, one.parent_hash, one.position_end, other, 0) for one in chain(0, 2, 3)]
    assert made.store(odd, [10], changes) == [Outcome.REFUSED]
    assert made.store(chain(0, 3, 4, 4), [11, 12], changes) == [Outcome.ORPHAN] * 2
    assert changes.freed_slabs == [10, 11, 12]


def test_what_is_on_disk_alone_is_wanted_in_memory_again() -> None:
    made = index_with()
    entries = chain(0, 0, 3, 2)
    made.recover([(one, 10 + number) for number, one in enumerate(entries)], Changes())
    keys = [one.key for one in entries]
    assert made.missing(GROUPS[0], keys) == [True] * 4
    changes = Changes()
    assert made.store(entries, [0, 1, 2, 3], changes) == [Outcome.PRESENT] * 4
    assert (changes.stored, changes.freed_slabs) == ([], [])
    assert made.missing(GROUPS[0], keys) == [False] * 4
    assert made.find(GROUPS[0], CHAINS[0]).usable(Copy.RAM, max_hit_tokens=1 << 20).hit_tokens == 3 * 128


def test_a_hash_of_another_group_is_absent_wanted_and_thrown_away() -> None:
    made = index_with(*chain(0, 0, 2, 1))
    theirs = [Entry(one.key, GROUPS[1], *_rest(one)) for one in chain(0, 0, 3, 1)]
    assert made.missing(GROUPS[1], [one.key for one in theirs]) == [True] * 4
    changes = Changes()
    outcomes = made.store(theirs, [20, 21, 22, 23], changes)
    assert all(outcome.is_counted for outcome in outcomes)
    assert sorted(changes.freed_slabs) == [20, 21, 22, 23]
    assert made.find(GROUPS[1], CHAINS[0]).block_count == 0
    assert made.find(GROUPS[0], CHAINS[0]).block_count == 2


def _rest(one: Entry) -> tuple[bytes, int, Form, int]:
    return one.parent_hash, one.position_end, one.form, one.checksum


def test_a_wrong_parent_does_not_make_a_chain_longer_than_it_is() -> None:
    made = index_with(*chain(0, 0, 2))
    odd = entry(0, 3)
    lie = Entry(odd.key, odd.group, hash_of(0, 1), 3 * BLOCK_TOKENS, BLOCK, 0)
    assert made.store([lie], [9], Changes()) == [Outcome.STORED]
    assert made.find(GROUPS[0], CHAINS[0][:4]).block_count == 2


def test_entries_of_a_put_may_come_in_any_order() -> None:
    made = index_with()
    outcomes = made.store(chain(0, 0, 6, 5)[::-1], range(7), Changes())
    assert outcomes == [Outcome.STORED] * 7
    found = made.find(GROUPS[0], CHAINS[0])
    assert found.slabs.tolist() == [6, 5, 4, 3, 2, 1]
    assert found.locations.tolist() == [NO_LOCATION] * 6


def test_chains_of_one_put_have_rows_that_follow_each_other() -> None:
    made = index_with()
    entries = [*chain(1, 3, 9), *chain(0, 0, 9, 5)]
    assert made.store(entries, range(16), Changes()) == [Outcome.STORED] * 16
    for branch in (0, 1):
        rows = made.find(GROUPS[0], CHAINS[branch][:9]).rows.tolist()[FORKS[branch] :]
        assert rows == list(range(rows[0], rows[0] + len(rows)))


def test_what_the_disk_has_is_taken_in_any_order_and_orphans_are_given_back() -> None:
    made = index_with()
    records = [(one, 100 + place) for place, one in enumerate(chain(0, 0, 6, 5)[::-1])]
    changes = Changes()
    assert made.recover([*records, (entry(1, 10), 200)], changes) == 7
    assert changes.freed_ssd == [(entry(1, 10).key, 200)]
    assert made.find(GROUPS[0], CHAINS[0]).locations.tolist() == [106, 105, 104, 103, 102, 101]


def test_leaves_go_before_parents_and_never_what_is_pinned() -> None:
    made = index_with(*chain(0, 0, 5))
    acquire(made, "a", blocks=2)
    changes = Changes()
    assert made.evict_ram(1 << 20, changes) == 3 * 8
    assert changes.freed_slabs == [4, 3, 2]
    made.release("a", changes)
    assert made.evict_ram(1 << 20, changes) == 2 * 8
    assert len(made) == 0


def test_a_dropped_entry_is_invisible_at_once_and_its_slab_waits_for_the_leases_open_then() -> None:
    made = index_with(*chain(0, 0, 3))
    acquire(made, "old")
    changes = Changes()
    assert made.drop(entry(0, 1).key, changes) == 2
    assert changes.freed_slabs == []
    assert made.depth(GROUPS[0], CHAINS[0]) == 1
    acquire(made, "new")
    made.store(chain(0, 1, 3), [8, 9], changes)
    assert made.release("old", changes)
    assert sorted(changes.freed_slabs) == [1, 2]


def test_what_a_lease_still_reads_stays_when_the_block_that_pinned_it_is_dropped() -> None:
    made = index_with(*chain(0, 0, 3))
    acquire(made, "a")
    changes = Changes()
    made.drop(entry(0, 2).key, changes)
    assert made.evict_ram(1 << 20, changes) == 0
    made.release("a", changes)
    assert made.evict_ram(1 << 20, changes) == 16


def test_leases_end_with_their_time_and_with_their_owner() -> None:
    made = index_with(*chain(0, 0, 1))
    acquire(made, "a")
    assert made.expire(9.9, Changes()) == []
    assert made.expire(10.0, Changes()) == ["a"]
    acquire(made, "b")
    assert made.release_owner("someone else", Changes()) == []
    assert made.release_owner("owner", Changes()) == ["b"]
    assert len(made.leases) == 0


def test_the_bound_on_leases_pins_nothing_new() -> None:
    made = index_with(*chain(0, 0, 1), max_leases=1)
    acquire(made, "a")
    with pytest.raises(TooManyLeases):
        acquire(made, "b")
    made.release("a", Changes())
    assert made.evict_ram(1, Changes()) == 8


def test_a_full_table_takes_nothing_of_a_put() -> None:
    made = index_with(max_entries=5)
    with pytest.raises(IndexFull):
        made.store(chain(0, 0, 6), range(6), Changes())
    assert len(made) == 0
    assert made.store(chain(0, 0, 4), range(4), Changes()) == [Outcome.STORED] * 4


def test_compaction_moves_a_copy_only_from_where_it_is() -> None:
    made = index_with(*chain(0, 0, 1))
    key = entry(0, 0).key
    made.set_location(entry(0, 0), 5, Changes())
    assert not made.move(key, 4, 6)
    assert made.move(key, 5, 6)
    held = made.get(GROUPS[0], key)
    assert held is not None
    assert (held.slab, held.location) == (0, 6)


STEP = st.tuples(
    st.sampled_from(
        ["store"] * 4 + ["write"] * 3 + ["pin", "release", "load", "evict_ram", "evict_ssd", "drop", "lose", "flush"]
    ),
    st.integers(0, len(FORKS) - 1),
    st.integers(0, DEPTH - 1),
    st.integers(0, DEPTH),
    st.booleans(),
)


class Pair:
    """Runs each step on both indexes and compares them."""

    def __init__(self) -> None:
        self.real = Index(Leases(max_leases=8), max_entries=256)
        self.model = NaiveIndex()
        self.slabs_out: set[int] = set()
        self.locations_out: set[int] = set()
        self.number = 0

    def place(self, out: set[int]) -> int:
        self.number += 1
        out.add(self.number)
        return self.number

    def run(self, what: str, branch: int, depth: int, length: int, flag: bool) -> None:
        changes = Changes()
        group = GROUPS[1] if flag and length == 1 else GROUPS[0]
        key = Key(Kind.SNAPSHOT if flag else Kind.BLOCK, hash_of(branch, depth))
        if what == "store":
            self.store(branch, depth, min(depth + length, DEPTH), group, flag, changes)
        elif what in ("write", "load"):
            self.copy(what, entry(branch, depth, key.kind, group), changes)
        elif what == "pin":
            self.pin(branch, length)
        elif what == "release":
            for lease_id in list(self.model.leases)[: depth % 3]:
                self.real.release(lease_id, changes)
                del self.model.leases[lease_id]
        elif what.startswith("evict"):
            self.evict(what, length * 8, changes)
        elif what == "drop":
            gone = self.model.dropped_with(key)
            assert self.real.drop(key, changes) == len(gone)
            self.forget(gone, changes)
        elif what == "lose":
            self.lose(key, length % 2 == 0, changes)
        elif what == "flush" and length > 7:
            self.flush(group.tenant_tag, changes)
        self.settle(changes)
        self.compare()

    def store(self, branch: int, begin: int, end: int, group: Group, flag: bool, changes: Changes) -> None:
        entries = [entry(branch, depth, group=group) for depth in range(begin, end)]
        if entries and flag:
            entries.insert(0, entry(branch, end - 1, Kind.SNAPSHOT, group))
        slabs = [self.place(self.slabs_out) for _ in entries]
        outcomes, freed = self.model.store(entries, slabs)
        assert self.real.store(entries, slabs, changes) == outcomes
        assert sorted(changes.freed_slabs) == sorted(freed)
        stored = {one.key for one, outcome in zip(entries, outcomes, strict=True) if outcome is Outcome.STORED}
        assert set(changes.stored) == stored
        assert len(changes.stored) == len(stored)

    def copy(self, what: str, one: Entry, changes: Changes) -> None:
        held = self.model.visible.get(one.key)
        known = held if held is not None and held.entry.group == one.group else None
        if what == "write":
            place = self.place(self.locations_out)
            assert self.real.set_location(one, place, changes) == (known is not None and known.location is None)
            if known is not None and known.location is None:
                known.location = place
        else:
            place = self.place(self.slabs_out)
            assert self.real.set_slab(one, place, changes) == (known is not None and known.slab is None)
            if known is not None and known.slab is None:
                known.slab = place

    def pin(self, branch: int, length: int) -> None:
        if len(self.model.leases) == 8:
            return
        found = self.real.find(GROUPS[0], CHAINS[branch])
        usable = found.usable(Copy.ANY, max_hit_tokens=length * BLOCK_TOKENS)
        lease_id = f"l{self.place(set())}"
        in_memory = self.in_memory(branch, 0, length, found)
        for first in range(1, min(found.block_count, length + 1)):
            self.in_memory(branch, first, length, self.real.find(GROUPS[0], CHAINS[branch][first:], first))
        self.real.pin(
            lease_id,
            "o",
            1.0,
            in_memory if in_memory is not None else found,
            block_count=length,
            snapshot=usable.snapshot,
        )
        read = {slab for slab in found.slabs[:length].tolist() if slab != NO_SLAB}
        if usable.snapshot is not None and usable.snapshot.slab is not None:
            read.add(usable.snapshot.slab)
        self.model.leases[lease_id] = read

    def in_memory(self, branch: int, first: int, max_blocks: int, found: Found) -> InMemory | None:
        """What says the same faster is there whenever all is in memory, and says the same."""
        told = self.real.find_in_memory(GROUPS[0], CHAINS[branch][first:], first, max_blocks=max_blocks)
        is_there = found.block_count > 0 and found.ram_count == found.block_count and bool(found.snapshot_in_ram.all())
        assert (told is not None) == is_there
        if told is not None:
            assert list(told.rows) == found.rows.tolist()
            assert (told.checksums, told.slabs) == found.columns(found.block_count)
            assert (told.group, told.first_index, told.form) == (found.group, found.first_index, found.form)
            assert told.usable == found.usable(Copy.RAM, max_hit_tokens=max_blocks * BLOCK_TOKENS)
            for count in range(found.block_count + 1):
                assert told.columns(count) == found.columns(count)
                assert told.ends(count) == pins.ends(found, count)
        return told

    def evict(self, what: str, size_bytes: int, changes: Changes) -> None:
        before = {key: (copies.slab, copies.location) for key, copies in self.model.visible.items()}
        evict = self.real.evict_ram if what == "evict_ram" else self.real.evict_ssd
        done = evict(size_bytes, changes)
        gone = set(changes.freed_slabs) | {location for _, location in changes.freed_ssd}
        freed_bytes = 0
        for key, (slab, location) in before.items():
            copies = self.model.visible[key]
            if slab in gone:
                copies.slab = None
            if location in gone:
                copies.location = None
            freed_bytes += copies.entry.size_bytes * ((slab in gone) + (location in gone))
        assert done == freed_bytes
        for key in changes.removed:
            assert not list(self.model.children(key))
            assert self.model.visible[key].slab is self.model.visible[key].location is None
            del self.model.visible[key]

    def lose(self, key: Key, is_slab: bool, changes: Changes) -> None:
        held = self.model.visible.get(key)
        if held is None:
            return
        slab, location = held.slab, held.location
        if is_slab and slab is not None:
            assert self.real.lose_slab(key, slab, changes)
            gone = location is None
            held.slab = None
        elif not is_slab and location is not None:
            assert self.real.lose_location(key, location, changes)
            gone = slab is None
            held.location = None
        else:
            return
        if gone:
            self.forget(self.model.dropped_with(key), changes)

    def flush(self, tenant_tag: bytes, changes: Changes) -> None:
        count = sum(one.block_count + one.snapshot_count for one in self.real.flush(changes, tenant_tag=tenant_tag))
        gone = [key for key, copies in self.model.visible.items() if copies.entry.group.tenant_tag == tenant_tag]
        assert count == len(gone)
        self.forget(gone, changes)

    def forget(self, gone: list[Key], changes: Changes) -> None:
        assert set(changes.removed) == set(gone)
        assert len(changes.removed) == len(gone)
        for key in gone:
            del self.model.visible[key]

    def settle(self, changes: Changes) -> None:
        for slab in changes.freed_slabs:
            self.slabs_out.remove(slab)
            assert not any(slab in read for read in self.model.leases.values()), "a reader's slab was freed"
        for _, location in changes.freed_ssd:
            self.locations_out.remove(location)

    def compare(self) -> None:
        page, cursor = self.real.page(0, 1000)
        assert cursor is None
        held = {one.entry.key: (one.entry, one.slab, one.location) for one in page}
        assert held == {key: (one.entry, one.slab, one.location) for key, one in self.model.visible.items()}
        assert len(self.real) == len(page) == len(held)
        assert self.model.is_closed()
        for group in GROUPS:
            mine = [one for one in page if one.entry.group == group]
            usage = self.real.groups().get(group)
            for tier, copies in enumerate(([h for h in mine if h.slab], [h for h in mine if h.location])):
                assert (usage[tier].used_bytes if usage else 0) == sum(one.entry.size_bytes for one in copies)
            for hashes in CHAINS:
                walk = 0
                while walk < DEPTH and (found := held.get(Key(Kind.BLOCK, hashes[walk]))) and found[0].group == group:
                    walk += 1
                assert self.real.depth(group, hashes) == walk
                rows = self.real.find(group, hashes)
                assert [slab or NO_SLAB for _, slab, _ in (held[Key(Kind.BLOCK, h)] for h in hashes[:walk])] == (
                    rows.slabs.tolist()
                )
                snapshots = [n for n in range(walk) if Key(Kind.SNAPSHOT, hashes[n]) in held]
                assert [one.block_index for one in rows.snapshots] == snapshots

    def empty(self) -> None:
        changes = Changes()
        self.real.release_owner("o", changes)
        self.model.leases.clear()
        while self.real.evict_ram(1 << 20, changes) + self.real.evict_ssd(1 << 20, changes):
            pass
        self.settle(changes)
        assert (len(self.real), self.slabs_out, self.locations_out) == (0, set(), set())
        assert self.real.free_entries == 256, "a row has leaked"


@settings(max_examples=60, deadline=None)
@given(st.lists(STEP, max_size=40))
def test_any_history_leaves_what_a_naive_index_has(steps: list[tuple[str, int, int, int, bool]]) -> None:
    pair = Pair()
    for step in steps:
        pair.run(*step)
    pair.empty()
