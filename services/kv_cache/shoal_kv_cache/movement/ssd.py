"""The disk beside the event loop: write-back, removal, compaction, and reading back into memory."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from shoal_common.errors import ChecksumMismatch, MeshError, NotFound

from shoal_kv_cache.core.changes import Changes
from shoal_kv_cache.core.entries import Entry, Key, Kind
from shoal_kv_cache.core.load_rate import LoadRate
from shoal_kv_cache.core.segments import is_first_of_segment
from shoal_kv_cache.core.token_bucket import TokenBucket
from shoal_kv_cache.movement.background import Item
from shoal_kv_cache.store import Store
from shoal_kv_cache.tier_counts import TierCounts
from shoal_kv_cache.tiers.ssd import Read, SsdFull, SsdTier

logger = logging.getLogger(__name__)

T = TypeVar("T")

DISK_BATCH_BYTES = 32 << 20
"""The disk is idle from the end of one batch to the begin of the next: a millisecond, which is little beside these."""
_COMPACT_BYTES = 32 << 20
_LOOK_S = 1.0
_BURST_S = 0.25
_REST_S = 5.0
_BATCH_REMOVALS = 4096
_PAGE_BYTES = 4096
"""The disk tier rounds payloads up to these."""


class Disk:
    """Calls of the disk tier on a small pool of threads, and what is to be removed from it.

    Belongs to one event loop. What is to be removed waits in a list that the index bounds: nothing is in it twice.
    """

    def __init__(
        self,
        tier: SsdTier,
        counts: TierCounts,
        *,
        threads: int,
        read_bytes_per_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tier, self.counts = tier, counts
        self.rate = LoadRate(bytes_per_s=1e9, latency_s=0.001)
        self._clock = clock
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="ssd")
        self._bucket = TokenBucket(read_bytes_per_s, burst_bytes=read_bytes_per_s * _BURST_S, now_s=clock())
        self._to_remove: list[tuple[Key, int]] = []
        self._wake = asyncio.Event()
        self._removing = asyncio.Lock()
        self._rest_until_s = 0.0

    @property
    def is_resting(self) -> bool:
        """Whether reads failed just now: every prompt would wait for the disk's timeout."""
        return self._clock() < self._rest_until_s

    def rest(self) -> None:
        """Nothing is read for a while; the callers compute."""
        self._rest_until_s = self._clock() + _REST_S

    async def call(self, work: Callable[[], T]) -> T:
        """Runs `work` on a thread of the pool. Not cut short: a write that began ends."""
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._threads, work))

    async def read(self, reads: Sequence[Read]) -> list[bytes | MeshError | None]:
        """Payloads, each verified, or what went wrong with it; counted and within the limit."""
        size_bytes = sum(one.size_bytes for one in reads)
        await asyncio.sleep(self._bucket.take(size_bytes, self._clock()))
        started_s = self._clock()
        results = await self.call(lambda: self.tier.read_many(reads))
        good = sum(one.size_bytes for one, result in zip(reads, results, strict=True) if not _is_error(result))
        if good:
            self.rate.observed(good, self._clock() - started_s)
            self.counts.read(good)
        for result in results:
            if isinstance(result, MeshError):
                self.counts.failed(result.reason)
                if not isinstance(result, (ChecksumMismatch, NotFound)):
                    self.rest()
        return results

    def forget(self, freed: Sequence[tuple[Key, int]]) -> None:
        """Copies that count no more: removed soon."""
        self._to_remove.extend(freed)
        self._wake.set()

    async def remove_all(self) -> None:
        """Removes what is to be removed by now. Raises MeshError where that is not durable."""
        async with self._removing:
            while self._to_remove:
                batch = self._to_remove[:_BATCH_REMOVALS]
                await self.call(lambda batch=batch: self.tier.remove(batch))  # type: ignore[misc]
                # Only now: what is not durably removed would be back after a restart.
                del self._to_remove[: len(batch)]

    async def sync(self) -> None:
        """Makes everything durable. Raises MeshError."""
        await self.call(self.tier.sync)

    async def tend(self, store: Store) -> None:
        """Removes and compacts in the background, for ever."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), _LOOK_S)
            self._wake.clear()
            try:
                await self.remove_all()
                # What a round before could not finish.
                await self.call(self.tier.retire)
                while self.tier.wants_compaction:
                    await self.compact(store)
            except MeshError as error:
                if self.counts.failing_reason != error.reason:
                    logger.warning("disk not tended", extra={"reason": error.reason, "error": error.message})
                self.counts.failed(error.reason)
                await asyncio.sleep(_LOOK_S)

    async def close(self) -> None:
        """Ends the tier and its threads."""
        await self.call(self.tier.close)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def compact(self, store: Store) -> None:
        """One round of compaction: copies, switches, deletes. Raises MeshError."""
        moved = await self.call(lambda: self.tier.compact(_COMPACT_BYTES))
        stale: list[tuple[Key, int]] = []
        for one in moved:
            if one.new_location is None:
                changes = Changes()
                store.index.lose_location(one.key, one.old_location, changes)
                store.counts.corrupt_count += 1
                store.settle(changes)
            elif not store.index.move(one.key, one.old_location, one.new_location):
                stale.append((one.key, one.new_location))
        self.forget(stale)
        await self.call(self.tier.retire)
        # Others get their turn between two rounds.
        await asyncio.sleep(0)


class SsdSink:
    """Writes entries to disk, parents first. Invariant: what is on disk is prefix-closed per segment by itself, so that
    a restart finds no orphans."""

    def __init__(self, store: Store, disk: Disk) -> None:
        self._store, self._disk = store, disk

    async def write(self, items: Sequence[Item]) -> int:
        """See Sink."""
        chosen: dict[Item, tuple[Entry, int]] = {}
        for item in items:
            self._choose(item, chosen)
        if not chosen:
            return 0
        begun = self._store.epochs.now
        slabs = [slab for _, slab in chosen.values()]
        self._store.ram.hold(slabs)
        try:
            locations = await self._append(list(chosen.values()))
        except ChecksumMismatch:
            # Damaged in memory since it was put: it goes, the others are written, and whoever waits for it hears of it.
            if self._store.drop_damaged(chosen.values()):
                await self.write(items)
            raise
        finally:
            self._store.ram.let_go(slabs)
        changes = Changes()
        for (item, (entry, _)), location in zip(chosen.items(), locations, strict=True):
            if self._store.epochs.is_stale(begun, item.group.kv_id, item.group.tenant_tag):
                changes.freed_ssd.append((entry.key, location))
            else:
                self._store.index.set_location(entry, location, changes)
        self._store.settle(changes)
        return sum(entry.size_bytes for entry, _ in chosen.values())

    def _choose(self, item: Item, chosen: dict[Item, tuple[Entry, int]]) -> None:
        """Adds an entry that is in memory alone, after those that it stands on."""
        path: list[tuple[Item, tuple[Entry, int]]] = []
        at: Item | None = item
        while at is not None and at not in chosen:
            held = self._store.index.get(at.group, at.key)
            if held is None or held.location is not None or held.slab is None:
                break
            path.append((at, (held.entry, held.slab)))
            at = _parent(at, held.entry)
        chosen.update(reversed(path))

    async def _append(self, batch: Sequence[tuple[Entry, int]]) -> list[int]:
        arena = self._store.ram.arena
        items = [(entry, _joined(arena.views(slab, entry.size_bytes))) for entry, slab in batch]
        size_bytes = sum(entry.size_bytes for entry, _ in batch)
        paged_bytes = sum(-(-entry.size_bytes // _PAGE_BYTES) * _PAGE_BYTES for entry, _ in batch)
        tenant_tag = batch[0][0].group.tenant_tag
        lacking_bytes = self._lacking(paged_bytes)
        while lacking_bytes > 0:
            # The index counts payloads, the tier whole pages: what goes is taken to be rounded up like what comes.
            await self._make_room(-(-lacking_bytes * size_bytes // paged_bytes), tenant_tag)
            before_bytes, lacking_bytes = lacking_bytes, self._lacking(paged_bytes)
            if lacking_bytes >= before_bytes:
                break
        try:
            return await self._disk.call(lambda: self._disk.tier.append(items))
        except SsdFull:
            # Files hold what was removed until they are compacted; what others write to this disk counts too.
            await self._make_room(2 * size_bytes, tenant_tag)
            while self._disk.tier.wants_compaction:
                await self._disk.compact(self._store)
            return await self._disk.call(lambda: self._disk.tier.append(items))

    def _lacking(self, paged_bytes: int) -> int:
        stats = self._disk.tier.stats()
        return stats.payload_bytes + paged_bytes - stats.capacity_bytes

    async def _make_room(self, size_bytes: int, tenant_tag: bytes) -> None:
        if size_bytes <= 0:
            return
        changes = Changes()
        self._store.index.evict_ssd(size_bytes, changes, tenant_tag=tenant_tag)
        self._store.counts.evicted_count += len(changes.removed)
        self._store.settle(changes)
        await self._disk.remove_all()


def _parent(item: Item, entry: Entry) -> Item | None:
    if item.key.kind is Kind.SNAPSHOT:
        return Item(item.group, Key(Kind.BLOCK, item.key.block_hash))
    if is_first_of_segment(entry.block_index):
        return None
    return Item(item.group, Key(Kind.BLOCK, entry.parent_hash))


def _joined(views: Sequence[memoryview]) -> memoryview | bytes:
    return views[0] if len(views) == 1 else b"".join(views)


def _is_error(result: object) -> bool:
    return isinstance(result, MeshError)
