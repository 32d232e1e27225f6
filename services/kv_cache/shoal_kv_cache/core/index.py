"""The index of what one node holds, over its memory and its disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from shoal_kv_cache.core.changes import Changes
from shoal_kv_cache.core.entries import Entry, Form, Group, Key
from shoal_kv_cache.core.found import Found, FoundSnapshot
from shoal_kv_cache.core.leases import Lease, Leases
from shoal_kv_cache.core.quotas import Quotas


class Outcome(Enum):
    """What became of an entry that was to be stored.

    STORED    visible now
    PRESENT   was visible; the new copy in memory was taken where there was none, otherwise its slab is among the freed
    ORPHAN    its parent is missing (for a snapshot, its block): not kept
    FOREIGN   another group has this hash: not kept, and told to the writer as stored
    REFUSED   another form than its group's blocks, or a place in the chain that its parent contradicts: not kept
    """

    STORED = "stored"
    PRESENT = "present"
    ORPHAN = "orphan"
    FOREIGN = "foreign"
    REFUSED = "refused"

    @property
    def is_counted(self) -> bool:
        """Whether the writer is told that it was stored."""
        return self in (Outcome.STORED, Outcome.FOREIGN)


@dataclass(frozen=True, slots=True)
class Held:
    """An entry and its copies; None where there is no such copy."""

    entry: Entry
    slab: int | None
    location: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a tier holds of a group, or of all."""

    block_count: int = 0
    snapshot_count: int = 0
    used_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Flushed:
    """What one step of a flush dropped."""

    block_count: int
    snapshot_count: int


