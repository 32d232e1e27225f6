"""What a start finds after files or index were lost, cut, changed or are older than each other."""

from __future__ import annotations

import errno
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import lmdb
import pytest
import xxhash
from shoal_kv_cache.tiers.ssd import Fsync, SsdTier, SsdUnavailable
from shoal_kv_cache.tiers.ssd.disk import Disk
from shoal_kv_cache.tiers.ssd.index_db import IndexDb
from support.ssd_items import item, items, number_by_key, opened, pages_with, readable, segment_files

COUNT = 120
NUMBERS = number_by_key(1000)
KEYS = [item(number)[0].key for number in range(COUNT)]


def filled(directory: Path) -> dict[int, int]:
    """A closed tier with COUNT payloads in several files, the last ones not in one batch; their locations."""
    tier, _ = opened(directory, fsync=Fsync.ALWAYS)
    held: dict[int, int] = {}
    for begin in range(0, COUNT, 6):
        numbers = range(begin, begin + 6)
        held.update(zip(numbers, tier.append(items(numbers)), strict=True))
    tier.close()
    assert len(segment_files(directory)) > 2
    return held


def found_numbers(directory: Path) -> set[int]:
    """What a start finds and can read; nothing may be found that cannot be read."""
    tier, found = opened(directory)
    good = readable(tier, found, NUMBERS)
    tier.close()
    assert good == {NUMBERS[key] for key in found}
    return good


def test_a_lost_index_is_made_again_from_the_files(tmp_path: Path) -> None:
    filled(tmp_path)
    shutil.rmtree(tmp_path / "index")
    assert found_numbers(tmp_path) == set(range(COUNT))
    assert found_numbers(tmp_path) == set(range(COUNT))


@pytest.mark.parametrize("kept_bytes", [0, 100, 4096, 5000, 9000, 40000])
def test_a_cut_index_is_made_again_from_the_files(tmp_path: Path, kept_bytes: int) -> None:
    filled(tmp_path)
    data = tmp_path / "index" / "data.mdb"
    data.write_bytes(data.read_bytes()[:kept_bytes])
    assert found_numbers(tmp_path) == set(range(COUNT))


def test_an_index_with_a_changed_value_is_made_again_from_the_files(tmp_path: Path) -> None:
    filled(tmp_path)
    data = tmp_path / "index" / "data.mdb"
    content = data.read_bytes()
    hash_of_one = KEYS[50].block_hash
    assert hash_of_one in content
    data.write_bytes(content.replace(hash_of_one, b"x" * 32))
    assert found_numbers(tmp_path) == set(range(COUNT))


def test_an_index_of_noise_is_made_again_from_the_files(tmp_path: Path) -> None:
    filled(tmp_path)
    data = tmp_path / "index" / "data.mdb"
    data.write_bytes(random.Random(1).randbytes(data.stat().st_size))
    assert found_numbers(tmp_path) == set(range(COUNT))


def test_an_index_that_ended_two_starts_is_not_tried_again(tmp_path: Path) -> None:
    filled(tmp_path)
    index = tmp_path / "index"
    assert IndexDb.attempt(index)
    assert IndexDb.attempt(index)
    assert not IndexDb.attempt(index)
    assert found_numbers(tmp_path) == set(range(COUNT))
    assert IndexDb.attempt(index), "it is new, and good"


def test_an_old_index_is_caught_up_from_the_files(tmp_path: Path) -> None:
    tier, _ = opened(tmp_path)
    held = dict(zip(range(40), tier.append(items(range(40))), strict=True))
    tier.close()
    shutil.copytree(tmp_path / "index", tmp_path / "old")
    tier, _ = opened(tmp_path)
    held.update(zip(range(40, 150), tier.append(items(range(40, 150))), strict=True))
    tier.remove([(item(number)[0].key, held.pop(number)) for number in (*range(0, 30), *range(45, 60))])
    assert tier.compact(1 << 20)
    tier.retire()
    tier.close()
    shutil.rmtree(tmp_path / "index")
    (tmp_path / "old").rename(tmp_path / "index")
    assert found_numbers(tmp_path) == set(held)


def test_an_index_of_other_files_is_not_believed(tmp_path: Path) -> None:
    filled(tmp_path / "one")
    tier, _ = opened(tmp_path / "two")
    tier.append(items(range(500, 560)))
    tier.close()
    shutil.rmtree(tmp_path / "two" / "index")
    shutil.copytree(tmp_path / "one" / "index", tmp_path / "two" / "index")
    assert found_numbers(tmp_path / "two") == set(range(500, 560))


