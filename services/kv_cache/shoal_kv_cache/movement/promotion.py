"""Copies from slower places into memory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from shoal_common.errors import ChecksumMismatch, MeshError, NotFound, OutOfCapacity
from shoal_common.kv_transport.buffers import Buffer

from shoal_kv_cache.core.changes import Changes
from shoal_kv_cache.core.entries import Entry, Group, Key
from shoal_kv_cache.core.index import Outcome
from shoal_kv_cache.movement.ssd import Disk
from shoal_kv_cache.store import Store
from shoal_kv_cache.tiers.ssd import Read

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 16 << 20
_CHUNKS_AT_ONCE = 4
_COPY_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class OnDisk:
    """A copy on disk that is to be read into memory."""

    key: Key
    location: int
    size_bytes: int
    checksum: int


class Promoter:
    """Reads from disk into slabs, and stores what came from elsewhere.

    A read goes on to its end when its caller gives up: the disk writes into the slabs meanwhile. Belongs to one event
    loop.
    """

    def __init__(self, store: Store, disk: Disk | None) -> None:
        self._store, self._disk = store, disk
        self._running: set[asyncio.Task[Any]] = set()
        self._limit = asyncio.Semaphore(_CHUNKS_AT_ONCE)

    async def from_disk(self, group: Group, wanted: Sequence[OnDisk], *, timeout_s: float) -> None:
        """Copies what can be had in time into memory; damaged copies are dropped. Never raises MeshError."""
        if self._disk is None or not wanted:
            return
        self._store.ram.fit_to(min(one.size_bytes for one in wanted))
        begun: set[asyncio.Task[Any]] = set()
        chunks = [self._spawn(self._read_chunk(self._disk, group, chunk, begun)) for chunk in _chunks(wanted)]
        try:
            done, _ = await asyncio.wait(chunks, timeout=timeout_s)
            if not done:
                self._disk.rest()
        finally:
            # What the disk writes into goes on; what waits for its turn would pile up behind a disk that hangs.
            for task in set(chunks) - begun:
                task.cancel()

    async def store_loaded(self, loaded: Sequence[tuple[Entry, Buffer]], *, begun: int) -> list[Entry]:
        """Makes payloads of one group from elsewhere visible here, as far as there is room; returns what is new.

        begun: flush number at the begin of the load. The payloads are verified.
        """
        if not loaded:
            return []
        group = loaded[0][0].group
        self._store.ram.fit_to(min(entry.size_bytes for entry, _ in loaded))
        entries: list[Entry] = []
        slabs: list[int] = []
        copied_bytes = 0
        try:
            for entry, data in loaded:
                slabs += self._store.allocate([entry.size_bytes], group.tenant_tag)
                self._store.ram.arena.write(slabs[-1], 0, data)
                entries.append(entry)
                copied_bytes += entry.size_bytes
                if copied_bytes > _COPY_BYTES:
                    # Others get their turn.
                    copied_bytes = 0
                    await asyncio.sleep(0)
        except OutOfCapacity:
            logger.info("no room for all that was loaded", extra={"kept": len(entries), "of": len(loaded)})
        except BaseException:
            self._store.ram.free(slabs)
            raise
        if self._store.epochs.is_stale(begun, group.kv_id, group.tenant_tag):
            self._store.ram.free(slabs)
            return []
        try:
            outcomes = self._store.commit(entries, slabs) if entries else []
        except OutOfCapacity as error:
            logger.info("nothing of what was loaded is kept", extra={"error": error.message})
            return []
        return [entry for entry, outcome in zip(entries, outcomes, strict=True) if outcome is Outcome.STORED]

    async def close(self) -> None:
        """Waits for reads that are on their way."""
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _read_chunk(
        self, disk: Disk, group: Group, chunk: Sequence[OnDisk], begun: set[asyncio.Task[Any]]
    ) -> None:
        async with self._limit:
            task = asyncio.current_task()
            assert task is not None
            begun.add(task)
            try:
                slabs = self._store.allocate([one.size_bytes for one in chunk], group.tenant_tag)
            except OutOfCapacity:
                return
            arena = self._store.ram.arena
            reads = [
                Read(one.location, one.size_bytes, one.checksum, into=arena.views(slab, one.size_bytes))
                for one, slab in zip(chunk, slabs, strict=True)
            ]
            results = await disk.read(reads)
            for one, slab, result in zip(chunk, slabs, results, strict=True):
                self._take(group, one, slab, result)

    def _take(self, group: Group, one: OnDisk, slab: int, result: bytes | MeshError | None) -> None:
        changes = Changes()
        held = self._store.index.get(group, one.key)
        if isinstance(result, MeshError):
            changes.freed_slabs.append(slab)
            if isinstance(result, (ChecksumMismatch, NotFound)):
                self._store.index.lose_location(one.key, one.location, changes)
                self._store.counts.corrupt_count += 1
                logger.warning("copy on disk dropped", extra={"reason": result.reason, "error": result.message})
        elif held is None or (held.entry.size_bytes, held.entry.checksum) != (one.size_bytes, one.checksum):
            # Gone, or stored anew with other bytes, while this was read.
            changes.freed_slabs.append(slab)
        else:
            self._store.index.set_slab(held.entry, slab, changes)
        self._store.settle(changes)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task


def _chunks(wanted: Sequence[OnDisk]) -> list[list[OnDisk]]:
    chunks: list[list[OnDisk]] = [[]]
    size = 0
    for one in wanted:
        if size + one.size_bytes > _CHUNK_BYTES and chunks[-1]:
            chunks.append([])
            size = 0
        chunks[-1].append(one)
        size += one.size_bytes
    return chunks