class Index:
    """Which entries are visible, where their copies lie, what is pinned and what goes next.

    Invariants: a visible block that is not first in its segment of 64 has a visible parent; a snapshot is visible only
    with its block; visible = a copy in memory or on disk; a slab or location is given out in `Changes` exactly once,
    and a slab only when no lease that was open when its entry went is open still.

    What the caller does, on one event loop:
    * settles `Changes` before its next await: slabs back to the arena, `freed_ssd` to the SSD tier, keys to the events;
    * looks up and pins in one go: `find`, decide by `Found.usable`, `pin`, and only then awaits loads. After the awaits
      it hands new copies over by `set_slab` and looks up again for its answer; entries may have been dropped meanwhile;
    * makes room first (`evict_ram`, as often as it returns something) and stores then; `store` never evicts;
    * owns the bytes: the index does not know whether a slab's content is right, nor how many slabs are chained to it;
    * serialises a flush against puts that began before it (flush epoch): `store` takes what it is given.
    """

    def __init__(self, leases: Leases, *, max_entries: int, quotas: Quotas | None = None, seed: int = 0) -> None:
        """max_entries: entries at most, over memory and disk; tables of about 90 bytes each are laid out for it.

        Memory is touched as entries come. seed: of the sampling of candidates for eviction.
        """
        self.leases = leases
        raise NotImplementedError

    def __len__(self) -> int:
        """Visible entries."""
        raise NotImplementedError

    def __contains__(self, key: Key) -> bool:
        """Whether any group has it."""
        raise NotImplementedError

    @property
    def free_entries(self) -> int:
        """How many more can be stored before something must be evicted for the table's sake."""
        raise NotImplementedError

    # Looking up

    def depth(self, group: Group, hashes: Sequence[bytes], first_index: int = 0) -> int:
        """Leading visible blocks of a chain whose first hash is of block `first_index`. Touches nothing."""
        raise NotImplementedError

    def find(self, group: Group, hashes: Sequence[bytes], first_index: int = 0) -> Found:
        """The same with every copy and every snapshot on the path. Touches nothing."""
        raise NotImplementedError

    def get(self, group: Group, key: Key) -> Held | None:
        """One visible entry."""
        raise NotImplementedError

    def missing(self, group: Group, keys: Sequence[Key]) -> list[bool]:
        """Which of these a put should send: not visible in this group, whatever other groups have."""
        raise NotImplementedError

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
        raise NotImplementedError

    def release(self, lease_id: str, changes: Changes) -> bool:
        """Ends a lease, if it is open."""
        raise NotImplementedError

    def expire(self, now_s: float, changes: Changes) -> list[str]:
        """Ends every lease whose time is over; returns their ids."""
        raise NotImplementedError

    def release_owner(self, owner_id: str, changes: Changes) -> list[str]:
        """Ends every lease of a dead instance; returns their ids."""
        raise NotImplementedError

    # Storing

    def store(self, entries: Sequence[Entry], slabs: Sequence[int], changes: Changes) -> list[Outcome]:
        """Makes entries of one put visible, each with its first slab; in any order, all of one group.

        A slab that is not taken is among the freed. Raises IndexFull before anything is stored if the table is full.
        """
        raise NotImplementedError

    def recover(self, records: Iterable[tuple[Entry, int]], changes: Changes) -> int:
        """Takes what the disk has, with locations, when the node starts; returns how many are visible now.

        What comes before its parent waits for it to the end; what is an orphan then, or present, is among `freed_ssd`.
        """
        raise NotImplementedError

    # Copies

    def set_slab(self, entry: Entry, slab: int, changes: Changes) -> bool:
        """Takes a copy in memory of a visible entry. False, and the slab freed, if it is gone, other, or has one."""
        raise NotImplementedError

    def set_location(self, entry: Entry, location: int, changes: Changes) -> bool:
        """Takes a copy on disk of a visible entry. False, and the location freed, if it is gone, other, or has one."""
        raise NotImplementedError

    def move(self, key: Key, old_location: int, new_location: int) -> bool:
        """The copy on disk lies elsewhere now (compaction). False if `old_location` counts no more: remove the new one."""
        raise NotImplementedError

    def lose_slab(self, key: Key, slab: int, changes: Changes) -> bool:
        """The copy in memory is damaged. With none on disk the entry is dropped, as by `drop`. False if it has moved on."""
        raise NotImplementedError

    def lose_location(self, key: Key, location: int, changes: Changes) -> bool:
        """The copy on disk is damaged. With none in memory the entry is dropped, as by `drop`. False if it has moved on."""
        raise NotImplementedError

    # Going

    def drop(self, key: Key, changes: Changes) -> int:
        """Makes an entry and all that stands on it in its segment invisible at once, pinned or not; returns how many."""
        raise NotImplementedError

    def flush(
        self, changes: Changes, *, kv_id: str | None = None, tenant_tag: bytes | None = None, step_entries: int = 4096
    ) -> Iterator[Flushed]:
        """Drops every entry of the groups that match, in steps; settle `changes` and let others run after each.

        Complete when it ends, for what was visible when it began; `None` matches all.
        """
        raise NotImplementedError

    def evict_ram(self, size_bytes: int, changes: Changes, *, tenant_tag: bytes | None = None) -> int:
        """Lets copies in memory go that can best be missed, until their payloads sum up to `size_bytes`.

        Leaves before parents. An entry with a copy on disk stays visible; one without is removed. Tenants over their
        quota lose theirs first; `tenant_tag` is the one that room is made for. Returns the bytes; less than asked: the
        rest is pinned.
        """
        raise NotImplementedError

    def evict_ssd(self, size_bytes: int, changes: Changes, *, tenant_tag: bytes | None = None) -> int:
        """The same for copies on disk; an entry with a copy in memory stays visible."""
        raise NotImplementedError

    # Listing

    def page(self, cursor: int, limit: int, *, group: Group | None = None) -> tuple[list[Held], int | None]:
        """Some visible entries from `cursor` on (0 at first) and where to go on; None at the end.

        An entry that is visible throughout is in exactly one page, whatever happens between pages.
        """
        raise NotImplementedError

    def hash_page(self, cursor: int, limit: int) -> tuple[list[bytes], list[bytes], int | None]:
        """The same as hashes of blocks and of snapshots: what ListHeld sends."""
        raise NotImplementedError

    def groups(self) -> dict[Group, tuple[Usage, Usage]]:
        """What memory and disk hold of every group that has something."""
        raise NotImplementedError

    def usage(self) -> tuple[Usage, Usage]:
        """What memory and disk hold of all."""
        raise NotImplementedError

    def block_form(self, group: Group) -> Form | None:
        """The form that all blocks of the group have, once one was stored."""
        raise NotImplementedError
