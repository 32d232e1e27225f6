"""The index of what one node holds, over its memory and its disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from shoal_kv_cache.core.changes import Changes
from shoal_kv_cache.core.copies import Copies
from shoal_kv_cache.core.entries import Entry, Form, Group, Key
from shoal_kv_cache.core.eviction import Evictor, Policy
from shoal_kv_cache.core.found import NO_SLAB, Found, FoundSnapshot
from shoal_kv_cache.core.history import History
from shoal_kv_cache.core.holdings import Holdings
from shoal_kv_cache.core.in_memory import InMemory
from shoal_kv_cache.core.leases import Lease, Leases
from shoal_kv_cache.core.listing import Listing
from shoal_kv_cache.core.lookup import Lookup
from shoal_kv_cache.core.origins import Origins
from shoal_kv_cache.core.pins import Pins
from shoal_kv_cache.core.quotas import Quotas
from shoal_kv_cache.core.results import Flushed, Held, Outcome, Usage
from shoal_kv_cache.core.room import Room
from shoal_kv_cache.core.storing import Storing
from shoal_kv_cache.core.table import RAM, SSD, IndexFull
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
    * calls `expire` whenever something is asked for: time passes by it alone, and what is worth keeping goes by time;
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
        policy           what is worth keeping; None: tokens per byte (`TokensPerByte`)
        """
        self.leases = leases
        holdings = self._holdings = Holdings(leases, max_entries)
        history = self._history = History(holdings.table, Origins())
        worth = (
            policy(holdings, history)
            if policy is not None
            else TokensPerByte(holdings, history, snapshot_tokens=snapshot_tokens)
        )
        evictors = Evictor(holdings, RAM, worth, seed=seed + RAM), Evictor(holdings, SSD, worth, seed=seed + SSD)
        self._lookup = Lookup(holdings)
        self._pins = Pins(holdings, self._lookup, history)
        self._storing = Storing(holdings, history)
        self._copies = Copies(holdings, self._lookup, self._storing)
        self._room = Room(holdings.groups, quotas or Quotas(), evictors)
        self._listing = Listing(holdings, self._lookup)

    def __len__(self) -> int:
        """Visible entries."""
        return self._holdings.visible_count

    def __contains__(self, key: Key) -> bool:
        """Whether any group has it."""
        return bool(self._lookup.any_row(key))

    @property
    def free_entries(self) -> int:
        """How many more can be stored before something must be evicted for the table's sake."""
        return self._holdings.table.free_rows

    # Looking up

    def depth(self, group: Group, hashes: Sequence[bytes], first_index: int = 0) -> int:
        """Leading visible blocks of a chain whose first hash is of block `first_index`. Touches nothing."""
        reached = self._lookup.reach(group, hashes, first_index)
        return reached[-1][0] if reached else 0

    def find(self, group: Group, hashes: Sequence[bytes], first_index: int = 0) -> Found:
        """The same with every copy and every snapshot on the path. Touches nothing."""
        return self._lookup.find(group, hashes, first_index)

    def find_in_memory(
        self, group: Group, hashes: Sequence[bytes], first_index: int, *, max_blocks: int
    ) -> InMemory | None:
        """The same in half of the time, where all that would be found is in memory.

        max_blocks: bounds the usable prefix. None where it is not so. Touches nothing.
        """
        return self._lookup.find_in_memory(group, hashes, first_index, max_blocks)

    def get(self, group: Group, key: Key) -> Held | None:
        """One visible entry."""
        row = self._lookup.row(self._lookup.number_of(group), key)
        return self._lookup.held(row) if row else None

    def missing(self, group: Group, keys: Sequence[Key]) -> list[bool]:
        """Which of these a put should send: not in memory in this group, whatever other groups have.

        What is on disk alone was computed again since loading it was not worth its time, or failed: it is in use.
        """
        number, slabs = self._lookup.number_of(group), self._holdings.table.places[RAM].at
        return [slabs[self._lookup.row(number, key)] == NO_SLAB for key in keys]

    # Pinning

    def pin(
        self,
        lease_id: str,
        owner_id: str,
        ends_at_s: float,
        found: Found | InMemory,
        *,
        block_count: int,
        snapshot: FoundSnapshot | None = None,
    ) -> Lease:
        """Keeps the first `block_count` blocks of `found` and a snapshot where they are; all of `found` counts as used.

        Call it right after `find`. Raises TooManyLeases, then pins nothing.
        """
        return self._pins.pin(lease_id, owner_id, ends_at_s, found, block_count=block_count, snapshot=snapshot)

    def hold(self, lease_id: str, owner_id: str, ends_at_s: float, group: Group, keys: Iterable[Key]) -> Lease:
        """Keeps single entries where they are, those of them that are visible; no use is counted.

        For a put: hold the parents that it builds on before making room, or they may go for it. For a copy that is
        being written elsewhere: hold what is read. Raises TooManyLeases, then pins nothing.
        """
        return self._pins.hold(lease_id, owner_id, ends_at_s, group, keys)

    def release(self, lease_id: str, changes: Changes) -> bool:
        """Ends a lease, if it is open."""
        return self._pins.release(lease_id, changes)

    def expire(self, now_s: float, changes: Changes) -> list[str]:
        """Ends every lease whose time is over; returns their ids. Time passes here for eviction too."""
        self._history.set_time(now_s)
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
        if self._copies.attach(RAM, entry, slab):
            return True
        changes.freed_slabs.append(slab)
        return False

    def set_location(self, entry: Entry, location: int, changes: Changes) -> bool:
        """Takes a copy on disk of a visible entry. False, and the location freed, if it is gone, other, or has one."""
        if self._copies.attach(SSD, entry, location):
            return True
        changes.freed_ssd.append((entry.key, location))
        return False

    def move(self, key: Key, old_location: int, new_location: int) -> bool:
        """The copy on disk lies elsewhere now. False if `old_location` counts no more: then remove the new one."""
        return self._copies.move(SSD, key, old_location, new_location)

    def lose_slab(self, key: Key, slab: int, changes: Changes) -> bool:
        """The copy in memory is damaged. With none on disk the entry is dropped, as by `drop`. False if it moved on."""
        return self._copies.lose(RAM, key, slab, changes)

    def lose_location(self, key: Key, location: int, changes: Changes) -> bool:
        """The copy on disk is damaged. With none in memory the entry is dropped, as by `drop`. False if it moved on."""
        return self._copies.lose(SSD, key, location, changes)

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
        return self._listing.flush(changes, kv_id, tenant_tag, step_entries)

    def evict_ram(self, size_bytes: int, changes: Changes, *, tenant_tag: bytes | None = None) -> int:
        """Lets copies in memory go that can best be missed, until their payloads sum up to `size_bytes`.

        Leaves before parents. An entry with a copy on disk stays visible; one without is removed. Tenants over their
        quota lose theirs first; `tenant_tag` is the one that room is made for. Returns the bytes; less than asked: the
        rest is pinned.
        """
        return self._room.make(RAM, size_bytes, changes, tenant_tag)

    def evict_ssd(self, size_bytes: int, changes: Changes, *, tenant_tag: bytes | None = None) -> int:
        """The same for copies on disk; an entry with a copy in memory stays visible."""
        return self._room.make(SSD, size_bytes, changes, tenant_tag)

    # Listing

    def page(self, cursor: int, limit: int, *, group: Group | None = None) -> tuple[list[Held], int | None]:
        """Some visible entries from `cursor` on (0 at first) and where to go on; None at the end.

        An entry that is visible throughout is in exactly one page, whatever happens between pages. A page may be empty.
        """
        return self._listing.page(cursor, limit, group)

    def hash_page(self, cursor: int, limit: int) -> tuple[list[bytes], list[bytes], int | None]:
        """The same as hashes of blocks and of snapshots: what ListHeld sends."""
        return self._listing.hash_page(cursor, limit)

    def groups(self) -> dict[Group, tuple[Usage, Usage]]:
        """What memory and disk hold of every group that has something."""
        return self._listing.groups()

    def usage(self) -> tuple[Usage, Usage]:
        """What memory and disk hold of all."""
        return self._listing.usage()

    def snapshot_count(self) -> int:
        """Visible snapshots, each once whatever copies it has. Looks at every row."""
        return self._listing.snapshot_count()

    def block_form(self, group: Group) -> Form | None:
        """The form that all blocks of the group have, once one was stored."""
        record = self._holdings.groups.find(group)
        return None if record is None else record.block_form