@pytest.mark.parametrize("is_index_lost", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_a_cut_file_loses_what_was_behind_the_cut(tmp_path: Path, seed: int, is_index_lost: bool) -> None:
    held = filled(tmp_path)
    rng = random.Random(seed)
    path = rng.choice(segment_files(tmp_path))
    number = int(path.stem)
    size = rng.randrange(4096, path.stat().st_size)
    with path.open("r+b") as file:
        file.truncate(size)
    if is_index_lost:
        shutil.rmtree(tmp_path / "index")
    whole = {
        at
        for at, location in held.items()
        if location >> 24 != number or (location & 0xFFFFFF) * 4096 + _pages(at) * 4096 <= size
    }
    tier, found = opened(tmp_path)
    good = readable(tier, found, NUMBERS)
    # Of the last batch of the last file a torn end is cut as one.
    assert whole - good <= {at for at in whole if held[at] >> 24 == number}
    assert len(whole - good) < 6
    assert good <= whole
    tier.append(items(range(COUNT, COUNT + 6)))
    tier.close()
    assert found_numbers(tmp_path) == good | set(range(COUNT, COUNT + 6))


@pytest.mark.parametrize("garbage", [b"\0" * 5000, b"SHOALBAT" * 2000, random.Random(3).randbytes(70000)])
def test_garbage_at_the_end_is_cut_off(tmp_path: Path, garbage: bytes) -> None:
    filled(tmp_path)
    last = segment_files(tmp_path)[-1]
    before = last.stat().st_size
    with last.open("ab") as file:
        file.write(garbage)
    assert found_numbers(tmp_path) == set(range(COUNT))
    assert last.stat().st_size == before


def test_an_index_of_another_version_is_made_again_from_the_files(tmp_path: Path) -> None:
    filled(tmp_path)
    shutil.rmtree(tmp_path / "index")
    with lmdb.open(str(tmp_path / "index"), max_dbs=3) as env:
        env.open_db(b"records")
    assert found_numbers(tmp_path) == set(range(COUNT))


@pytest.mark.parametrize("is_index_lost", [False, True])
def test_a_folder_of_another_version_is_refused_and_left_alone(tmp_path: Path, is_index_lost: bool) -> None:
    filled(tmp_path)
    path = segment_files(tmp_path)[1]
    head, rest = bytearray(path.read_bytes()[:40]), path.read_bytes()[48:]
    head[8] += 1
    path.write_bytes(head + xxhash.xxh3_64_digest(head)[::-1] + rest)
    if is_index_lost:
        shutil.rmtree(tmp_path / "index")
    before = {file: file.read_bytes() for file in segment_files(tmp_path)}
    for _ in range(2):
        tier = SsdTier(tmp_path, capacity_bytes=8 << 20)
        with pytest.raises(SsdUnavailable) as refused:
            tier.recover()
        tier.close()
        assert (refused.value.reason, refused.value.metadata["version"]) == ("SSD_OTHER_VERSION", "2")
    assert {file: file.read_bytes() for file in segment_files(tmp_path)} == before


def test_a_damaged_batch_header_loses_that_batch_alone(tmp_path: Path) -> None:
    held = filled(tmp_path)
    path = segment_files(tmp_path)[0]
    offset = sorted(pages_with(path, b"SHOALBAT"))[2]
    flip(path, offset + 60)
    assert found_numbers(tmp_path) == set(range(COUNT)), "the index has it"
    shutil.rmtree(tmp_path / "index")
    lost = set(range(COUNT)) - found_numbers(tmp_path)
    assert len(lost) == 6
    assert {held[number] >> 24 for number in lost} == {1}


def test_a_damaged_file_header_loses_nothing(tmp_path: Path) -> None:
    filled(tmp_path)
    flip(segment_files(tmp_path)[0], 20)
    shutil.rmtree(tmp_path / "index")
    assert found_numbers(tmp_path) == set(range(COUNT))


def test_a_payload_with_a_flipped_bit_is_found_out_when_it_is_read(tmp_path: Path) -> None:
    held = filled(tmp_path)
    flip(segment_files(tmp_path)[0], (held[3] & 0xFFFFFF) * 4096 + 1234)
    tier, found = opened(tmp_path)
    assert readable(tier, found, NUMBERS) == set(range(COUNT)) - {3}
    tier.close()


def test_a_payload_with_a_flipped_bit_in_the_newest_file_is_not_found_without_the_index(tmp_path: Path) -> None:
    held = filled(tmp_path)
    last = COUNT - 6
    flip(segment_files(tmp_path)[-1], (held[last] & 0xFFFFFF) * 4096 + 1234)
    shutil.rmtree(tmp_path / "index")
    assert found_numbers(tmp_path) == set(range(COUNT)) - {last}


def test_a_lost_file_loses_what_was_in_it(tmp_path: Path) -> None:
    held = filled(tmp_path)
    segment_files(tmp_path)[1].unlink()
    assert found_numbers(tmp_path) == {number for number, location in held.items() if location >> 24 != 2}


def test_numbers_are_not_used_twice_when_the_index_is_lost(tmp_path: Path) -> None:
    held = filled(tmp_path)
    tier, _ = opened(tmp_path)
    tier.remove([(KEYS[number], location) for number, location in held.items()])
    while tier.compact(1 << 20) or tier.retire():
        pass
    tier.close()
    shutil.rmtree(tmp_path / "index")
    tier, found = opened(tmp_path)
    assert not found
    new = tier.append(items(range(COUNT)))
    tier.close()
    assert not set(new) & set(held.values())


def test_removed_payloads_stay_removed_after_compaction_of_their_tombstones(tmp_path: Path) -> None:
    tier, _ = opened(tmp_path, segment_file_bytes=128 << 10)
    held = dict(zip(range(60), tier.append(items(range(60))), strict=True))
    # Tombstones for the first file lie in a later one; that one is emptied, the first is not.
    tier.append(items(range(60, 80)))
    tier.remove([(KEYS[0], held[0])])
    later = dict(zip(range(80, 200), tier.append(items(range(80, 200))), strict=True))
    tier.remove([(item(number)[0].key, later[number]) for number in range(80, 190)])
    for _ in range(3):
        tier.compact(1 << 20)
        tier.retire()
    assert segment_files(tmp_path)[0].stem == "0000000001"
    tier.close()
    shutil.rmtree(tmp_path / "index")
    assert found_numbers(tmp_path) == set(range(1, 80)) | set(range(190, 200))


class WatchedDisk(Disk):
    """Does something when a point is reached."""

    def __init__(self) -> None:
        self.watch: dict[str, Callable[[], None]] = {}

    def reached(self, point: str) -> None:
        if point in self.watch:
            self.watch.pop(point)()

    def write(self, descriptor: int, parts: Sequence[memoryview], offset: int) -> None:
        if "write" in self.watch:
            self.watch["write"]()
        super().write(descriptor, parts, offset)


def without_index(directory: Path) -> None:
    """Makes the next start read the files."""
    shutil.rmtree(directory / "index")


def test_what_was_removed_from_an_unfinished_compaction_stays_removed(tmp_path: Path) -> None:
    tier, _ = opened(tmp_path / "one")
    held = tier.append(items(range(100)))
    tier.remove([(item(number)[0].key, held[number]) for number in range(40) if number % 4])
    copied = {NUMBERS[moved.key] for moved in tier.compact(0)}
    assert copied
    tier.sync()
    # Killed before the old copies are deleted.
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    tier.close()
    tier, found = opened(tmp_path / "two")
    assert readable(tier, found, NUMBERS) == set(range(100)) - {number for number in range(40) if number % 4}
    tier.remove([(item(number)[0].key, found[item(number)[0].key]) for number in copied])
    later = tier.append(items(range(100, 200)))
    tier.remove([(item(number)[0].key, at) for number, at in zip(range(100, 200), later, strict=True)])
    # The copies' file is compacted away with their tombstones; the originals' file may be still there.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "shoal_kv_cache.tiers.ssd.compaction.victims",
            lambda catalog, _: [
                segment for number, segment in catalog.segments.items() if 1 < number < catalog.highest_number
            ],
        )
        tier.compact(1 << 30)
        tier.retire()
    tier.close()
    without_index(tmp_path / "two")
    assert not copied & found_numbers(tmp_path / "two")


