"""Payloads for the disk tier and for remote stores, made from a number, so that any of them can be checked later."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import xxhash
from shoal_kv_cache.core.entries import BLOCK_TOKENS, Entry, Form, Group, Key, Kind
from shoal_kv_cache.tiers.ssd import Read, SsdTier

GROUPS = (Group("kv-one", "numerics", b"a" * 32), Group("kv-two", "numerics", b"b" * 32))
BLOCK = Form(128, (50, 100), "uint8", 5000)
SNAPSHOT = Form(128, (3, 4321), "uint8", 12963)
CHAIN = 40

Item = tuple[Entry, bytes]


def item(number: int) -> Item:
    """The payload of that number: every fifth a snapshot, of the block before; chains of CHAIN payloads."""
    chain, place = divmod(number, CHAIN)
    is_snapshot = number % 5 == 4
    block = place - 1 if is_snapshot else place
    form = SNAPSHOT if is_snapshot else BLOCK
    payload = random.Random(number).randbytes(form.size_bytes)
    kind = Kind.SNAPSHOT if is_snapshot else Kind.BLOCK
    group = GROUPS[chain % len(GROUPS)]
    # Snapshots take no place in the chain of blocks.
    depth = block - block // 5
    parent = _digest(chain, depth - 1)
    key = Key(kind, _digest(chain, depth))
    return Entry(key, group, parent, (depth + 1) * BLOCK_TOKENS, form, xxhash.xxh3_64_intdigest(payload)), payload


def items(numbers: Sequence[int]) -> list[Item]:
    """Several."""
    return [item(number) for number in numbers]


def number_by_key(count: int) -> dict[Key, int]:
    """Which number has which key, below `count`."""
    return {item(number)[0].key: number for number in range(count)}


def opened(directory: Path, **settings: object) -> tuple[SsdTier, dict[Key, int]]:
    """A small tier, recovered, and where its records lie. Fails if a key is found twice or before its parent."""
    tier = SsdTier(directory, **{"capacity_bytes": 8 << 20, "segment_file_bytes": 256 << 10, **settings})  # type: ignore[arg-type]
    found: dict[Key, int] = {}
    ends: list[int] = []
    for entry, location in tier.recover():
        assert entry.key not in found, "found twice"
        found[entry.key] = location
        ends.append(entry.position_end)
    assert ends == sorted(ends)
    return tier, found


def readable(tier: SsdTier, found: dict[Key, int], numbers: dict[Key, int]) -> set[int]:
    """Numbers of the payloads that can be read; fails if one differs from what it should be."""
    keys = list(found)
    made = {key: item(numbers[key]) for key in keys}
    reads = [Read(found[key], made[key][0].size_bytes, made[key][0].checksum) for key in keys]
    good = set()
    for key, result in zip(keys, tier.read_many(reads), strict=True):
        if isinstance(result, bytes):
            assert result == made[key][1]
            good.add(numbers[key])
    return good


def segment_files(directory: Path) -> list[Path]:
    """The tier's segment files, oldest first."""
    return sorted(directory.glob("*.segment"))


def pages_with(path: Path, magic: bytes) -> Iterator[int]:
    """Offsets of the pages of a file that begin with `magic`."""
    data = path.read_bytes()
    for offset in range(0, len(data), 4096):
        if data[offset : offset + len(magic)] == magic:
            yield offset


def _digest(chain: int, depth: int) -> bytes:
    return hashlib.sha256(f"{chain}.{depth}".encode()).digest()
