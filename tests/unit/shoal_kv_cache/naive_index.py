"""The index as one would write it with dicts and without haste: the oracle of its tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shoal_kv_cache.core.entries import SEGMENT_BLOCKS, Entry, Key, Kind
from shoal_kv_cache.core.results import Outcome


@dataclass
class Copies:
    """An entry with its copies."""

    entry: Entry
    slab: int | None = None
    location: int | None = None


@dataclass
class NaiveIndex:
    """Visible entries by key, and for each open lease the slabs that its reader may be reading."""

    visible: dict[Key, Copies] = field(default_factory=dict)
    leases: dict[str, set[int]] = field(default_factory=dict)

    def store(self, entries: Sequence[Entry], slabs: Sequence[int]) -> tuple[list[Outcome], list[int]]:
        """Outcomes, and slabs that are not taken."""
        outcomes = [Outcome.ORPHAN] * len(entries)
        freed: list[int] = []
        foreign: set[bytes] = set()
        order = sorted(
            range(len(entries)), key=lambda n: (entries[n].key.kind is Kind.SNAPSHOT, entries[n].position_end)
        )
        for n in order:
            entry = entries[n]
            outcome = self._outcome(entry)
            if outcome is Outcome.ORPHAN and {entry.parent_hash, entry.key.block_hash} & foreign:
                outcome = Outcome.FOREIGN
            if outcome is Outcome.FOREIGN:
                foreign.add(entry.key.block_hash)
            held = self.visible.get(entry.key)
            if outcome is Outcome.STORED:
                self.visible[entry.key] = Copies(entry, slabs[n])
            elif outcome is Outcome.PRESENT and held is not None and held.slab is None:
                held.slab = slabs[n]
            else:
                freed.append(slabs[n])
            outcomes[n] = outcome
        return outcomes, freed

    def _outcome(self, entry: Entry) -> Outcome:
        held = self.visible.get(entry.key)
        if held is not None:
            return Outcome.PRESENT if held.entry.group == entry.group else Outcome.FOREIGN
        if entry.key.kind is Kind.SNAPSHOT:
            block = self.visible.get(Key(Kind.BLOCK, entry.key.block_hash))
            if block is None:
                return Outcome.ORPHAN
            return Outcome.STORED if block.entry.group == entry.group else Outcome.FOREIGN
        parent = self.visible.get(Key(Kind.BLOCK, entry.parent_hash))
        if parent is not None and parent.entry.group != entry.group:
            return Outcome.ORPHAN
        if parent is None and entry.block_index % SEGMENT_BLOCKS:
            return Outcome.ORPHAN
        return Outcome.STORED

    def children(self, key: Key) -> Iterator[Key]:
        """Visible entries that stand on a block."""
        for other, copies in self.visible.items():
            stands_on = other.block_hash if other.kind is Kind.SNAPSHOT else copies.entry.parent_hash
            if key.kind is Kind.BLOCK and stands_on == key.block_hash:
                yield other

    def dropped_with(self, key: Key) -> list[Key]:
        """An entry and what stands on it in its segment."""
        if key not in self.visible:
            return []
        segment = self.visible[key].entry.block_index // SEGMENT_BLOCKS
        found = [key]
        for one in found:
            found += [
                child
                for child in self.children(one)
                if self.visible[child].entry.block_index // SEGMENT_BLOCKS == segment
            ]
        return found

    def is_closed(self) -> bool:
        """Whether every visible block has its parent in its segment, and every snapshot its block."""
        for key, copies in self.visible.items():
            below = key.block_hash if key.kind is Kind.SNAPSHOT else copies.entry.parent_hash
            needs = key.kind is Kind.SNAPSHOT or copies.entry.block_index % SEGMENT_BLOCKS
            if needs and Key(Kind.BLOCK, below) not in self.visible:
                return False
        return True
