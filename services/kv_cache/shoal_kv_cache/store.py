"""One node's memory: the index, the bytes, the exports of leases and the events, kept in step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.common.v1 import kv_transport_pb2 as transport_pb
from shoal_common.kv_transport import ArenaFull, Export, ExportTable, PayloadSpec

from shoal_kv_cache.core.changes import Changes
from shoal_kv_cache.core.entries import Entry, Key, Kind
from shoal_kv_cache.core.index import Acquisition, Index
from shoal_kv_cache.core.leases import Lease
from shoal_kv_cache.events import EventStream
from shoal_kv_cache.tiers.ram import RamTier

PAYLOAD_KIND = {Kind.BLOCK: transport_pb.PAYLOAD_KIND_BLOCK, Kind.SNAPSHOT: transport_pb.PAYLOAD_KIND_ENCODER_WINDOW}


@dataclass(frozen=True, slots=True)
class Counts:
    """Totals since the start."""

    acquire_count: int = 0
    hit_count: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    evicted_count: int = 0
    corrupt_count: int = 0


@dataclass(frozen=True, slots=True)
class Granted:
    """A lease and how to pull what it pins."""

    acquisition: Acquisition
    grant: transport_pb.TransportGrant
    payloads: tuple[transport_pb.Payload, ...]


class Store:
    """Everything a node does to its memory. One event loop owns it; time is an argument."""

    def __init__(self, index: Index, tier: RamTier, exports: ExportTable, events: EventStream) -> None:
        self.index, self.tier, self.events = index, tier, events
        self.counts = Counts()
        self._exports = exports
        self._granted: dict[str, tuple[Export, Granted]] = {}

    def acquire(
        self,
        *,
        lease_id: str,
        owner_id: str,
        kv_id: str,
        numerics_id: str,
        hashes: Sequence[bytes],
        max_hit_tokens: int,
        want_replay: bool,
        blocks_only: bool,
        ends_at_s: float,
        offer: transport_pb.TransportOffer,
    ) -> Granted:
        """Pins and offers the longest usable prefix. The same lease_id again gives the same answer."""
        repeated = self._granted.get(lease_id)
        if repeated is not None:
            return repeated[1]
        export = self._exports.open(offer)
        try:
            acquisition = self.index.acquire(
                lambda keys: Lease(lease_id, owner_id, keys, ends_at_s),
                hashes,
                kv_id=kv_id,
                numerics_id=numerics_id,
                max_hit_tokens=max_hit_tokens,
                want_replay=want_replay,
                blocks_only=blocks_only,
            )
            payloads = tuple(self._offer(export, entry) for entry in acquisition.entries)
        except BaseException:
            self._exports.close(export)
            self.release(lease_id)
            raise
        granted = Granted(acquisition, export.grant, payloads)
        if payloads:
            self._granted[lease_id] = (export, granted)
        else:
            self._exports.close(export)
        self._count_acquire(acquisition, len(hashes))
        return granted

    def release(self, lease_id: str) -> None:
        """Unpins; unknown leases are fine."""
        changes = Changes()
        self.index.release(lease_id, changes)
        self._end_exports([lease_id])
        self._settle(changes)

    def expire(self, now_s: float) -> None:
        """Ends the leases whose time is over."""
        changes = Changes()
        self._end_exports(self.index.expire(now_s, changes))
        self._settle(changes)

    def release_owner(self, owner_id: str) -> None:
        """Ends the leases of a dead instance."""
        changes = Changes()
        self._end_exports(self.index.release_owner(owner_id, changes))
        self._settle(changes)

    def make_room(self, data: bytes | bytearray) -> int:
        """Stores bytes, evicting what can go, and returns their location. Raises ArenaFull when nothing more can go."""
        while True:
            try:
                return self.tier.store(data)
            except ArenaFull:
                changes = Changes()
                if not self.index.evict(changes):
                    raise
                self._count(evicted_count=1)
                self._settle(changes)

    def commit(self, entries: Sequence[Entry]) -> int:
        """Makes stored payloads visible in one step; returns how many were new."""
        changes = Changes()
        stored_count = self.index.store(entries, changes)
        self._settle(changes)
        return stored_count

    def discard(self, entries: Sequence[Entry]) -> None:
        """Gives the room of payloads back that were never made visible."""
        for entry in entries:
            self.tier.free(entry.location, entry.size_bytes)

    def drop(self, keys: Sequence[Key], *, is_corrupt: bool = False) -> int:
        """Makes entries invisible; returns how many were visible."""
        changes = Changes()
        dropped_count = sum(self.index.drop(key, changes) for key in keys)
        if is_corrupt:
            self._count(corrupt_count=dropped_count)
        self._settle(changes)
        return dropped_count

    def _offer(self, export: Export, entry: Entry) -> transport_pb.Payload:
        spec = PayloadSpec(
            kind=PAYLOAD_KIND[entry.key.kind],
            position_begin=entry.position_begin,
            position_end=entry.position_end,
            shape=entry.shape,
            dtype=entry.dtype,
            kv_id=entry.kv_id,
            block_hash=entry.key.block_hash,
        )
        is_shared = export.grant.kind == transport_pb.TRANSPORT_KIND_SHM
        return export.add_held(
            spec,
            checksum=entry.checksum,
            load=lambda: self.tier.load(entry.location, entry.size_bytes),
            arena_offset=entry.location if is_shared else None,
        )

    def _settle(self, changes: Changes) -> None:
        for entry in changes.freed:
            self.tier.free(entry.location, entry.size_bytes)
        self.events.emit(changes)

    def _end_exports(self, lease_ids: Sequence[str]) -> None:
        for lease_id in lease_ids:
            export, _ = self._granted.pop(lease_id, (None, None))
            if export is not None:
                self._exports.close(export)

    def _count_acquire(self, acquisition: Acquisition, block_count: int) -> None:
        self._count(
            acquire_count=1,
            hit_count=int(acquisition.hit_tokens > 0),
            queried_tokens=block_count * 128,
            hit_tokens=acquisition.hit_tokens,
        )

    def _count(self, **more: int) -> None:
        values = {name: getattr(self.counts, name) + more.get(name, 0) for name in Counts.__dataclass_fields__}
        self.counts = Counts(**values)
