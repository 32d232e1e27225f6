"""The index of what is held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from shoal_kv_cache.core.changes import Changes
from shoal_kv_cache.core.entries import BLOCK_TOKENS, Entry, Key, Kind
from shoal_kv_cache.core.eviction import LeastRecentlyUsed
from shoal_kv_cache.core.leases import Lease, Leases


@dataclass(frozen=True, slots=True)
class Acquisition:
    """What a chain has here: see AcquireResponse."""

    hit_tokens: int
    replay_tokens: int
    present_tokens: int
    entries: tuple[Entry, ...]


class Index:
    """Visible entries, and those that are dropped but still pinned.

    Invariants: a visible entry's location is held by nobody else; a dropped entry keeps its location until its last pin
    is gone; the number of visible entries that stand on a block is counted.
    """

    def __init__(self, leases: Leases) -> None:
        self.leases = leases
        self._visible: dict[Key, Entry] = {}
        self._dropped: dict[Key, list[Entry]] = {}
        self._children: Counter[bytes] = Counter()
        self._recency = LeastRecentlyUsed()

    def __len__(self) -> int:
        return len(self._visible)

    def __contains__(self, key: Key) -> bool:
        return key in self._visible

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._visible.values())

    def store(self, entries: Iterable[Entry], changes: Changes) -> int:
        """Makes entries visible and returns how many; a duplicate of a visible one gives its location back."""
        stored_count = 0
        for entry in entries:
            if entry.key in self._visible:
                changes.freed.append(entry)
                continue
            self._visible[entry.key] = entry
            self._children[entry.parent_hash] += 1
            self._recency.touch(entry.key)
            changes.stored.append(entry.key)
            stored_count += 1
        return stored_count

    def acquire(
        self,
        lease: Callable[[tuple[Key, ...]], Lease],
        hashes: Sequence[bytes],
        *,
        kv_id: str,
        numerics_id: str,
        max_hit_tokens: int,
        want_replay: bool,
        blocks_only: bool,
    ) -> Acquisition:
        """The longest usable prefix of a chain, pinned. `lease` makes the lease from the keys to pin.

        With `blocks_only` the blocks below max_hit_tokens are pinned as far as they are present, snapshots aside.
        Raises TooManyLeases, then nothing is pinned.
        """
        self.leases.check_room()
        blocks = self._leading_blocks(hashes, kv_id, numerics_id)
        usable = min(len(blocks), max_hit_tokens // BLOCK_TOKENS)
        snapshot = None if blocks_only else self._last_snapshot(hashes[:usable])
        hit_tokens = snapshot.position_end if snapshot is not None else 0
        replay_tokens = usable * BLOCK_TOKENS
        pinned = replay_tokens if want_replay or blocks_only else hit_tokens
        entries = blocks[: pinned // BLOCK_TOKENS] + ([snapshot] if snapshot is not None else [])
        keys = tuple(entry.key for entry in entries)
        if keys:
            self.leases.open(lease(keys))
        # Parents last, so that they outlive what stands on them.
        for key in reversed(keys):
            self._recency.touch(key)
        return Acquisition(
            hit_tokens=replay_tokens if blocks_only else hit_tokens,
            replay_tokens=replay_tokens if want_replay and replay_tokens > hit_tokens else 0,
            present_tokens=len(blocks) * BLOCK_TOKENS,
            entries=tuple(entries),
        )

    def release(self, lease_id: str, changes: Changes) -> None:
        """Ends a lease, if it is open."""
        lease = self.leases.release(lease_id)
        if lease is not None:
            self._free_unpinned(lease.keys, changes)

    def expire(self, now_s: float, changes: Changes) -> list[str]:
        """Ends every lease whose time is over; returns their ids."""
        return self._ended(self.leases.expire(now_s), changes)

    def release_owner(self, owner_id: str, changes: Changes) -> list[str]:
        """Ends every lease of a dead instance; returns their ids."""
        return self._ended(self.leases.release_owner(owner_id), changes)

    def drop(self, key: Key, changes: Changes) -> bool:
        """Makes an entry invisible at once; its location is freed when nobody pins it any more."""
        entry = self._visible.pop(key, None)
        if entry is None:
            return False
        self._children[entry.parent_hash] -= 1
        if not self._children[entry.parent_hash]:
            del self._children[entry.parent_hash]
        self._recency.forget(key)
        changes.removed.append(key)
        if self.leases.is_pinned(key):
            self._dropped.setdefault(key, []).append(entry)
        else:
            changes.freed.append(entry)
        return True

    def evict(self, changes: Changes) -> bool:
        """Drops the entry that can best be missed; False when all are pinned or stood on by a pinned one."""
        key = self._recency.next(self._can_go)
        return key is not None and self.drop(key, changes)

    def _can_go(self, key: Key) -> bool:
        stands_alone = key.kind is Kind.SNAPSHOT or not self._children[key.block_hash]
        return stands_alone and not self.leases.is_pinned(key)

    def _leading_blocks(self, hashes: Sequence[bytes], kv_id: str, numerics_id: str) -> list[Entry]:
        blocks = []
        for block_hash in hashes:
            entry = self._visible.get(Key(Kind.BLOCK, block_hash))
            if entry is None or entry.kv_id != kv_id or entry.numerics_id != numerics_id:
                break
            blocks.append(entry)
        return blocks

    def _last_snapshot(self, hashes: Sequence[bytes]) -> Entry | None:
        found = (self._visible.get(Key(Kind.SNAPSHOT, block_hash)) for block_hash in reversed(hashes))
        return next((entry for entry in found if entry is not None), None)

    def _ended(self, leases: Sequence[Lease], changes: Changes) -> list[str]:
        for lease in leases:
            self._free_unpinned(lease.keys, changes)
        return [lease.lease_id for lease in leases]

    def _free_unpinned(self, keys: Iterable[Key], changes: Changes) -> None:
        for key in keys:
            if key in self._dropped and not self.leases.is_pinned(key):
                changes.freed.extend(self._dropped.pop(key))
