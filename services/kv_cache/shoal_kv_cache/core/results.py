"""Answers of the index."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from shoal_kv_cache.core.entries import Entry


class Outcome(Enum):
    """What became of an entry that was to be stored.

    STORED    visible now
    PRESENT   was visible; the new copy in memory was taken where there was none, otherwise its slab is among the freed
    ORPHAN    its parent is missing (for a snapshot, its block): not kept
    FOREIGN   another group has this hash, or that of a parent in this put: not kept, and told to the writer as stored
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
