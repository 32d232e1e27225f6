"""The disk tier against the disk itself: plain O_DIRECT reads and writes of as many bytes, in turn with it.

Plainly the disk is asked in several ways (size of a piece, pieces at a time), each byte from and to a place of its own;
the best of them is what counts. The tier does what a node does: its payloads lie one after the other in an arena of the
size of a turn, written back in calls of 32 MiB one after the other, and read back into it in calls of 16 MiB, four at a
time. Ways that use one piece of memory over and over are told beside that.
"""

from __future__ import annotations

import gc
import mmap
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import xxhash
from bench.harness import Bar, finish, percentile
from bench.kv_ssd_direct import ONE_PIECE_WAYS, WAYS, PlainFile, Way, drop_cache, pages
from shoal_kv_cache.core.entries import Entry, Form, Group, Key, Kind
from shoal_kv_cache.tiers.ssd import Fsync, Read, SsdTier

BLOCK = Form(128, (128, 890), "uint8", 113_920)
SNAPSHOT = Form(128, (20, 128, 528), "uint8", 1_351_680)
SEGMENT_BLOCKS = 64
SEGMENTS_A_TURN = 12
TURNS = 12
WRITE_CALL, READ_CALL = 32 << 20, 16 << 20
READ_CALLS = 4
BLOCK_WAY = Way(pages(BLOCK.size_bytes), 1)
# Where the disk is; /tmp may be memory.
FOLDER = os.environ.get("BENCH_FOLDER", "build/bench")

Item = tuple[Entry, memoryview]
Turn = Callable[[], object]


class Arena:
    """Payloads of one turn in memory: chain segments of 64 blocks, each with a snapshot at its end."""

    def __init__(self) -> None:
        segment = [(BLOCK, Kind.BLOCK)] * SEGMENT_BLOCKS + [(SNAPSHOT, Kind.SNAPSHOT)]
        self._forms = segment * SEGMENTS_A_TURN
        self.size_bytes = sum(form.size_bytes for form, _ in self._forms)
        self.page_bytes = sum(pages(form.size_bytes) for form, _ in self._forms)
        memory = mmap.mmap(-1, self.size_bytes)
        np.frombuffer(memory, np.uint8)[:] = np.random.default_rng(1).integers(0, 256, self.size_bytes, np.uint8)
        self.views: list[memoryview] = []
        begin = 0
        for form, _ in self._forms:
            self.views.append(memoryview(memory)[begin : begin + form.size_bytes])
            begin += form.size_bytes
        self.pages = mmap.mmap(-1, self.page_bytes)
        np.frombuffer(self.pages, np.uint8)[: self.size_bytes] = np.frombuffer(memory, np.uint8)
        self._checksums = [xxhash.xxh3_64_intdigest(view) for view in self.views]
        self._group = Group("bench", "bench", bytes(32))

    def items(self, turn: int) -> list[Item]:
        """The payloads under other names each turn."""
        made = []
        for index, ((form, kind), view, checksum) in enumerate(
            zip(self._forms, self.views, self._checksums, strict=True)
        ):
            digest = xxhash.xxh3_128_digest(f"{turn}.{index}".encode()) * 2
            place = min(index % (SEGMENT_BLOCKS + 1) + 1, SEGMENT_BLOCKS) * 128
            made.append((Entry(Key(kind, digest), self._group, digest, place, form, checksum), view))
        return made


def calls(sizes: Sequence[int], call_bytes: int) -> list[slice]:
    """Runs of at most so many bytes."""
    found, begin, size_bytes = [], 0, 0
    for index, size in enumerate(sizes):
        if size_bytes + size > call_bytes:
            found.append(slice(begin, index))
            begin, size_bytes = index, 0
        size_bytes += size
    return [*found, slice(begin, len(sizes))]


class Contest:
    """Contenders do the same amount in turns in a random order, so that what else the machine does is fair to all."""

    def __init__(self) -> None:
        self.rates: dict[str, list[float]] = {}
        self._rng = random.Random(1)

    def take(self, size_bytes: int, turns: Mapping[str, Turn]) -> None:
        """One turn of each."""
        for name in self._rng.sample(sorted(turns), len(turns)):
            started = time.perf_counter()
            turns[name]()
            self.rates.setdefault(name, []).append(size_bytes / (time.perf_counter() - started))

    def best(self, ways: Sequence[Way]) -> str:
        """The way of asking the disk plainly that is fastest in most turns."""
        return max(map(str, ways), key=lambda name: statistics.median(self.rates[name]))

    def ratios(self, ways: Sequence[Way]) -> list[float]:
        """The tier's rate by that of the best way, turn by turn."""
        return [tier / plain for tier, plain in zip(self.rates["tier"], self.rates[self.best(ways)], strict=True)]

    def figures(self, ways: Sequence[Way], one_piece_ways: Sequence[Way]) -> dict[str, object]:
        """What is worth keeping."""
        ratios = self.ratios(ways)
        return {
            "gb_per_s": {name: statistics.median(rates) / 1e9 for name, rates in self.rates.items()},
            "best": self.best(ways),
            "ratio_p10_p90": [percentile(ratios, 0.1), percentile(ratios, 0.9)],
            "of_one_piece": statistics.median(self.ratios(one_piece_ways)),
        }


