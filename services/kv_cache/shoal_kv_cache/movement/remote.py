"""The store outside of the mesh: write-back to it, and loading from it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from shoal_common.errors import ChecksumMismatch, MeshError
from shoal_common.kv_transport.buffers import Buffer

from shoal_kv_cache.core.entries import SEGMENT_BLOCKS, Entry, Group, Key, Kind
from shoal_kv_cache.core.load_rate import LoadRate
from shoal_kv_cache.core.prefix_plan import Level
from shoal_kv_cache.movement.background import Item
from shoal_kv_cache.movement.sources import Look, Sighting
from shoal_kv_cache.payload_checks import MAX_PAYLOAD_BYTES
from shoal_kv_cache.store import Store
from shoal_kv_cache.tier_counts import TierCounts
from shoal_kv_cache.tiers.remote import Loaded, RemoteStore

logger = logging.getLogger(__name__)

_LOAD_BLOCKS = 64


class RemoteSource:
    """Looks segment by segment, as far as the store has whole ones. See Source."""

    level = Level.REMOTE
    is_there = True

    def __init__(
        self,
        remote: RemoteStore,
        counts: TierCounts,
        *,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.remote, self.counts, self.clock = remote, counts, clock
        self.rate = LoadRate(bytes_per_s=3e8, latency_s=0.005)
        self._timeout_s = timeout_s

    async def look(self, look: Look) -> Sighting | None:
        """See Source."""
        blocks: set[int] = set()
        snapshots: set[int] = set()
        give_up_s = self.clock() + min(look.timeout_s, self._timeout_s)
        begin = look.begin
        try:
            while begin < look.last and (left_s := give_up_s - self.clock()) > 0:
                end = min(look.last, begin + SEGMENT_BLOCKS)
                hashes = [look.hash_of(index) for index in range(begin, end)]
                keys = [Key(Kind.BLOCK, one) for one in hashes]
                if not look.blocks_only:
                    keys += [Key(Kind.SNAPSHOT, one) for one in hashes]
                found = await self.remote.exists_many(look.group, keys, timeout_s=left_s)
                blocks.update(index for index in range(begin, end) if found[index - begin])
                if not look.blocks_only:
                    rest = found[len(hashes) :]
                    snapshots.update(index for index in range(begin, end) if rest[index - begin])
                if not all(found[: len(hashes)]):
                    break
                begin = end
        except MeshError as error:
            self.counts.failed(error.reason)
            logger.info("remote store failed", extra={"reason": error.reason, "error": error.message})
        return RemoteSighting(self, look, blocks, snapshots) if blocks or snapshots else None


class RemoteSighting:
    """What the store said it has; nothing is pinned there. See Sighting."""

    def __init__(self, source: RemoteSource, look: Look, blocks: set[int], snapshots: set[int]) -> None:
        self._source, self._look = source, look
        self.blocks, self.snapshots = blocks, snapshots

    async def load(
        self, blocks: Sequence[int], snapshot: int | None, *, timeout_s: float
    ) -> list[tuple[Entry, Buffer]]:
        """See Sighting."""
        keys = [Key(Kind.BLOCK, self._look.hash_of(index)) for index in blocks]
        if snapshot is not None:
            # First: without it the blocks above the last snapshot here are of little use.
            keys.insert(0, Key(Kind.SNAPSHOT, self._look.hash_of(snapshot)))
        give_up_s = self._source.clock() + timeout_s
        loaded: list[tuple[Entry, Buffer]] = []
        for begin in range(0, len(keys), _LOAD_BLOCKS):
            left_s = give_up_s - self._source.clock()
            part = await self._load_part(keys[begin : begin + _LOAD_BLOCKS], left_s) if left_s > 0 else []
            loaded += part
            if not part:
                break
        return loaded

    async def close(self) -> None:
        """Nothing is held."""

    async def _load_part(self, keys: Sequence[Key], timeout_s: float) -> list[tuple[Entry, Buffer]]:
        source = self._source
        started_s = source.clock()
        try:
            found = await source.remote.get_many(
                self._look.group, keys, max_payload_bytes=MAX_PAYLOAD_BYTES, timeout_s=timeout_s
            )
        except MeshError as error:
            source.counts.failed(error.reason)
            logger.info("remote store failed", extra={"reason": error.reason, "error": error.message})
            return []
        loaded: list[tuple[Entry, Buffer]] = []
        for one in found:
            if isinstance(one, Loaded):
                loaded.append((one.entry, one.payload))
            elif isinstance(one, ChecksumMismatch):
                source.counts.failed(one.reason)
                logger.warning("payload of the remote store dropped", extra={"error": one.message})
        size_bytes = sum(entry.size_bytes for entry, _ in loaded)
        if size_bytes:
            source.rate.observed(size_bytes, source.clock() - started_s)
            source.counts.read(size_bytes)
        return loaded


class RemoteSink:
    """Writes entries to the store. See Sink."""

    def __init__(self, store: Store, remote: RemoteStore, *, timeout_s: float) -> None:
        self._store, self._remote, self._timeout_s = store, remote, timeout_s

    async def write(self, items: Sequence[Item]) -> int:
        """See Sink."""
        batch: list[tuple[Entry, int]] = []
        for item in items:
            held = self._store.index.get(item.group, item.key)
            if held is not None and held.slab is not None:
                batch.append((held.entry, held.slab))
        if not batch:
            return 0
        begun = self._store.epochs.now
        slabs = [slab for _, slab in batch]
        self._store.ram.hold(slabs)
        try:
            arena = self._store.ram.arena
            payloads = [(entry, _joined(arena.views(slab, entry.size_bytes))) for entry, slab in batch]
            await self._remote.put_many(payloads, timeout_s=self._timeout_s)
        finally:
            self._store.ram.let_go(slabs)
        await self._undo_stale([entry for entry, _ in batch], begun)
        return sum(entry.size_bytes for entry, _ in batch)

    async def _undo_stale(self, entries: Sequence[Entry], begun: int) -> None:
        """What was flushed while it was on its way."""
        stale: dict[Group, list[Key]] = {}
        for entry in entries:
            if self._store.epochs.is_stale(begun, entry.group.kv_id, entry.group.tenant_tag):
                stale.setdefault(entry.group, []).append(entry.key)
        for group, keys in stale.items():
            await self._remote.delete_many(group, keys, timeout_s=self._timeout_s)


def _joined(views: Sequence[memoryview]) -> Buffer:
    return views[0] if len(views) == 1 else b"".join(views)
