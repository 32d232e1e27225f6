"""One node's memory: the index, the bytes, the exports of leases and the events, kept in step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from shoal.common.v1 import kv_transport_pb2 as transport_pb
from shoal_common.errors import OutOfCapacity
from shoal_common.kv_transport import ArenaFull, Export, ExportTable, RunSpec

from shoal_kv_cache.core.changes import Changes
from shoal_kv_cache.core.entries import BLOCK_TOKENS, Entry, Form, Group, Key, Kind
from shoal_kv_cache.core.flush_epochs import FlushEpochs
from shoal_kv_cache.core.found import Found, FoundSnapshot
from shoal_kv_cache.core.in_memory import InMemory
from shoal_kv_cache.core.index import Index, Outcome
from shoal_kv_cache.events import EventStream
from shoal_kv_cache.fills import Fills
from shoal_kv_cache.tier_counts import TierCounts
from shoal_kv_cache.tiers.ram import RamTier

PAYLOAD_KIND = {Kind.BLOCK: transport_pb.PAYLOAD_KIND_BLOCK, Kind.SNAPSHOT: transport_pb.PAYLOAD_KIND_ENCODER_WINDOW}
KIND = {payload_kind: kind for kind, payload_kind in PAYLOAD_KIND.items()}
_EVICT_BYTES = 8 << 20
_EVICT_AT_ONCE = 64
"""Entries that go when the table is full: one at a time would make every put pay for a search."""


@dataclass(slots=True)
class Counts:
    """Totals since the start."""

    acquire_count: int = 0
    hit_count: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    evicted_count: int = 0
    corrupt_count: int = 0


@dataclass(frozen=True, slots=True)
class Offered:
    """A lease as its owner sees it: how to pull what it pins."""

    grant: transport_pb.TransportGrant
    runs: tuple[transport_pb.PayloadRun, ...]


class Store:
    """Everything a node does to its memory. One event loop owns it; time is an argument.

    Every operation settles what it changed before it returns: freed slabs are back in the arena, copies on disk that
    count no more are given to `forget_on_disk`, and the events are queued.
    """

    def __init__(
        self,
        index: Index,
        ram: RamTier,
        exports: ExportTable,
        events: EventStream,
        *,
        forget_on_disk: Callable[[Sequence[tuple[Key, int]]], None] = lambda freed: None,
    ) -> None:
        self.index, self.ram, self.exports, self.events = index, ram, exports, events
        self.counts, self.ram_counts = Counts(), TierCounts()
        self.epochs = FlushEpochs()
        self.fills = Fills(ram, exports)
        self._forget_on_disk = forget_on_disk
        self._exported: dict[str, Export] = {}

    def settle(self, changes: Changes) -> None:
        """Carries out what the index asks for."""
        if changes.freed_slabs:
            self.ram.free(changes.freed_slabs)
        if changes.freed_ssd:
            self._forget_on_disk(changes.freed_ssd)
        self.events.emit(changes, is_empty=not len(self.index))

    # Leases

    def pin(
        self,
        lease_id: str,
        owner_id: str,
        ends_at_s: float,
        found: Found | InMemory,
        block_count: int,
        last: FoundSnapshot | None,
    ) -> None:
        """Keeps a prefix where it is, right after it was found. Raises TooManyLeases."""
        if block_count or last is not None:
            self.index.pin(lease_id, owner_id, ends_at_s, found, block_count=block_count, snapshot=last)

    def offer(
        self,
        lease_id: str,
        found: Found | InMemory,
        block_count: int,
        last: FoundSnapshot | None,
        offer: transport_pb.TransportOffer,
    ) -> Offered:
        """Exports what a lease pins, all of it in memory. Raises ResourceExhausted (TOO_MANY_EXPORTS)."""
        export = self.exports.open(offer)
        runs = []
        if block_count:
            assert found.form is not None
            runs.append(
                export.add_run(
                    _spec(found.group, Kind.BLOCK, found.form, found.first_index * BLOCK_TOKENS),
                    *found.columns(block_count),
                )
            )
        if last is not None:
            assert last.slab is not None
            spec = _spec(found.group, Kind.SNAPSHOT, last.form, last.position_end - last.form.positions)
            runs.append(export.add_run(spec, [last.checksum], [last.slab]))
        self._exported[lease_id] = export
        self.ram_counts.read(export.size_bytes)
        return Offered(export.grant, tuple(runs))

    def release(self, lease_id: str) -> None:
        """Unpins; unknown leases are fine."""
        changes = Changes()
        self.index.release(lease_id, changes)
        self._end_exports([lease_id])
        self.settle(changes)

    def expire(self, now_s: float) -> list[str]:
        """Ends the leases whose time is over; returns their ids."""
        changes = Changes()
        ended = self.index.expire(now_s, changes)
        if not ended:
            return []
        self._end_exports(ended)
        self.settle(changes)
        return ended

    def release_owner(self, owner_id: str) -> list[str]:
        """Ends the leases of a dead instance; returns their ids."""
        changes = Changes()
        ended = self.index.release_owner(owner_id, changes)
        self._end_exports(ended)
        self.settle(changes)
        return ended

    # Bytes

    def allocate(self, sizes: Sequence[int], tenant_tag: bytes) -> list[int]:
        """Slabs for payloads of these sizes, evicting what can go. Raises OutOfCapacity, then nothing is held."""
        self.fills.retry()
        lacking = self.ram.lacking_bytes(sizes)
        while lacking:
            changes = Changes()
            # Some more at once: a search for every block of a put would cost more than what it finds.
            wanted = max(lacking, min(_EVICT_BYTES, self.ram.capacity_bytes // 64))
            freed = self.index.evict_ram(wanted, changes, tenant_tag=tenant_tag)
            if not freed:
                # So much may be more than the tenant's quota has left.
                freed = self.index.evict_ram(lacking, changes, tenant_tag=tenant_tag)
            self.counts.evicted_count += len(changes.freed_slabs)
            self.settle(changes)
            lacking = self.ram.lacking_bytes(sizes) if freed else 0
        taken: list[int] = []
        try:
            taken.extend(self.ram.arena.allocate(size) for size in sizes)
        except ArenaFull as error:
            self.ram.free(taken)
            message = f"everything held is pinned, or within the quotas of others: {error.message}"
            raise OutOfCapacity(message, reason="OUT_OF_SPACE") from error
        return taken

    # Entries

    def commit(self, entries: Sequence[Entry], slabs: Sequence[int]) -> list[Outcome]:
        """Makes filled payloads of one group visible in one step; slabs that are not taken are freed.

        Raises OutOfCapacity where the table is full of what is pinned, then all slabs are freed.
        """
        if not self._make_entries(len(entries), entries):
            self.ram.free(slabs)
            raise OutOfCapacity(f"the table is full: {len(self.index)} entries", reason="OUT_OF_SPACE")
        changes = Changes()
        outcomes = self.index.store(entries, slabs, changes)
        self.settle(changes)
        stored = (entry for entry, outcome in zip(entries, outcomes, strict=True) if outcome is Outcome.STORED)
        self.ram_counts.wrote(sum(entry.size_bytes for entry in stored))
        return outcomes

    def drop_damaged(self, copies: Iterable[tuple[Entry, int]]) -> int:
        """Checks copies in memory, by their first slabs; those that are not what they should be go. Returns how many.

        With one that has no copy on disk what stands on it goes too.
        """
        damaged_count = 0
        for entry, slab in copies:
            if self.ram.arena.checksum(slab, entry.size_bytes) == entry.checksum:
                continue
            changes = Changes()
            # One that moved or went meanwhile is not damaged.
            if self.index.lose_slab(entry.key, slab, changes):
                damaged_count += 1
            self.settle(changes)
        self.counts.corrupt_count += damaged_count
        return damaged_count

    def _make_entries(self, count: int, entries: Sequence[Entry]) -> bool:
        while self.index.free_entries < count:
            changes = Changes()
            size = _EVICT_AT_ONCE * max(entry.size_bytes for entry in entries)
            # An entry goes with its last copy: disk first, since memory alone would leave most of them in the table.
            tenant_tag = entries[0].group.tenant_tag
            self.index.evict_ssd(size, changes, tenant_tag=tenant_tag)
            self.index.evict_ram(size, changes, tenant_tag=tenant_tag)
            self.counts.evicted_count += len(changes.removed)
            self.settle(changes)
            if not changes.removed and not changes.freed_slabs:
                return False
        return True

    def _end_exports(self, lease_ids: Sequence[str]) -> None:
        for lease_id in lease_ids:
            export = self._exported.pop(lease_id, None)
            if export is not None:
                self.exports.close(export)


def _spec(group: Group, kind: Kind, form: Form, position_begin: int) -> RunSpec:
    return RunSpec(
        kind=PAYLOAD_KIND[kind],
        position_begin=position_begin,
        positions=form.positions,
        shape=form.shape,
        dtype=form.dtype,
        kv_id=group.kv_id,
    )
