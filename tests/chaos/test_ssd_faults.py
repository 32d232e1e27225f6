"""Disks that are full, read-only, slow or broken: a typed outcome each time, and the tier goes on."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from shoal_common.errors import MeshError, NotFound
from shoal_kv_cache.tiers.ssd import Fsync, Read, SsdBusy, SsdFull, SsdReadOnly, SsdTier, SsdTimeout, SsdUnavailable
from shoal_kv_cache.tiers.ssd.disk import Disk
from support.ssd_items import item, items, number_by_key, opened, readable, segment_files

NUMBERS = number_by_key(1000)


class FaultyDisk(Disk):
    """Fails or waits at chosen calls while told to."""

    def __init__(self) -> None:
        self.fault: dict[str, Callable[[], None]] = {}

    def open(self, path: Path, *, is_new: bool = False, is_writable: bool = False) -> int:
        self._at("create" if is_new else "open")
        return super().open(path, is_new=is_new, is_writable=is_writable)

    def read(self, descriptor: int, into: memoryview, offset: int) -> int:
        self._at("read")
        return super().read(descriptor, into, offset)

    def write(self, descriptor: int, parts: Sequence[memoryview], offset: int) -> None:
        if "half" in self.fault:
            super().write(descriptor, [parts[0]], offset)
        self._at("half")
        self._at("write")
        super().write(descriptor, parts, offset)

    def sync(self, descriptor: int) -> None:
        self._at("sync")
        super().sync(descriptor)

    def truncate(self, descriptor: int, size: int) -> None:
        self._at("truncate")
        super().truncate(descriptor, size)

    def _at(self, call: str) -> None:
        if call in self.fault:
            self.fault[call]()


def failing(number: int) -> Callable[[], None]:
    def fail() -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def tier(tmp_path: Path, disk: FaultyDisk) -> Iterator[SsdTier]:
    made, _ = opened(tmp_path, fsync=Fsync.ALWAYS, disk=disk)
    yield made
    disk.fault.clear()
    made.close()


def put(tier: SsdTier, numbers: Sequence[int]) -> dict[int, int]:
    return dict(zip(numbers, tier.append(items(numbers)), strict=True))


def put_all(tier: SsdTier, numbers: range, held: dict[int, int] | None = None) -> None:
    """One append after the other; notes in `held` what was acknowledged."""
    for begin in range(numbers.start, numbers.stop, 10):
        put_now = put(tier, range(begin, begin + 10))
        if held is not None:
            held |= put_now


def until(event: threading.Event) -> Callable[[], None]:
    def wait() -> None:
        event.wait(60)

    return wait


def reads_of(held: dict[int, int]) -> list[Read]:
    return [Read(at, item(number)[0].size_bytes, item(number)[0].checksum) for number, at in held.items()]


def after_restart(directory: Path) -> set[int]:
    tier, found = opened(directory)
    good = readable(tier, found, NUMBERS)
    tier.close()
    return good


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, SsdFull),
        (errno.EDQUOT, SsdFull),
        (errno.EROFS, SsdReadOnly),
        (errno.EACCES, SsdReadOnly),
        (errno.EIO, SsdUnavailable),
    ],
)
@pytest.mark.parametrize("call", ["write", "half", "sync", "create"])
def test_a_failed_write_has_a_type_and_leaves_nothing(
    tmp_path: Path, disk: FaultyDisk, tier: SsdTier, number: int, kind: type[MeshError], call: str
) -> None:
    held = put(tier, range(5))
    disk.fault[call] = failing(number)
    with pytest.raises(kind):
        put_all(tier, range(100, 300))
    assert tier.stats().failing_reason == kind.reason
    written = tier.stats().record_count
    disk.fault.clear()
    held |= put(tier, range(10, 15))
    assert tier.stats().failing_reason == ""
    assert tier.stats().record_count == written + 5
    assert [result for result in tier.read_many(reads_of(held)) if not isinstance(result, bytes)] == []
    tier.close()
    assert set(held) <= after_restart(tmp_path)


def test_a_write_that_cannot_be_taken_back_is_whole_or_absent(tmp_path: Path, disk: FaultyDisk, tier: SsdTier) -> None:
    held = put(tier, range(5))
    disk.fault |= {"half": failing(errno.EIO), "truncate": failing(errno.EIO)}
    with pytest.raises(SsdUnavailable):
        put(tier, range(10, 15))
    disk.fault.clear()
    held |= put(tier, range(20, 25))
    tier.close()
    again, found = opened(tmp_path)
    assert readable(again, found, NUMBERS) >= set(held)
    again.close()


def test_a_failed_read_has_a_type_and_the_next_one_works(disk: FaultyDisk, tier: SsdTier) -> None:
    held = put(tier, range(3))
    disk.fault["read"] = failing(errno.EIO)
    assert [type(result) for result in tier.read_many(reads_of(held))] == [SsdUnavailable] * 3
    assert tier.stats().failing_reason == "SSD_UNAVAILABLE"
    disk.fault.clear()
    assert all(isinstance(result, bytes) for result in tier.read_many(reads_of(held)))
    assert tier.stats().failing_reason == ""


def test_a_removal_that_failed_is_durable_once_it_is_repeated(tmp_path: Path, disk: FaultyDisk, tier: SsdTier) -> None:
    held = put(tier, range(4))
    keys = [(item(number)[0].key, held[number]) for number in (1, 2)]
    disk.fault["write"] = failing(errno.EIO)
    for _ in range(2):
        with pytest.raises(SsdUnavailable):
            tier.remove(keys)
    assert tier.stats().record_count == 2
    disk.fault.clear()
    tier.remove(keys)
    tier.close()
    (tmp_path / "index" / "data.mdb").unlink()
    assert after_restart(tmp_path) == {0, 3}


def test_no_clock_of_the_day_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def jump() -> float:
        raise AssertionError("the clock of the day may jump")

    monkeypatch.setattr("time.time", jump)
    tier, _ = opened(tmp_path)
    held = put(tier, range(60))
    tier.remove([(item(number)[0].key, held.pop(number)) for number in range(40)])
    moves = {moved.old_location: moved.new_location for moved in tier.compact(1 << 20)}
    tier.retire()
    held = {number: moves.get(location, location) or 0 for number, location in held.items()}
    assert all(isinstance(result, bytes) for result in tier.read_many(reads_of(held)))
    tier.close()


def test_a_file_that_somebody_deleted_is_not_found(tmp_path: Path, tier: SsdTier) -> None:
    held = put(tier, range(3))
    for path in segment_files(tmp_path):
        path.unlink()
    assert all(isinstance(result, NotFound) for result in tier.read_many(reads_of(held)))


def test_a_disk_that_hangs_costs_each_caller_its_time_and_no_more(disk: FaultyDisk, tier: SsdTier) -> None:
    held = put(tier, range(3))
    goes_on = threading.Event()
    disk.fault["read"] = until(goes_on)
    into = memoryview(bytearray(item(0)[0].size_bytes))
    (late,) = tier.read_many([Read(held[0], len(into), item(0)[0].checksum, (into,))], timeout_s=0.05)
    assert isinstance(late, SsdTimeout)
    into[:] = b"\x07" * len(into)
    # The threads all hang now; whoever comes waits for his time, not for the disk.
    for _ in range(8):
        assert isinstance(tier.read_many(reads_of(held), timeout_s=0.01)[0], SsdTimeout)
    goes_on.set()
    assert all(isinstance(result, bytes) for result in tier.read_many(reads_of(held)))
    assert bytes(into) == b"\x07" * len(into), "a late read writes into nothing of the caller's"


def test_the_queue_to_a_disk_that_hangs_is_bounded(tmp_path: Path, disk: FaultyDisk) -> None:
    tier, _ = opened(tmp_path, fsync=Fsync.ALWAYS, disk=disk, queue_bytes=64 << 10)
    held = put(tier, range(3))
    goes_on = threading.Event()
    disk.fault["read"] = disk.fault["write"] = until(goes_on)
    kinds = {type(tier.read_many(reads_of(held), timeout_s=0.01)[0]) for _ in range(20)}
    assert kinds == {SsdTimeout, SsdBusy}
    kinds = set()
    for _ in range(20):
        with pytest.raises((SsdTimeout, SsdBusy)) as refused:
            tier.append(items(range(10, 13)), timeout_s=0.01)
        kinds.add(type(refused.value))
    assert kinds == {SsdTimeout, SsdBusy}
    assert tier.stats().busy_count > 0
    goes_on.set()
    disk.fault.clear()
    put(tier, range(20, 23))
    assert tier.stats().record_count == 6, "what came too late was undone"
    tier.close()
    assert after_restart(tmp_path) == {0, 1, 2, 20, 21, 22}


def test_a_write_that_comes_too_late_is_undone(tmp_path: Path, disk: FaultyDisk, tier: SsdTier) -> None:
    put(tier, range(3))
    goes_on = threading.Event()
    disk.fault["sync"] = until(goes_on)
    with pytest.raises(SsdTimeout):
        tier.append(items(range(10, 13)), timeout_s=0.05)
    goes_on.set()
    put(tier, range(20, 23))
    tier.close()
    assert after_restart(tmp_path) == {0, 1, 2, 20, 21, 22}


def test_closing_does_not_wait_for_a_disk_that_hangs(
    tmp_path: Path, disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal_kv_cache.tiers.ssd.tier._CLOSE_S", 0.05)
    tier, _ = opened(tmp_path, disk=disk)
    held = put(tier, range(3))
    goes_on = threading.Event()
    disk.fault["read"] = disk.fault["sync"] = until(goes_on)
    tier.read_many(reads_of(held), timeout_s=0.01)
    tier.close()
    goes_on.set()


def test_a_payload_removed_while_compaction_copies_it_does_not_come_back(
    tmp_path: Path, disk: FaultyDisk, tier: SsdTier
) -> None:
    held = put(tier, range(100))
    tier.remove([(item(number)[0].key, held.pop(number)) for number in range(60) if number % 4])
    chosen = [0, 4, 8, 12]
    reads = 0

    def remove_meanwhile() -> None:
        nonlocal reads
        reads += 1
        # The scan of the file reads first, in compaction's own thread; then come its payloads, in the tier's.
        if threading.current_thread().name.startswith("ssd-reader") and chosen:
            gone = [(item(number)[0].key, held.pop(number)) for number in chosen]
            chosen.clear()
            tier.remove(gone)

    disk.fault["read"] = remove_meanwhile
    moved = tier.compact(1 << 20)
    disk.fault.clear()
    assert moved
    assert not {at.key for at in moved} & {item(number)[0].key for number in (0, 4, 8, 12)}
    tier.retire()
    tier.close()
    assert after_restart(tmp_path) == set(held)


def test_an_index_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "index").write_text("a file where a folder should be")
    tier, _ = opened(tmp_path, fsync=Fsync.ALWAYS)
    put(tier, range(30))
    assert tier.stats().is_index_failing
    tier.sync()
    tier.close()
    assert after_restart(tmp_path) == set(range(30))


@contextmanager
def files_limited_to(size_bytes: int) -> Iterator[None]:
    """No file of this process grows above the limit: the kernel says EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_files_that_the_kernel_lets_not_grow_are_full(tmp_path: Path) -> None:
    tier, _ = opened(tmp_path, segment_file_bytes=1 << 20, fsync=Fsync.ALWAYS)
    held = put(tier, range(5))
    with files_limited_to(96 << 10):
        with pytest.raises(SsdFull):
            put_all(tier, range(100, 200), held)
        assert all(isinstance(result, bytes) for result in tier.read_many(reads_of(held)))
    held |= put(tier, range(300, 305))
    tier.close()
    assert after_restart(tmp_path) == set(held)


def test_a_small_file_system_becomes_full_and_then_read_only(tmp_path: Path) -> None:
    namespace = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace for this user")
    done = subprocess.run(
        [*namespace, sys.executable, "-m", "support.ssd_on_tmpfs", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
    )
    assert "survived" in done.stdout, done.stderr