def test_what_was_removed_stays_removed_when_deleting_of_files_is_cut_short(tmp_path: Path) -> None:
    disk = WatchedDisk()
    tier, _ = opened(tmp_path / "one", disk=disk, segment_file_bytes=128 << 10)
    held = tier.append(items(range(120)))
    gone = {number for number in range(120) if number % 3}
    for number in sorted(gone):
        tier.remove([(item(number)[0].key, held[number])])
    tier.compact(1 << 30)

    def copy() -> None:
        shutil.copytree(tmp_path / "one", tmp_path / "two")

    disk.watch["retire.deleted"] = copy
    tier.retire()
    tier.close()
    assert len(segment_files(tmp_path / "two")) > len(segment_files(tmp_path / "one"))
    without_index(tmp_path / "two")
    assert found_numbers(tmp_path / "two") == set(range(120)) - gone


def test_a_removal_that_failed_comes_to_the_same_with_and_without_the_index(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, "injected")

    disk = WatchedDisk()
    tier, _ = opened(tmp_path / "one", disk=disk)
    held = tier.append(items(range(10)))
    disk.watch["write"] = fail
    with pytest.raises(SsdUnavailable):
        tier.remove([(item(3)[0].key, held[3])])
    tier.sync()
    tier.close()
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    without_index(tmp_path / "two")
    assert found_numbers(tmp_path / "one") == found_numbers(tmp_path / "two") == set(range(10))


