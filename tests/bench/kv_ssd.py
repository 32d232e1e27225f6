"""The disk tier against the disk itself: plain O_DIRECT reads and writes of the same bytes, in turn with it.

Nothing is read from the page cache: both sides open with O_DIRECT, and what was cached by other means is dropped first.
"""

from __future__ import annotations

import gc
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash
from bench.harness import Bar, finish
from shoal_kv_cache.core.entries import Entry, Form, Group, Key, Kind
from shoal_kv_cache.tiers.ssd import Fsync, Read, SsdTier

BLOCK = Form(128, (128, 890), "uint8", 113_920)
SNAPSHOT = Form(128, (20, 128, 528), "uint8", 1_351_680)
PAGE = 4096
PIECE = 4 << 20
GROUP_BLOCKS = 64
GROUPS = 52
SLICE = 4
ROUNDS = 3
# Where the disk is; /tmp may be memory.
FOLDER = os.environ.get("BENCH_FOLDER", "build/bench")

Item = tuple[Entry, memoryview]


def groups_of_items(round_index: int) -> list[list[Item]]:
    """Chain segments of 64 blocks, and a snapshot at the end of each."""
    group = Group("bench", "bench", bytes(32))
    source = memoryview(os.urandom(SNAPSHOT.size_bytes + 1024))
    made = []
    for index in range(GROUPS):
        items = []
        for block in range(GROUP_BLOCKS + 1):
            form, kind = (BLOCK, Kind.BLOCK) if block < GROUP_BLOCKS else (SNAPSHOT, Kind.SNAPSHOT)
            payload = source[(index + block) % 1024 :][: form.size_bytes]
            digest = xxhash.xxh3_128_digest(f"{round_index}.{index}.{block}".encode()) * 2
            place = min(block + 1, GROUP_BLOCKS) * 128
            items.append(
                (Entry(Key(kind, digest), group, digest, place, form, xxhash.xxh3_64_intdigest(payload)), payload)
            )
        made.append(items)
    return made


class PlainFile:
    """What the disk does when asked plainly."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
        self._piece = mmap.mmap(-1, PIECE)
        self._piece[:] = os.urandom(PIECE)
        self._end = 0

    def append(self, size_bytes: int, sync_every: int) -> None:
        """Appends in pieces; durable after each `sync_every` bytes, if that is not 0."""
        since = 0
        for offset in range(0, size_bytes, PIECE):
            size = pages(min(PIECE, size_bytes - offset))
            os.pwritev(self._descriptor, [memoryview(self._piece)[:size]], self._end)
            self._end += size
            since += size
            if sync_every and since >= sync_every:
                os.fdatasync(self._descriptor)
                since = 0

    def sync(self) -> None:
        """Makes it durable."""
        os.fdatasync(self._descriptor)

    def read(self, extents: Sequence[tuple[int, int]], threads: int) -> None:
        """Reads (offset, size) extents."""

        def some(first: int) -> None:
            into = mmap.mmap(-1, max(size for _, size in extents))
            for offset, size in extents[first::threads]:
                os.preadv(self._descriptor, [memoryview(into)[:size]], offset)

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(some, range(threads)))

    def close(self) -> None:
        """Closes it."""
        os.close(self._descriptor)


def pages(size_bytes: int) -> int:
    """Bytes in whole pages."""
    return -(-size_bytes // PAGE) * PAGE


class Contest:
    """Contenders do the same amount in small turns, so that what else the machine does slows all of them alike."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._bytes: dict[str, int] = {}
        self._turn = 0

    def take(self, turns: dict[str, tuple[int, Callable[[], object]]]) -> None:
        """One turn of each: name, bytes and work; who begins changes."""
        names = list(turns)
        first = self._turn % len(names)
        self._turn += 1
        for name in names[first:] + names[:first]:
            size_bytes, work = turns[name]
            started = time.perf_counter()
            work()
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started
            self._bytes[name] = self._bytes.get(name, 0) + size_bytes

    def rates(self) -> dict[str, float]:
        """Bytes per second of each."""
        return {name: self._bytes[name] / seconds for name, seconds in self._seconds.items()}