def settle() -> None:
    """A node's heap is not collected each time."""
    gc.collect()
    gc.freeze()


def write_contest(folder: Path, arena: Arena, fsync: Fsync) -> Contest:
    """Bytes appended per second; under ALWAYS each call of both is durable when it returns."""
    tier = SsdTier(folder / "tier", capacity_bytes=16 << 30, fsync=fsync)
    list(tier.recover())
    files = {way: PlainFile(folder / f"plain {way}", arena.pages) for way in WAYS + ONE_PIECE_WAYS}
    sync_every = WRITE_CALL if fsync is Fsync.ALWAYS else 0
    cut = calls([len(view) for view in arena.views], WRITE_CALL)

    def write(items: Sequence[Item]) -> None:
        for some in cut:
            tier.append(items[some])

    def plainly(way: Way) -> Turn:
        return lambda: files[way].append(arena.page_bytes, way, sync_every)

    contest = Contest()
    for turn in range(TURNS + 1):
        if turn == 1:
            # The first turn touches every buffer for the first time, as happens once in a node's life.
            contest = Contest()
            settle()
        items = arena.items(turn)
        contest.take(arena.size_bytes, {"tier": lambda: write(items), **{str(way): plainly(way) for way in files}})  # noqa: B023
    tier.close()
    for file in files.values():
        file.close()
    remove(folder)
    return contest


def read_contest(folder: Path, arena: Arena) -> tuple[Contest, Contest]:
    """Bytes read per second in large calls, and one block at a time."""
    tier = SsdTier(folder / "tier", capacity_bytes=16 << 30, fsync=Fsync.NEVER)
    list(tier.recover())
    plain = PlainFile(folder / "plain", arena.pages)
    cut = calls([len(view) for view in arena.views], READ_CALL)
    reads: list[list[list[Read]]] = []
    for turn in range(4):
        items = arena.items(turn)
        made = [
            Read(at, entry.size_bytes, entry.checksum, (view,))
            for (entry, view), at in zip(items, tier.append(items), strict=True)
        ]
        reads.append([made[some] for some in cut])
        plain.append(arena.page_bytes, WAYS[-1])
    tier.sync()
    drop_cache(folder)
    contest, singles = Contest(), Contest()
    with ThreadPoolExecutor(READ_CALLS) as pool:

        def read(some: Sequence[Sequence[Read]]) -> None:
            for results in pool.map(tier.read_many, some):
                assert not any(results)

        def plainly(begin: int, way: Way) -> Turn:
            return lambda: plain.read(begin, arena.page_bytes, way)

        for turn in range(TURNS + 1):
            if turn == 1:
                contest, singles = Contest(), Contest()
                settle()
            some = reads[turn % len(reads)]
            begin = turn % len(reads) * arena.page_bytes
            contest.take(
                arena.size_bytes,
                {"tier": lambda: read(some), **{str(way): plainly(begin, way) for way in WAYS + ONE_PIECE_WAYS}},  # noqa: B023
            )
            singles.take(
                SEGMENT_BLOCKS * BLOCK.size_bytes,
                {
                    "tier": lambda: [tier.read_many([one]) for one in some[0][:SEGMENT_BLOCKS]],  # noqa: B023
                    str(BLOCK_WAY): lambda: plain.read(begin, SEGMENT_BLOCKS * BLOCK_WAY.piece, BLOCK_WAY),  # noqa: B023
                },
            )
    tier.close()
    plain.close()
    remove(folder)
    return contest, singles


def remove(folder: Path) -> None:
    """Empties the folder."""
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


def measure() -> int:
    """Run all of it and report."""
    arena = Arena()
    Path(FOLDER).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as name:
        folder = Path(name)
        reads, singles = read_contest(folder, arena)
        writes = write_contest(folder, arena, Fsync.INTERVAL)
        durable = write_contest(folder, arena, Fsync.ALWAYS)
    contests = {"read": reads, "write": writes, "durable_write": durable}
    wants = {"read": 0.8, "write": 0.7, "durable_write": 0.7}
    return finish(
        "kv_ssd",
        workload={
            "turns": TURNS,
            "turn_bytes": arena.size_bytes,
            "block_bytes": BLOCK.size_bytes,
            "snapshot_bytes": SNAPSHOT.size_bytes,
        },
        bars=[
            Bar(
                name=f"{name}_of_direct",
                value=statistics.median(contest.ratios(WAYS)),
                want=wants[name],
                sense="at least",
                unit="x",
            )
            for name, contest in contests.items()
        ],
        figures={
            **{name: contest.figures(WAYS, ONE_PIECE_WAYS) for name, contest in contests.items()},
            "block_read": singles.figures([BLOCK_WAY], [BLOCK_WAY]),
        },
    )


if __name__ == "__main__":
    sys.exit(measure())
