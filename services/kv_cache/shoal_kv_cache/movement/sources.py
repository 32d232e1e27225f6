"""What the places beyond this node have in common: look first, then load what was chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal_common.kv_transport.buffers import Buffer

from shoal_kv_cache.core.entries import Entry, Group
from shoal_kv_cache.core.load_rate import LoadRate
from shoal_kv_cache.core.prefix_plan import Level


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Which part of a chain is looked for.

    hashes          of blocks from `first_index` on
    first_index     of the chain's first hash
    begin           first block of interest
    max_blocks      the bound on what is usable
    blocks_only     no snapshot is wanted
    """

    lease_id: str
    owner_id: str
    group: Group
    hashes: Sequence[bytes]
    first_index: int
    begin: int
    max_blocks: int
    blocks_only: bool
    recompute_tokens_per_s: float
    timeout_s: float

    def hash_of(self, block_index: int) -> bytes:
        """Hash of a block of the chain."""
        return self.hashes[block_index - self.first_index]

    def parent_of(self, block_index: int) -> bytes:
        """Hash of the block before; zeros where the chain does not say it, which a first block needs not."""
        before = block_index - self.first_index - 1
        return self.hashes[before] if before >= 0 else bytes(32)

    @property
    def last(self) -> int:
        """One past the last block of interest."""
        return min(self.first_index + len(self.hashes), self.max_blocks)


class Sighting(Protocol):
    """What one source has of a chain, and keeps until it is closed."""

    blocks: set[int]
    """Block indices."""
    snapshots: set[int]
    """Indices of the blocks at whose ends it has snapshots."""

    async def load(
        self, blocks: Sequence[int], snapshot: int | None, *, timeout_s: float
    ) -> list[tuple[Entry, Buffer]]:
        """Those of the chosen that could be had, verified. Never raises MeshError: what fails is left out."""
        ...

    async def close(self) -> None:
        """Lets go. Safe to repeat."""
        ...


class Source(Protocol):
    """A place beyond this node."""

    level: Level
    rate: LoadRate

    @property
    def is_there(self) -> bool:
        """False: asking is in vain now."""
        ...

    async def look(self, look: Look) -> Sighting | None:
        """What it has; None for nothing. Never raises MeshError: a source that fails has nothing."""
        ...
