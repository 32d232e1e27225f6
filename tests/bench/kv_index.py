"""The index of a KV cache node: lookups, puts and evictions a second, and bytes an entry.

    make bench-kv-index

Chains of 1,000 blocks fill the table to the last row. A lookup's time is the median over all chains, of the best of
several rounds; a put's and an eviction's is the best: on a machine that others use too, that is nearest to what the
code takes. Everything runs in one process, without bytes or wire.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.harness import Bar, finish
from shoal_kv_cache.core.changes import Changes
from shoal_kv_cache.core.entries import BLOCK_TOKENS, Entry, Form, Group, Key, Kind
from shoal_kv_cache.core.found import Copy
from shoal_kv_cache.core.index import Index
from shoal_kv_cache.core.leases import Leases

CHAIN_BLOCKS = 1000
CHAINS = 300
BLOCK = Form(128, (113_920,), "uint8", 113_920)
GROUP = Group("kv", "numerics", b"tenant")
ROUNDS = 7
MEMORY_CHAINS = 1000


def main() -> int:
    """Measure and report."""
    entry_bytes = _entry_bytes()
    chains = [[os.urandom(32) for _ in range(CHAIN_BLOCKS)] for _ in range(CHAINS)]
    index = Index(Leases(max_leases=16), max_entries=CHAINS * CHAIN_BLOCKS + 1)
    puts = [_entries(chain) for chain in chains]
    put_s = min(_seconds(partial(index.store, put, range(CHAIN_BLOCKS), Changes())) for put in puts)

    def depth(chain: list[bytes]) -> None:
        index.depth(GROUP, chain)

    def find(chain: list[bytes]) -> None:
        index.find(GROUP, chain)

    def pin(chain: list[bytes]) -> None:
        found = index.find(GROUP, chain)
        found.usable(Copy.RAM, max_hit_tokens=CHAIN_BLOCKS * BLOCK_TOKENS)
        index.pin("lease", "owner", 1.0, found, block_count=CHAIN_BLOCKS)
        index.release("lease", Changes())

    depth_s, find_s, pin_s = (
        min(statistics.median(_seconds(partial(what, chain)) for chain in chains) for _ in range(ROUNDS))
        for what in (depth, find, pin)
    )
    evict_s = min(
        _seconds(lambda: index.evict_ram(CHAIN_BLOCKS * BLOCK.size_bytes, Changes())) for _ in range(CHAINS // 2)
    )
    return finish(
        "kv_index",
        workload={"chains": CHAINS, "chain_blocks": CHAIN_BLOCKS, "rounds": ROUNDS, "memory_chains": MEMORY_CHAINS},
        bars=[
            Bar(name="depth_of_1000_blocks", value=1 / depth_s, want=30_000, sense="at least", unit="1/s"),
            Bar(name="every_location_of_1000_blocks", value=1 / find_s, want=3_000, sense="at least", unit="1/s"),
            Bar(name="put_of_1000_blocks", value=put_s * 1e3, want=5, sense="at most", unit="ms"),
            Bar(name="entry_bytes", value=entry_bytes, want=100, sense="at most", unit="B"),
        ],
        figures={"find_pin_release_per_s": 1 / pin_s, "evict_1000_blocks_ms": evict_s * 1e3},
    )


def _entry_bytes() -> float:
    """Resident memory that a full index adds, by entry: tables, buckets, candidates and the sample of uses."""
    before = _resident_bytes()
    index = Index(Leases(max_leases=16), max_entries=MEMORY_CHAINS * CHAIN_BLOCKS + 1)
    for _ in range(MEMORY_CHAINS):
        index.store(_entries([os.urandom(32) for _ in range(CHAIN_BLOCKS)]), range(CHAIN_BLOCKS), Changes())
    return (_resident_bytes() - before) / len(index)


def _entries(chain: list[bytes]) -> list[Entry]:
    parents = [bytes(32), *chain]
    return [
        Entry(Key(Kind.BLOCK, block_hash), GROUP, parents[place], (place + 1) * BLOCK_TOKENS, BLOCK, place)
        for place, block_hash in enumerate(chain)
    ]


def _seconds(what: Callable[[], object]) -> float:
    started = time.perf_counter()
    what()
    return time.perf_counter() - started


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(main())
