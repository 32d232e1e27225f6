"""The disk tier against the disk itself: plain O_DIRECT reads and writes of the same bytes, in turn with it.

Nothing is read from the page cache: both sides open with O_DIRECT, and what was cached by other means is dropped first.
"""

from __future__ import annotations

import gc
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
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
WARMING_GROUPS = 4
ROUNDS = 5
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

    def write(self, size_bytes: int, *, sync_every: int) -> None:
        """Appends in pieces; durable after each `sync_every` bytes and at the end."""
        piece = mmap.mmap(-1, PIECE)
        piece[:] = os.urandom(PIECE)
        since = 0
        for offset in range(0, size_bytes, PIECE):
            os.pwritev(self._descriptor, [memoryview(piece)[: min(PIECE, size_bytes - offset)]], offset)
            since += PIECE
            if since >= sync_every:
                os.fdatasync(self._descriptor)
                since = 0
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


def extents(size_bytes: int, piece: int) -> Iterator[tuple[int, int]]:
    """Consecutive extents of whole pages."""
    for offset in range(0, size_bytes - piece + 1, piece):
        yield offset, piece


def rate(size_bytes: int, work: Callable[[], object]) -> float:
    """Bytes per second."""
    started = time.perf_counter()
    work()
    return size_bytes / (time.perf_counter() - started)


def drop_cache(folder: Path) -> None:
    """Nothing of the folder stays in the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def write_rates(folder: Path, fsync: Fsync, round_index: int) -> tuple[float, float]:
    """The tier's and the plain disk's, payload bytes per second each."""
    groups = groups_of_items(round_index)
    warming, groups = groups[:WARMING_GROUPS], groups[WARMING_GROUPS:]
    size_bytes = sum(entry.size_bytes for items in groups for entry, _ in items)
    tier = SsdTier(folder / "tier", capacity_bytes=8 << 30, fsync=fsync)
    list(tier.recover())
    # Buffers are touched for the first time once in a node's life; its heap is not collected for each append.
    for items in warming:
        tier.append(items)
    tier.sync()
    gc.collect()
    gc.freeze()

    def append() -> None:
        # Two at a time, as the node's write-back does: one is copied while the other is written.
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(tier.append, groups))
        if fsync is not Fsync.ALWAYS:
            tier.sync()

    plain = PlainFile(folder / "plain")
    sync_every = size_bytes // len(groups) if fsync is Fsync.ALWAYS else size_bytes
    sides: dict[str, Callable[[], object]] = {
        "tier": append,
        "plain": lambda: plain.write(size_bytes, sync_every=sync_every),
    }
    # The one that comes first changes, in case the disk remembers.
    order = sorted(sides, reverse=bool(round_index % 2))
    rates = {name: rate(size_bytes, sides[name]) for name in order}
    tier.close()
    plain.close()
    remove(folder)
    return rates["tier"], rates["plain"]


def remove(folder: Path) -> None:
    """Empties the folder."""
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


def read_rates(folder: Path) -> dict[str, list[float]]:
    """Rates in turn, payload bytes per second: whole chain segments, and one block at a time."""
    groups = groups_of_items(0)
    tier = SsdTier(folder / "tier", capacity_bytes=8 << 30, fsync=Fsync.NEVER)
    list(tier.recover())
    reads = [
        [Read(at, entry.size_bytes, entry.checksum) for (entry, _), at in zip(items, tier.append(items), strict=True)]
        for items in groups
    ]
    into = [memoryview(bytearray(read.size_bytes)) for read in reads[0]]
    into_reads = [
        [Read(read.location, read.size_bytes, read.checksum, (part,)) for read, part in zip(group, into, strict=True)]
        for group in reads
    ]
    size_bytes = sum(read.size_bytes for group in reads for read in group)
    plain = PlainFile(folder / "plain")
    plain.write(pages(size_bytes), sync_every=1 << 40)
    tier.sync()
    blocks = [read for group in into_reads[:8] for read in group[:GROUP_BLOCKS]]
    block_bytes = len(blocks) * BLOCK.size_bytes
    whole = list(extents(pages(size_bytes), PIECE))
    single = [(index * pages(BLOCK.size_bytes), pages(BLOCK.size_bytes)) for index in range(len(blocks))]

    def segments() -> None:
        for group in into_reads:
            assert not any(tier.read_many(group))

    def one_by_one() -> None:
        for read in blocks:
            tier.read_many([read])

    found: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        drop_cache(folder)
        for name, work, amount in (
            ("tier", segments, size_bytes),
            ("plain_1", lambda: plain.read(whole, 1), len(whole) * PIECE),
            ("plain_2", lambda: plain.read(whole, 2), len(whole) * PIECE),
            ("plain_4", lambda: plain.read(whole, 4), len(whole) * PIECE),
            ("tier_block", one_by_one, block_bytes),
            ("plain_block", lambda: plain.read(single, 1), block_bytes),
        ):
            found.setdefault(name, []).append(rate(amount, work))
    tier.close()
    plain.close()
    remove(folder)
    return found


def measure() -> int:
    """Run all of it and report."""
    Path(FOLDER).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as name:
        folder = Path(name)
        reads = {key: statistics.median(values) for key, values in read_rates(folder).items()}
        writes = {
            fsync: [write_rates(folder, fsync, round_index) for round_index in range(ROUNDS)]
            for fsync in (Fsync.INTERVAL, Fsync.ALWAYS)
        }
    best_plain = max(reads["plain_1"], reads["plain_2"], reads["plain_4"])
    medians = {
        fsync: tuple(statistics.median(pair[side] for pair in pairs) for side in (0, 1))
        for fsync, pairs in writes.items()
    }
    interval, always = medians[Fsync.INTERVAL], medians[Fsync.ALWAYS]
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
            Bar(name="read_of_direct", value=reads["tier"] / best_plain, want=0.8, sense="at least", unit="x"),
            Bar(name="write_of_direct", value=interval[0] / interval[1], want=0.7, sense="at least", unit="x"),
            Bar(name="durable_write_of_direct", value=always[0] / always[1], want=0.7, sense="at least", unit="x"),
        ],
        figures={
            "read_gb_per_s": {key: value / 1e9 for key, value in reads.items()},
            "block_read_of_direct": reads["tier_block"] / reads["plain_block"],
            "write_gb_per_s": {"tier": interval[0] / 1e9, "plain": interval[1] / 1e9},
            "durable_write_gb_per_s": {"tier": always[0] / 1e9, "plain": always[1] / 1e9},
        },
    )


if __name__ == "__main__":
    sys.exit(measure())
