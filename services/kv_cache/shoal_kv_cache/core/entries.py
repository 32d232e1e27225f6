"""What is held: blocks and snapshots."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

HASH_BYTES = 32
BLOCK_TOKENS = 128


class Kind(Enum):
    """A block of 128 positions, or the encoder's window rows where a block ends."""

    BLOCK = "block"
    SNAPSHOT = "snapshot"


@dataclass(frozen=True, slots=True)
class Key:
    """Names an entry. The hash chain has kv_id, numerics_id and tenant salt in its root, so the hash is enough."""

    kind: Kind
    block_hash: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One payload that is held.

    parent_hash    hash of the block before; for a snapshot, of the block whose end it belongs to
    position_end   one past the last position; a multiple of 128
    shape, dtype   of the array
    size_bytes     of the payload
    checksum       XXH3-64
    location       where the tier keeps it
    """

    key: Key
    parent_hash: bytes
    kv_id: str
    numerics_id: str
    tenant_tag: bytes
    position_begin: int
    position_end: int
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    checksum: int
    location: int
