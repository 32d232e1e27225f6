"""What is held: blocks and snapshots, each described by an entry. Where the bytes lie is the index's to know."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

HASH_BYTES = 32
BLOCK_TOKENS = 128
SEGMENT_BLOCKS = 64


class Kind(Enum):
    """A block of 128 positions, or the encoder's window rows where a block ends."""

    BLOCK = "block"
    SNAPSHOT = "snapshot"


class Key(NamedTuple):
    """Names an entry. The hash chain has kv_id, numerics_id and tenant salt in its root, so the hash is enough.

    A tuple, not a dataclass: thousands are made in one put or eviction, and they are looked up in dicts.
    """

    kind: Kind
    block_hash: bytes


@dataclass(frozen=True, slots=True)
class Group:
    """Whose entries: what one group holds is absent for every other."""

    kv_id: str
    numerics_id: str
    tenant_tag: bytes


@dataclass(frozen=True, slots=True)
class Form:
    """Shape and size that many entries have in common. Make one object for a whole put, not one for each entry.

    positions   128 for a block; for a snapshot the positions of its rows, which end where the block ends
    size_bytes  of the payload
    """

    positions: int
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Entry:
    """Describes one payload, wherever it lies.

    parent_hash    hash of the block before (the chain's root for the first), for a snapshot too: as on the wire
    position_end   one past the last position; a multiple of 128
    checksum       XXH3-64 of the payload
    """

    key: Key
    group: Group
    parent_hash: bytes
    position_end: int
    form: Form
    checksum: int

    @property
    def block_index(self) -> int:
        """Place of the block (for a snapshot: of the block it belongs to) in its chain, from 0."""
        return self.position_end // BLOCK_TOKENS - 1

    @property
    def position_begin(self) -> int:
        """First position of the payload."""
        return self.position_end - self.form.positions

    @property
    def size_bytes(self) -> int:
        """Size of the payload."""
        return self.form.size_bytes
