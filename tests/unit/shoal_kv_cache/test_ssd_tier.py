"""The disk tier: what is appended can be read until it is removed, over compaction and restarts."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from shoal_common.errors import ChecksumMismatch, NotFound
from shoal_kv_cache.core.entries import Key
from shoal_kv_cache.tiers.ssd import Fsync, Read, SsdFull, SsdTier, SsdUnavailable
from shoal_kv_cache.tiers.ssd.disk import Disk
from support.ssd_items import item, items, number_by_key, opened, readable, segment_files

NUMBERS = number_by_key(2000)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[SsdTier]:
    made, _ = opened(tmp_path, fsync=Fsync.INTERVAL)
    yield made
    made.close()


def test_what_is_appended_can_be_read(tier: SsdTier) -> None:
    made = items(range(10))
    for (entry, payload), location in zip(made, tier.append(made), strict=True):
        assert tier.read(location, entry.size_bytes, entry.checksum) == payload


def test_a_payload_is_read_into_several_places(tier: SsdTier) -> None:
    entry, payload = item(0)
    (location,) = tier.append([(entry, payload)])
    parts = [memoryview(bytearray(size)) for size in (64, 4000, entry.size_bytes - 4064)]
    assert tier.read_many([Read(location, entry.size_bytes, entry.checksum, parts)]) == [None]
    assert b"".join(parts) == payload


def test_a_removed_payload_is_not_found(tier: SsdTier) -> None:
    entry, payload = item(0)
    (location,) = tier.append([(entry, payload)])
    tier.remove([(entry.key, location)])
    with pytest.raises(NotFound):
        tier.read(location, entry.size_bytes, entry.checksum)
    tier.remove([(entry.key, location)])
    assert tier.stats().record_count == 0


def test_a_payload_that_is_not_what_its_entry_says_is_refused(tier: SsdTier) -> None:
    entry, payload = item(0)
    with pytest.raises(ChecksumMismatch):
        tier.append([item(1), (entry, payload[:-1] + b"!")])
    with pytest.raises(ChecksumMismatch):
        tier.append([(entry, payload[:-1])])
    assert tier.stats().record_count == 0


def test_each_read_of_many_has_its_own_outcome(tier: SsdTier) -> None:
    made = items(range(3))
    one, two, three = tier.append(made)
    tier.remove([(made[0][0].key, one)])
    found = tier.read_many(
        [
            Read(one, made[0][0].size_bytes, made[0][0].checksum),
            Read(two, made[1][0].size_bytes, made[1][0].checksum ^ 1),
            Read(three, made[2][0].size_bytes, made[2][0].checksum),
        ]
    )
    assert isinstance(found[0], NotFound)
    assert isinstance(found[1], ChecksumMismatch)
    assert found[2] == made[2][1]


def test_neighbours_are_read_in_one_go(tmp_path: Path) -> None:
    class CountingDisk(Disk):
        reads = 0

        def read(self, descriptor: int, into: memoryview, offset: int) -> int:
            self.reads += 1
            return super().read(descriptor, into, offset)

    disk = CountingDisk()
    tier, _ = opened(tmp_path, disk=disk, segment_file_bytes=4 << 20)
    made = items(range(64))
    locations = tier.append(made[:32]) + tier.append(made[32:])
    before = disk.reads
    found = tier.read_many(
        [Read(at, entry.size_bytes, entry.checksum) for (entry, _), at in zip(made, locations, strict=True)][::-1]
    )
    tier.close()
    assert found == [payload for _, payload in made][::-1]
    assert disk.reads - before == 1


def test_more_than_fits_is_refused_until_something_is_removed(tmp_path: Path) -> None:
    tier, _ = opened(tmp_path, capacity_bytes=64 << 10)
    held = list(zip(items(range(4)), tier.append(items(range(4))), strict=True))
    with pytest.raises(SsdFull) as refused:
        tier.append(items(range(10, 20)))
    assert int(refused.value.metadata["free_bytes"]) < 64 << 10
    tier.remove([(entry.key, location) for (entry, _), location in held])
    tier.append(items(range(10, 14)))
    tier.close()


def test_files_stay_within_their_bound_however_much_is_written(tmp_path: Path) -> None:
    tier, _ = opened(tmp_path, capacity_bytes=512 << 10)
    held: list[tuple[int, int]] = []
    for number in range(0, 1600, 8):
        while len(held) > 24:
            gone, held = held[:8], held[8:]
            tier.remove([(item(number)[0].key, location) for number, location in gone])
        while tier.wants_compaction:
            moves = {moved.old_location: moved.new_location for moved in tier.compact(1 << 20)}
            held = [(number, moves.get(location, location) or 0) for number, location in held]
            tier.retire()
        numbers = range(number, number + 8)
        held += zip(numbers, tier.append(items(numbers)), strict=True)
        assert sum(path.stat().st_size for path in segment_files(tmp_path)) <= tier.max_file_bytes
    tier.close()


def test_compaction_moves_what_lives_and_frees_the_rest(tier: SsdTier) -> None:
    made = items(range(200))
    held = dict(zip(range(200), tier.append(made), strict=True))
    tier.remove([(made[number][0].key, held.pop(number)) for number in range(200) if number % 4])
    before = tier.stats()
    moved = {at.old_location: at for at in tier.compact(1 << 30)}
    assert tier.compact(1 << 30) == [], "one at a time"
    assert len(moved) > 20
    assert tier.stats().payload_bytes == before.payload_bytes, "each payload counts once, also while there are two"
    for number, location in held.items():
        entry, payload = made[number]
        assert tier.read(location, entry.size_bytes, entry.checksum) == payload, "until it is retired"
        if location in moved:
            assert moved[location].key == entry.key
            held[number] = moved[location].new_location or 0
    assert tier.retire() > 0
    after = tier.stats()
    assert (after.record_count, after.payload_bytes) == (before.record_count, before.payload_bytes)
    assert after.file_bytes < before.file_bytes
    for number, location in held.items():
        entry, payload = made[number]
        assert tier.read(location, entry.size_bytes, entry.checksum) == payload


def test_a_payload_that_is_removed_by_its_old_place_is_gone_from_the_new_one(tmp_path: Path) -> None:
    tier, _ = opened(tmp_path)
    made = items(range(100))
    held = tier.append(made)
    tier.remove([(made[number][0].key, held[number]) for number in range(60) if number % 2])
    moved = tier.compact(1 << 30)
    assert moved
    tier.remove([(moved[0].key, moved[0].old_location)])
    assert moved[0].new_location is not None
    with pytest.raises(NotFound):
        tier.read(moved[0].new_location, made[0][0].size_bytes, made[0][0].checksum)
    tier.retire()
    tier.close()
    again, found = opened(tmp_path)
    again.close()
    assert moved[0].key not in found


def test_compaction_tells_of_what_was_damaged(tier: SsdTier, tmp_path: Path) -> None:
    made = items(range(100))
    held = tier.append(made)
    tier.remove([(made[number][0].key, held[number]) for number in range(1, 40)])
    path = segment_files(tmp_path)[0]
    with path.open("r+b") as file:
        file.seek((held[0] & 0xFFFFFF) * 4096 + 17)
        file.write(b"damage")
    lost = [moved for moved in tier.compact(1 << 30) if moved.new_location is None]
    tier.retire()
    assert [moved.key for moved in lost] == [made[0][0].key]


def test_everything_is_found_again_after_a_restart(tmp_path: Path) -> None:
    tier, _ = opened(tmp_path)
    made = items(range(80))
    tier.append(made)
    tier.close()
    again, found = opened(tmp_path)
    assert readable(again, found, NUMBERS) == set(range(80))
    again.append(items(range(80, 90)))
    again.close()
    once_more, found = opened(tmp_path)
    assert readable(once_more, found, NUMBERS) == set(range(90))
    assert once_more.stats().record_count == 90
    once_more.close()


def test_entries_come_back_as_they_were(tmp_path: Path) -> None:
    tier, _ = opened(tmp_path)
    tier.append(items(range(50)))
    tier.close()
    again = SsdTier(tmp_path, capacity_bytes=1 << 20)
    assert {entry.key: entry for entry, _ in again.recover()} == {entry.key: entry for entry, _ in items(range(50))}
    again.close()


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    tier, _ = opened(tmp_path)
    with pytest.raises(SsdUnavailable) as refused:
        SsdTier(tmp_path, capacity_bytes=1 << 20)
    assert refused.value.reason == "SSD_IN_USE"
    tier.close()
    opened(tmp_path)[0].close()


def test_appends_that_wait_together_become_durable_together(tmp_path: Path) -> None:
    class GatedDisk(Disk):
        def __init__(self) -> None:
            self.gate = threading.Event()
            self.syncs = 0

        def sync(self, descriptor: int) -> None:
            self.gate.wait(30)
            self.syncs += 1
            super().sync(descriptor)

    disk = GatedDisk()
    tier, _ = opened(tmp_path, fsync=Fsync.ALWAYS, segment_file_bytes=8 << 20, disk=disk)
    with ThreadPoolExecutor(20) as pool:
        first = pool.submit(tier.append, items([0]))
        rest = [pool.submit(tier.append, items([number])) for number in range(1, 20)]
        disk.gate.set()
        locations = {future.result()[0] for future in (first, *rest)}
    tier.close()
    assert len(locations) == 20
    # One for the new file, one for what came first, one for all that waited meanwhile; a straggler may need another.
    assert disk.syncs <= 6


def test_many_threads_work_at_once(tier: SsdTier) -> None:
    def work(first: int) -> None:
        for begin in range(first, first + 60, 10):
            made = items(range(begin, begin + 10))
            locations = tier.append(made)
            found = tier.read_many(
                [Read(at, entry.size_bytes, entry.checksum) for (entry, _), at in zip(made, locations, strict=True)]
            )
            assert found == [payload for _, payload in made]
            tier.remove([(entry.key, at) for (entry, _), at in list(zip(made, locations, strict=True))[::2]])

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(0, 600, 100)))
    assert tier.stats().record_count == 6 * 30


class TierMachine(RuleBasedStateMachine):
    """The tier against a dict, over compaction and restarts, with and without its index."""

    @initialize(fsync=st.sampled_from(Fsync), folder=st.just(None))
    def open(self, fsync: Fsync, folder: None) -> None:

        self.folder = tempfile.TemporaryDirectory()
        self.fsync = fsync
        self.held: dict[int, int] = {}
        self.following = 0
        self.tier, _ = self.opened()

    def opened(self) -> tuple[SsdTier, dict[Key, int]]:
        return opened(Path(self.folder.name), fsync=self.fsync, segment_file_bytes=128 << 10)

    @rule(count=st.integers(1, 12))
    def append(self, count: int) -> None:
        numbers = range(self.following, self.following + count)
        self.held.update(zip(numbers, self.tier.append(items(numbers)), strict=True))
        self.following += count

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.held:
            chosen = data.draw(st.sets(st.sampled_from(sorted(self.held)), max_size=12))
            self.tier.remove([(item(number)[0].key, self.held.pop(number)) for number in chosen])

    @rule(max_bytes=st.integers(0, 1 << 20), is_cut_short=st.booleans())
    def compact(self, max_bytes: int, is_cut_short: bool) -> None:
        by_location = {location: number for number, location in self.held.items()}
        for moved in self.tier.compact(max_bytes):
            assert moved.new_location is not None
            self.held[by_location[moved.old_location]] = moved.new_location
        if not is_cut_short:
            self.tier.retire()

    @rule(is_index_lost=st.booleans())
    def restart(self, is_index_lost: bool) -> None:
        self.tier.close()
        if is_index_lost:
            (Path(self.folder.name) / "index" / "data.mdb").unlink()
        self.tier, found = self.opened()
        assert found == {item(number)[0].key: location for number, location in self.held.items()}

    @invariant()
    def what_is_held_is_counted_once(self) -> None:
        paged = (-(-item(number)[0].size_bytes // 4096) * 4096 for number in self.held)
        assert self.tier.stats().payload_bytes == sum(paged)

    @invariant()
    def what_is_held_can_be_read(self) -> None:
        if hasattr(self, "tier"):
            found = {item(number)[0].key: location for number, location in self.held.items()}
            assert readable(self.tier, found, {item(number)[0].key: number for number in self.held}) == set(self.held)
            assert self.tier.stats().record_count >= len(self.held)

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.tier.close()
            self.folder.cleanup()


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(
    max_examples=20, stateful_step_count=15, suppress_health_check=list(HealthCheck), deadline=None, derandomize=True
)