def drop_cache(folder: Path) -> None:
    """Nothing of the folder stays in the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def write_contest(folder: Path, fsync: Fsync, round_index: int, contest: Contest) -> None:
    """The tier against the plain file, a slice of groups at a time. Both are durable at the end of each round."""
    groups = groups_of_items(round_index)
    tier = SsdTier(folder / "tier", capacity_bytes=8 << 30, fsync=fsync)
    list(tier.recover())
    plain = PlainFile(folder / "plain")
    # Two at a time, as the node's write-back does: one is copied while the other is written.
    with ThreadPoolExecutor(2) as pool:
        for begin in range(0, len(groups), SLICE):
            some = groups[begin : begin + SLICE]
            size_bytes = sum(entry.size_bytes for items in some for entry, _ in items)
            sync_every = size_bytes // SLICE if fsync is Fsync.ALWAYS else 0
            turns: dict[str, tuple[int, Callable[[], object]]] = {
                "tier": (size_bytes, lambda some=some: list(pool.map(tier.append, some))),  # type: ignore[misc]
                "plain": (size_bytes, lambda size=size_bytes, every=sync_every: plain.append(size, every)),  # type: ignore[misc]
            }
            if begin < SLICE:
                # Buffers are touched for the first time once in a node's life; its heap is not collected each time.
                Contest().take(turns)
                gc.collect()
                gc.freeze()
            else:
                contest.take(turns)
    if fsync is not Fsync.ALWAYS:
        contest.take({"tier": (0, tier.sync), "plain": (0, plain.sync)})
    tier.close()
    plain.close()
    remove(folder)


def remove(folder: Path) -> None:
    """Empties the folder."""
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


def read_contest(folder: Path) -> dict[str, float]:
    """Whole chain segments, and one block at a time; payload bytes per second."""
    groups = groups_of_items(0)
    tier = SsdTier(folder / "tier", capacity_bytes=8 << 30, fsync=Fsync.NEVER)
    list(tier.recover())
    into = [memoryview(bytearray(entry.size_bytes)) for entry, _ in groups[0]]
    reads = [
        [
            Read(at, entry.size_bytes, entry.checksum, (part,))
            for (entry, _), at, part in zip(items, tier.append(items), into, strict=True)
        ]
        for items in groups
    ]
    size_bytes = sum(read.size_bytes for group in reads for read in group)
    plain = PlainFile(folder / "plain")
    plain.append(pages(size_bytes), 0)
    plain.sync()
    tier.sync()
    drop_cache(folder)
    gc.collect()
    gc.freeze()

    def segments(some: Sequence[Sequence[Read]]) -> None:
        for group in some:
            assert not any(tier.read_many(group))

    def one_by_one(some: Sequence[Read]) -> None:
        for read in some:
            tier.read_many([read])

    contest, singles = Contest(), Contest()
    slice_bytes = sum(read.size_bytes for group in reads[:SLICE] for read in group)
    block_bytes = pages(BLOCK.size_bytes)
    for _ in range(ROUNDS):
        for begin in range(0, len(groups), SLICE):
            some = reads[begin : begin + SLICE]
            at = begin * slice_bytes // SLICE // PAGE * PAGE
            whole = [(at + offset, PIECE) for offset in range(0, slice_bytes - PIECE + 1, PIECE)]
            turns: dict[str, tuple[int, Callable[[], object]]] = {
                "tier": (slice_bytes, lambda some=some: segments(some))  # type: ignore[misc]
            }
            for threads in (1, 2, 4):
                turns[f"plain_{threads}"] = (
                    len(whole) * PIECE,
                    lambda whole=whole, threads=threads: plain.read(whole, threads),  # type: ignore[misc]
                )
            contest.take(turns)
            blocks = some[0][:GROUP_BLOCKS]
            places = [(at + index * block_bytes, block_bytes) for index in range(len(blocks))]
            singles.take(
                {
                    "tier_block": (len(blocks) * BLOCK.size_bytes, lambda blocks=blocks: one_by_one(blocks)),  # type: ignore[misc]
                    "plain_block": (len(blocks) * BLOCK.size_bytes, lambda places=places: plain.read(places, 1)),  # type: ignore[misc]
                }
            )
    tier.close()
    plain.close()
    remove(folder)
    return contest.rates() | singles.rates()


def measure() -> int:
    """Run all of it and report."""
    Path(FOLDER).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as name:
        folder = Path(name)
        reads = read_contest(folder)
        writes: dict[Fsync, dict[str, float]] = {}
        for fsync in (Fsync.INTERVAL, Fsync.ALWAYS):
            contest = Contest()
            for round_index in range(ROUNDS):
                write_contest(folder, fsync, round_index, contest)
            writes[fsync] = contest.rates()
    best_plain = max(reads["plain_1"], reads["plain_2"], reads["plain_4"])
    interval, always = writes[Fsync.INTERVAL], writes[Fsync.ALWAYS]
    return finish(
        "kv_ssd",
        workload={
            "groups": GROUPS,
            "blocks": GROUP_BLOCKS,
            "block_bytes": BLOCK.size_bytes,
            "rounds": ROUNDS,
            "nice": os.nice(0),
        },
        bars=[
            Bar(name=f"{name}_of_direct", value=value, want=want, sense="at least", unit="x")
            for name, value, want in (
                ("read", reads["tier"] / best_plain, 0.8),
                ("write", interval["tier"] / interval["plain"], 0.7),
                ("durable_write", always["tier"] / always["plain"], 0.7),
            )
        ],
        figures={
            "read_gb_per_s": {key: value / 1e9 for key, value in reads.items()},
            "block_read_of_direct": reads["tier_block"] / reads["plain_block"],
            "write_gb_per_s": {key: value / 1e9 for key, value in interval.items()},
            "durable_write_gb_per_s": {key: value / 1e9 for key, value in always.items()},
        },
    )


if __name__ == "__main__":
    sys.exit(measure())
