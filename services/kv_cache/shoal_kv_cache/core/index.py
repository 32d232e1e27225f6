"""The index of what one node holds, over its memory and its disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from shoal_kv_cache.core.changes import Changes
from shoal_kv_cache.core.entries import SEGMENT_BLOCKS, Entry, Form, Group, Key, Kind
from shoal_kv_cache.core.eviction import Evictor, Policy
from shoal_kv_cache.core.found import NO_SLAB, Found, FoundSnapshot
from shoal_kv_cache.core.groups import TierUse
from shoal_kv_cache.core.history import History
from shoal_kv_cache.core.holdings import Holdings
from shoal_kv_cache.core.leases import Lease, Leases
from shoal_kv_cache.core.lookup import Lookup
from shoal_kv_cache.core.quotas import Quotas
from shoal_kv_cache.core.results import Flushed, Held, Outcome, Usage
from shoal_kv_cache.core.reuse import ReuseSample
from shoal_kv_cache.core.storing import Storing
from shoal_kv_cache.core.table import NO_PLACE, PINNED, RAM, SNAPSHOT, SSD, VISIBLE, IndexFull
from shoal_kv_cache.core.worth import TokensPerByte

__all__ = ["Flushed", "Held", "Index", "IndexFull", "Outcome", "Usage"]


class Index:
    """Which entries are visible, where their copies lie, what is pinned and what goes next.

    Invariants: a visible block that is not first in its segment of 64 has a visible parent; a snapshot is visible only
    with its block; visible = a copy in memory or on disk; a slab or location is given out in `Changes` exactly once,
    and a slab only when no lease that was open when its entry went is open still.

    What the caller does, on one event loop:
    * settles `Changes` before its next await: slabs back to the arena, `freed_ssd` to the SSD tier, keys to the events;
    * looks up and pins in one go: `find`, decide by `Found.usable`, `pin`, and only then awaits loads. After the awaits
      it hands new copies over by `set_slab` and looks up again for its answer; entries may have been dropped meanwhile;
    * for a put, takes what is `missing`, holds the parents (`hold`), makes room (`evict_ram`, as often as it returns
      something), and stores when the bytes are there; `store` never evicts;
    * owns the bytes: the index does not know whether a slab's content is right, nor how many slabs are chained to it;
    * serialises a flush against puts that began before it (flush epoch): `store` takes what it is given.
    """

    def __init__(
        self,
        leases: Leases,
        *,
        max_entries: int,
        quotas: Quotas | None = None,
        snapshot_tokens: int = 2560,
        seed: int = 0,
        policy: Callable[[Holdings, History], Policy] | None = None,
    ) -> None:
        """Lays out tables for `max_entries` over memory and disk; they are touched as entries come.

        max_entries      rows at most, about 95 bytes each; a chain's root takes one too
        snapshot_tokens  rows that a warm replay runs for want of a snapshot (E x W): what a snapshot is worth
        seed             of the draws of candidates for eviction
        policy           what is worth keeping; None: tokens per byte, learned (`TokensPerByte`)
        """
        self.leases = leases
        self._quotas = quotas or Quotas()
        self._holdings = Holdings(leases, max_entries)
        self._table, self._groups = self._holdings.table, self._holdings.groups
        window = max_entries // 256
        self._history = History(self._table, window=window)
        self._reuse = ReuseSample(self._table, self._history, window=window)
        self._lookup = Lookup(self._holdings)
        self._storing = Storing(self._holdings, self._history, self._reuse)
        worth = (
            policy(self._holdings, self._history)
            if policy is not None
            else TokensPerByte(self._holdings, self._history, self._reuse.density, snapshot_tokens=snapshot_tokens)
        )
        self._evictors = tuple(Evictor(self._holdings, tier, worth, seed=seed + tier) for tier in (RAM, SSD))

    def __len__(self) -> int:
        """Visible entries."""
        return self._holdings.visible_count

    def __contains__(self, key: Key) -> bool:
        """Whether any group has it."""
        return bool(self._lookup.any_row(key))

    @property
    def free_entries(self) -> int:
        """How many more can be stored before something must be evicted for the table's sake."""
        return self._table.free_rows

    # Looking up

    def depth(self, group: Group, hashes: Sequence[bytes], first_index: int = 0) -> int:
        """Leading visible blocks of a chain whose first hash is of block `first_index`. Touches nothing."""
        reached = self._lookup.reach(group, hashes, first_index)
        return reached[-1][0] if reached else 0

    def find(self, group: Group, hashes: Sequence[bytes], first_index: int = 0) -> Found:
        """The same with every copy and every snapshot on the path. Touches nothing."""
        return self._lookup.find(group, hashes, first_index)

    def get(self, group: Group, key: Key) -> Held | None:
        """One visible entry."""
        row = self._lookup.row(self._lookup.number_of(group), key)
        return self._lookup.held(row) if row else None

    def get_any(self, key: Key) -> Held | None:
        """The visible entry of whichever group has it: for reports of damage, which name no group."""
        row = self._lookup.any_row(key)
        return self._lookup.held(row) if row else None

    def missing(self, group: Group, keys: Sequence[Key]) -> list[bool]:
        """Which of these a put should send: not visible in this group, whatever other groups have."""
        number = self._lookup.number_of(group)
        return [not self._lookup.row(number, key) for key in keys]

    # Pinning

    def pin(
        self,
        lease_id: str,
        owner_id: str,
        ends_at_s: float,
        found: Found,
        *,
        block_count: int,
        snapshot: FoundSnapshot | None = None,
    ) -> Lease:
        """Keeps the first `block_count` blocks of `found` and a snapshot where they are; counts as their use.

        Call it right after `find`. Raises TooManyLeases, then pins nothing.
        """
        rows = found.rows[:block_count]
        # Leaf-first eviction keeps what stands before a pinned block; where a copy in memory is missing, nothing does.
        ends = (np.arange(found.first_index, found.first_index + len(rows)) + 1) % SEGMENT_BLOCKS == 0
        ends[-1:] = True
        absent = found.slabs[:block_count] == NO_SLAB
        ends |= absent
        ends[:-1] |= absent[1:]
        pins: list[int] = rows[ends].tolist()
        if snapshot is not None:
            pins.append(snapshot.row)
            rows = np.append(rows, np.uint32(snapshot.row))
        lease = self._pin(lease_id, owner_id, ends_at_s, pins)
        self._history.use(rows)
        self._reuse.note(rows)
        return lease

    def hold(self, lease_id: str, owner_id: str, ends_at_s: float, group: Group, keys: Iterable[Key]) -> Lease:
        """Keeps single entries where they are, those of them that are visible; no use is counted.

        For a put: hold the parents that it builds on before making room, or they may go for it. For a copy that is
        being written elsewhere: hold what is read. Raises TooManyLeases, then pins nothing.
        """
        number = self._lookup.number_of(group)
        rows = [row for row in (self._lookup.row(number, key) for key in keys) if row]
        return self._pin(lease_id, owner_id, ends_at_s, rows)

    def _pin(self, lease_id: str, owner_id: str, ends_at_s: float, rows: Sequence[int]) -> Lease:
        lease = self.leases.open(lease_id, owner_id, rows, ends_at_s)
        for row in rows:
            self._table.state.at[row] |= PINNED
        return lease

    def release(self, lease_id: str, changes: Changes) -> bool:
        """Ends a lease, if it is open."""
        rows = self.leases.release(lease_id)
        if rows is None:
            return False
        for row in rows:
            self._table.state.at[row] &= ~PINNED & 0xFF
            self._holdings.offer(row)
        changes.freed_slabs += self.leases.exhume()
        return True

    def expire(self, now_s: float, changes: Changes) -> list[str]:
        """Ends every lease whose time is over; returns their ids."""
        return [lease_id for lease_id in self.leases.ended(now_s) if self.release(lease_id, changes)]

    def release_owner(self, owner_id: str, changes: Changes) -> list[str]:
        """Ends every lease of a dead instance; returns their ids."""
        return [lease_id for lease_id in self.leases.owned_by(owner_id) if self.release(lease_id, changes)]

    # Storing

    def store(self, entries: Sequence[Entry], slabs: Sequence[int], changes: Changes) -> list[Outcome]:
        """Makes entries of one put visible, each with its first slab; in any order, all of one group.

        A slab that is not taken is among the freed. Raises IndexFull before anything is stored if the table is full.
        """
        return self._storing.store(RAM, entries, slabs, changes)

    def recover(self, records: Iterable[tuple[Entry, int]], changes: Changes) -> int:
        """Takes what the disk has, with locations, when the node starts; returns how many are visible now.

        What comes before its parent waits for it to the end; what is an orphan then, or present, is among `freed_ssd`.
        """
        return self._storing.recover(records, changes)

    # Copies

    def set_slab(self, entry: Entry, slab: int, changes: Changes) -> bool:
        """Takes a copy in memory of a visible entry. False, and the slab freed, if it is gone, other, or has one."""
        if self._attach(RAM, entry, slab):
            return True
        changes.freed_slabs.append(slab)
        return False

    def set_location(self, entry: Entry, location: int, changes: Changes) -> bool:
        """Takes a copy on disk of a visible entry. False, and the location freed, if it is gone, other, or has one."""
        if self._attach(SSD, entry, location):
            return True
        changes.freed_ssd.append((entry.key, location))
        return False

    def move(self, key: Key, old_location: int, new_location: int) -> bool:
        """The copy on disk lies elsewhere now. False if `old_location` counts no more: then remove the new one."""
        row = self._at(SSD, key, old_location)
        if row:
            self._table.places[SSD].at[row] = new_location
        return bool(row)

    def lose_slab(self, key: Key, slab: int, changes: Changes) -> bool:
        """The copy in memory is damaged. With none on disk the entry is dropped, as by `drop`. False if it moved on."""
        return self._lose(RAM, key, slab, changes)

    def lose_location(self, key: Key, location: int, changes: Changes) -> bool:
        """The copy on disk is damaged. With none in memory the entry is dropped, as by `drop`. False if it moved on."""
        return self._lose(SSD, key, location, changes)

    # Going

    def drop(self, key: Key, changes: Changes) -> int:
        """Makes an entry and what stands on it in its segment invisible at once, pinned or not; returns how many."""
        row = self._lookup.any_row(key)
        return self._holdings.drop(row, changes) if row else 0

    def flush(
        self, changes: Changes, *, kv_id: str | None = None, tenant_tag: bytes | None = None, step_entries: int = 4096
    ) -> Iterator[Flushed]:
        """Drops every entry of the groups that match, in steps; settle `changes` and let others run after each.

        Complete when it ends, for what was visible when it began; `None` matches all.
        """
        for begin in range(1, self._table.used_end, step_entries):
            end = min(begin + step_entries, self._table.used_end)
            numbers = [
                record.number
                for record in self._groups.live()
                if kv_id in (None, record.group.kv_id) and tenant_tag in (None, record.group.tenant_tag)
            ]
            rows = np.arange(begin, end)
            state = self._table.state.array
            rows = rows[np.isin(self._table.group.array[begin:end], numbers) & (state[begin:end] & VISIBLE != 0)]
            first = len(changes.removed)
            for row in rows.tolist():
                if self._table.state.at[row] & VISIBLE:
                    self._holdings.drop(row, changes)
            removed = changes.removed[first:]
            snapshot_count = sum(key.kind is Kind.SNAPSHOT for key in removed)
            yield Flushed(len(removed) - snapshot_count, snapshot_count)

    def evict_ram(self, size_bytes: int, changes: Changes, *, tenant_tag: bytes | None = None) -> int:
        """Lets copies in memory go that can best be missed, until their payloads sum up to `size_bytes`.

        Leaves before parents. An entry with a copy on disk stays visible; one without is removed. Tenants over their
        quota lose theirs first; `tenant_tag` is the one that room is made for. Returns the bytes; less than asked: the
        rest is pinned.
        """
        return self._evict(RAM, size_bytes, changes, tenant_tag)

    def evict_ssd(self, size_bytes: int, changes: Changes, *, tenant_tag: bytes | None = None) -> int:
        """The same for copies on disk; an entry with a copy in memory stays visible."""
        return self._evict(SSD, size_bytes, changes, tenant_tag)

    # Listing

    def page(self, cursor: int, limit: int, *, group: Group | None = None) -> tuple[list[Held], int | None]:
        """Some visible entries from `cursor` on (0 at first) and where to go on; None at the end.

        An entry that is visible throughout is in exactly one page, whatever happens between pages. A page may be empty.
        """
        rows, following = self._rows_from(cursor, limit)
        if group is not None:
            rows = rows[self._table.group.array[rows] == self._lookup.number_of(group)]
        return [self._lookup.held(row) for row in rows.tolist()], following

    def hash_page(self, cursor: int, limit: int) -> tuple[list[bytes], list[bytes], int | None]:
        """The same as hashes of blocks and of snapshots: what ListHeld sends."""
        rows, following = self._rows_from(cursor, limit)
        keys = [self._holdings.key(row) for row in rows.tolist()]
        blocks = [key.block_hash for key in keys if key.kind is Kind.BLOCK]
        return blocks, [key.block_hash for key in keys if key.kind is Kind.SNAPSHOT], following

    def groups(self) -> dict[Group, tuple[Usage, Usage]]:
        """What memory and disk hold of every group that has something."""
        return {record.group: (_usage([record.use[RAM]]), _usage([record.use[SSD]])) for record in self._groups.live()}

    def usage(self) -> tuple[Usage, Usage]:
        """What memory and disk hold of all."""
        live = self._groups.live()
        return _usage([record.use[RAM] for record in live]), _usage([record.use[SSD] for record in live])

    def snapshot_count(self) -> int:
        """Visible snapshots, each once whatever copies it has. Looks at every row."""
        wanted = VISIBLE | SNAPSHOT
        return int(np.count_nonzero(self._table.state.array[: self._table.used_end] & wanted == wanted))

    def block_form(self, group: Group) -> Form | None:
        """The form that all blocks of the group have, once one was stored."""
        record = self._groups.find(group)
        return None if record is None else record.block_form

    def _attach(self, tier: int, entry: Entry, place: int) -> bool:
        row = self._lookup.row(self._lookup.number_of(entry.group), entry.key)
        return bool(row) and self._storing.attach(tier, row, entry.checksum, place)

    def _at(self, tier: int, key: Key, place: int) -> int:
        row = self._lookup.any_row(key)
        return row if row and self._table.places[tier].at[row] == place else 0

    def _lose(self, tier: int, key: Key, place: int, changes: Changes) -> bool:
        row = self._at(tier, key, place)
        other = SSD if tier == RAM else RAM
        if not row:
            return False
        if self._table.places[other].at[row] == NO_PLACE[other]:
            self._holdings.drop(row, changes)
        else:
            self._holdings.lose(tier, row, changes)
        return True

    def _evict(self, tier: int, size_bytes: int, changes: Changes, tenant_tag: bytes | None) -> int:
        done = 0
        evictor = self._evictors[tier]
        for tenant, excess in self._quotas_passed(tier, size_bytes, tenant_tag):
            if done < size_bytes:
                done += evictor.evict(min(excess, size_bytes - done), changes, only_tenant=tenant)
        if done < size_bytes:
            done += evictor.evict(size_bytes - done, changes)
        return done

    def _quotas_passed(self, tier: int, size_bytes: int, tenant_tag: bytes | None) -> list[tuple[int, int]]:
        """Tenants that hold more than they may, with room for `size_bytes` of `tenant_tag` to come, and by how much."""
        quota = self._quotas.ram if tier == RAM else self._quotas.ssd
        passed = []
        if not self._quotas.is_unlimited:
            for tenant, used in enumerate(self._groups.tenant_bytes[tier]):
                tag = self._groups.tenant_tags[tenant]
                limit = quota(tag)
                wanted = used + (size_bytes if tag == tenant_tag else 0)
                if limit is not None and used and wanted > limit:
                    passed.append((tenant, min(used, wanted - limit)))
        return passed

    def _rows_from(self, cursor: int, limit: int) -> tuple[NDArray[np.uint32], int | None]:
        begin, end = max(1, cursor), min(max(1, cursor) + limit, self._table.used_end)
        rows = np.arange(begin, end, dtype=np.uint32)
        rows = rows[self._table.state.array[begin:end] & VISIBLE != 0]
        return rows, end if end < self._table.used_end else None


def _usage(uses: Iterable[TierUse]) -> Usage:
    block_count = snapshot_count = used_bytes = 0
    for use in uses:
        block_count += use.block_count
        snapshot_count += use.snapshot_count
        used_bytes += use.used_bytes
    return Usage(block_count=block_count, snapshot_count=snapshot_count, used_bytes=used_bytes)