class LosingDisk(Disk):
    """Forgets, when the power is cut, part of what was written and not made durable."""

    def __init__(self) -> None:
        self._paths: dict[int, Path] = {}
        self._unsynced: dict[Path, list[tuple[int, int]]] = {}
        self._new: set[Path] = set()
        self._is_off = False

    def open(self, path: Path, *, is_new: bool = False, is_writable: bool = False) -> int:
        descriptor = super().open(path, is_new=is_new, is_writable=is_writable)
        self._paths[descriptor] = path
        if is_new:
            self._new.add(path)
        return descriptor

    def write(self, descriptor: int, parts: list[memoryview], offset: int) -> None:  # type: ignore[override]
        self._check()
        super().write(descriptor, parts, offset)
        self._unsynced.setdefault(self._paths[descriptor], []).append((offset, sum(map(len, parts))))

    def sync(self, descriptor: int) -> None:
        self._check()
        super().sync(descriptor)
        self._unsynced.pop(self._paths[descriptor], None)

    def sync_directory(self, path: Path) -> None:
        self._new.clear()

    def truncate(self, descriptor: int, size: int) -> None:
        self._check()
        super().truncate(descriptor, size)

    def _check(self) -> None:
        if self._is_off:
            raise OSError(errno.EIO, "off")

    def cut_power(self, rng: random.Random) -> None:
        """Each page that was not durable may be lost; a name that was not, too. Nothing is written from here on."""
        self._is_off = True
        for path, extents in self._unsynced.items():
            if not path.exists():
                continue
            if path in self._new and rng.random() < 0.5:
                path.unlink()
                continue
            with path.open("r+b") as file:
                for offset, size in extents:
                    for page in range(offset, offset + size, 4096):
                        if rng.random() < 0.5:
                            file.seek(page)
                            file.write(bytes(4096))
                if rng.random() < 0.5:
                    file.truncate(extents[0][0] + rng.randrange(0, extents[-1][0] + extents[-1][1] - extents[0][0]))


@pytest.mark.parametrize("seed", range(6))
def test_nothing_durable_is_lost_when_the_power_is_cut(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    durable: set[int] = set()
    removed: set[int] = set()
    following = 0
    for _ in range(8):
        disk = LosingDisk()
        # No tick comes by itself: what is durable is so by sync or by the policy.
        fsync = rng.choice([Fsync.ALWAYS, Fsync.INTERVAL])
        tier, found = opened(tmp_path, fsync=fsync, fsync_interval_s=1e6, disk=disk)
        held = {NUMBERS[key]: location for key, location in found.items()}
        assert durable <= readable(tier, found, NUMBERS) <= set(range(following)) - removed
        durable, removed = set(held), set()
        for _ in range(rng.randrange(1, 12)):
            numbers = range(following, following + rng.randrange(1, 9))
            following = numbers.stop
            held.update(zip(numbers, tier.append(items(numbers)), strict=True))
            gone = rng.sample(sorted(held), len(held) // 3) if rng.random() < 0.4 else []
            tier.remove([(item(number)[0].key, held.pop(number)) for number in gone])
            durable.difference_update(gone)
            if fsync is Fsync.INTERVAL and rng.random() < 0.2:
                tier.sync()
                durable, removed = set(held), set(range(following)) - set(held)
            if fsync is Fsync.ALWAYS:
                durable, removed = set(held), set(range(following)) - set(held)
        disk.cut_power(rng)
        tier.close()


def flip(path: Path, offset: int) -> None:
    """Flips one bit."""
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


def _pages(number: int) -> int:
    return -(-item(number)[0].size_bytes // 4096)
