"""The objects of one node, wired, and the tasks that run beside its calls."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from shoal_common.bus import Bus
from shoal_common.errors import MeshError
from shoal_common.kv_transport import ExportTable, KvPuller, TransferEngine
from shoal_common.presence import Presence
from shoal_common.rpc import Channels

from shoal_kv_cache.acquires import Acquirer
from shoal_kv_cache.cluster.flush_sync import FlushSync
from shoal_kv_cache.cluster.forwarder import PeerSink, SegmentNames
from shoal_kv_cache.cluster.members import Members
from shoal_kv_cache.cluster.peer_source import PeerSource
from shoal_kv_cache.cluster.reports import Reporter
from shoal_kv_cache.config import KvCacheConfig
from shoal_kv_cache.core.changes import Changes
from shoal_kv_cache.core.entries import Entry, Group, Key
from shoal_kv_cache.core.index import Index
from shoal_kv_cache.core.leases import Leases
from shoal_kv_cache.core.prefix_plan import Level
from shoal_kv_cache.events import EventStream
from shoal_kv_cache.flush import Flusher
from shoal_kv_cache.flush_file import FlushFile
from shoal_kv_cache.movement.background import Item, WriteBack
from shoal_kv_cache.movement.promotion import Promoter
from shoal_kv_cache.movement.remote import RemoteSink, RemoteSource
from shoal_kv_cache.movement.sources import Source
from shoal_kv_cache.movement.ssd import DISK_BATCH_BYTES, Disk, SsdSink
from shoal_kv_cache.puts import Puts
from shoal_kv_cache.stats import NodeStats
from shoal_kv_cache.store import Store
from shoal_kv_cache.tier_counts import TierCounts
from shoal_kv_cache.tiers.ram import RamTier, open_arena
from shoal_kv_cache.tiers.remote import RemoteStore
from shoal_kv_cache.tiers.ssd import SsdTier
from shoal_kv_cache.verify import Verifier

logger = logging.getLogger(__name__)

_EXPIRY_PERIOD_S = 1.0
_REPORT_TIMEOUT_S = 1.0


class Node:
    """One node. Made and used on one event loop: `start`, serve, `stop`."""

    def __init__(
        self,
        config: KvCacheConfig,
        bus: Bus,
        *,
        mesh: str,
        instance_id: str,
        node_id: str,
        ssd: SsdTier | None = None,
        remote: RemoteStore | None = None,
        stream_address: Callable[[], str] = lambda: "",
        call_socket: Callable[[], str] = lambda: "",
        engines: Sequence[TransferEngine] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.node_id, self._clock, self._remote = node_id, clock, remote
        self._is_durable = ssd is not None and config.ssd_fsync == "always"
        self.channels, self._puller = Channels(), KvPuller(engines=engines)
        arena = open_arena(config.ram_bytes, config.slab_bytes)
        self.exports = ExportTable(
            arena,
            max_exports=config.max_leases,
            stream_address=stream_address,
            call_socket=call_socket,
            engines=engines,
        )
        self.events = EventStream(bus, mesh=mesh, instance_id=instance_id)
        index = Index(Leases(max_leases=config.max_leases), max_entries=config.max_entries, quotas=config.quotas())
        self.disk: Disk | None = None
        self.store = Store(
            index,
            RamTier(arena),
            self.exports,
            self.events,
            forget_on_disk=lambda freed: self.disk.forget(freed) if self.disk is not None else None,
        )
        self.counts = {Level.RAM: self.store.ram_counts}
        self._to_disk: WriteBack | None = None
        if ssd is not None:
            self._add_disk(ssd, config)
        self.members = Members(node_id=node_id, instance_id=instance_id, copies=config.copies)
        peers = PeerSource(
            self.members,
            self.channels,
            self._puller,
            self._counts_of(Level.PEERS),
            instance_id=instance_id,
            timeout_s=config.peer_timeout_s,
        )
        self._names = SegmentNames(self.store)
        self._to_peers = WriteBack(
            PeerSink(
                self.store,
                self.members,
                self._names,
                self.channels,
                instance_id=instance_id,
                timeout_s=config.put_timeout_s,
            ),
            self._counts_of(Level.PEERS),
            name="peers",
            max_queued_bytes=config.queue_bytes,
            bytes_per_s=config.peer_bytes_per_s,
        )
        sources: list[Source] = [peers]
        self._to_remote: WriteBack | None = None
        if remote is not None:
            counts = self._counts_of(Level.REMOTE)
            sources.append(RemoteSource(remote, counts, timeout_s=config.remote_timeout_s))
            self._to_remote = WriteBack(
                RemoteSink(self.store, remote, timeout_s=config.put_timeout_s),
                counts,
                name="remote",
                max_queued_bytes=config.queue_bytes,
                bytes_per_s=config.remote_write_bytes_per_s,
            )
        self._promoter = Promoter(self.store, self.disk)
        self.acquirer = Acquirer(
            self.store,
            self._promoter,
            sources,
            disk=self.disk,
            max_loads=config.max_loads,
            on_filled=self._filled,
            clock=clock,
        )
        self.puts = Puts(self.store, self._stored)
        self.flusher = Flusher(
            self.store,
            writers=self._writers,
            disk=self.disk,
            remote=remote,
            file=FlushFile(ssd.directory) if ssd is not None else None,
        )
        self.flushes = FlushSync(self.flusher, self.members, self.channels, timeout_s=config.peer_timeout_s)
        self.verifier = Verifier(self.store, self.disk)
        self._reporter = Reporter(self.members, self._names, self.channels)
        self.stats = NodeStats(
            self.store,
            self.counts,
            node_id=node_id,
            ssd_capacity_bytes=lambda: ssd.stats().capacity_bytes if ssd is not None else 0,
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def recover(self) -> int:
        """Takes over what the disk has, before anything is served; returns how many entries that are."""
        disk, changes = self.disk, Changes()
        if disk is None:
            return 0
        too_many: list[tuple[Key, int]] = []

        def fitting() -> Iterator[tuple[Entry, int]]:
            for entry, location in disk.tier.recover():
                # A root may take a row too.
                if self.store.index.free_entries > 2:
                    yield entry, location
                else:
                    too_many.append((entry.key, location))

        count = await disk.call(lambda: self.store.index.recover(fitting(), changes))
        if too_many:
            logger.warning("the table is too small for the disk", extra={"dropped": len(too_many), "kept": count})
            disk.forget(too_many)
        # Nobody knows of anything yet: whoever asks gets the list. What is gone was never told of.
        disk.forget(changes.freed_ssd)
        self.store.ram.free(changes.freed_slabs)
        return count

    def start(self) -> None:
        """Begins the background work."""
        work: list[Coroutine[Any, Any, None]] = [self.events.run(), self._expire_for_ever(), self.flushes.run()]
        work += [writer.run() for writer in self._writers]
        if self.disk is not None:
            work.append(self.disk.tend(self.store))
        self._tasks = [asyncio.create_task(one) for one in work]

    async def write_out(self) -> None:
        """Waits until what is queued for slower tiers has arrived. Give it a deadline."""
        await asyncio.gather(*(writer.idle() for writer in self._writers))

    async def stop(self) -> None:
        """Ends the background work and lets go of everything."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.flushes.close()
        await self._promoter.close()
        if self.disk is not None:
            await self.disk.close()
        if self._remote is not None:
            await self._remote.close()
        self._puller.close()
        await self.channels.close()
        self.store.ram.arena.close()

    def up(self, presence: Presence) -> None:
        """An instance announces itself, or says something new."""
        peer = self.members.up(presence)
        if peer is not None:
            self.flushes.peer_up(peer)

    def down(self, instance_id: str) -> None:
        """An instance is gone."""
        self.acquirer.release_owner(instance_id)
        self.members.down(instance_id)

    @property
    def is_healthy(self) -> bool:
        """Whether all background work goes on; it ends by a bug only."""
        return not any(task.done() for task in self._tasks)

    def expire(self) -> None:
        """Ends the leases whose time is over, and takes memory back whose writers have ended."""
        self.acquirer.expire(self._clock())
        self.store.fills.retry()

    async def reported(self, group: Group, key: Key) -> None:
        """A reader found a payload damaged: copies here that are go, and where one did, the others are checked too."""
        held = self.store.index.get(group, key)
        if held is None:
            return
        name = self._names.of(held.entry)
        if not await self.verifier.check(held):
            logger.info("damage reported, not found", extra={"kind": key.kind.value})
            return
        if self._remote is not None:
            try:
                # Reading it checks it, and deletes what is damaged.
                await self._remote.get_many(
                    group, [key], max_payload_bytes=held.entry.size_bytes, timeout_s=_REPORT_TIMEOUT_S
                )
            except MeshError as error:
                self.counts[Level.REMOTE].failed(error.reason)
        if name is not None:
            await self._reporter.report(group, key, name)

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait for slower tiers and for other nodes."""
        return sum(writer.queued_bytes for writer in self._writers)

    @property
    def _writers(self) -> list[WriteBack]:
        return [one for one in (self._to_disk, self._to_remote, self._to_peers) if one is not None]

    def _counts_of(self, level: Level) -> TierCounts:
        return self.counts.setdefault(level, TierCounts())

    def _add_disk(self, ssd: SsdTier, config: KvCacheConfig) -> None:
        counts = self._counts_of(Level.SSD)
        self.disk = Disk(ssd, counts, threads=config.ssd_threads, read_bytes_per_s=config.ssd_read_bytes_per_s)
        self._to_disk = WriteBack(
            SsdSink(self.store, self.disk),
            counts,
            name="disk",
            max_queued_bytes=config.queue_bytes,
            bytes_per_s=config.ssd_write_bytes_per_s,
            batch_bytes=DISK_BATCH_BYTES,
        )

    async def _stored(self, entries: Sequence[Entry], is_from_peer: bool) -> None:
        """What a put made visible goes on to the slower tiers, parents first, and to the owners of its segments."""
        items = [(Item(entry.group, entry.key), entry.size_bytes) for entry in sorted(entries, key=_parents_first)]
        if not is_from_peer:
            for item, size_bytes in items if len(self.members) else ():
                self._to_peers.offer(item, size_bytes)
            for item, size_bytes in items if self._to_remote is not None else ():
                assert self._to_remote is not None
                self._to_remote.offer(item, size_bytes)
        if self._to_disk is None:
            return
        if self._is_durable:
            await self._to_disk.carry(items)
            return
        for item, size_bytes in items:
            self._to_disk.offer(item, size_bytes)

    def _filled(self, entries: Sequence[Entry]) -> None:
        """What came from elsewhere is written to this node's disk only where it is an owner, or alone."""
        if self._to_disk is None:
            return
        for entry in sorted(entries, key=_parents_first):
            name = self._names.of(entry)
            if name is not None and self.node_id in self.members.owners(name):
                self._to_disk.offer(Item(entry.group, entry.key), entry.size_bytes)

    async def _expire_for_ever(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRY_PERIOD_S)
            self.expire()
            self.stats.refresh()


def _parents_first(entry: Entry) -> tuple[int, str]:
    # A block before the snapshot at its end: "block" < "snapshot".
    return entry.position_end, entry.key.kind.value
