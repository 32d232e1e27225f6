"""Reads everything that a tier of this node holds and drops what is damaged."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

from shoal.kv_cache.v1 import kv_cache_service_pb2 as pb
from shoal_common.errors import ChecksumMismatch, InvalidArgument, MeshError, NotFound

from shoal_kv_cache.core.changes import Changes
from shoal_kv_cache.core.index import Held
from shoal_kv_cache.movement.ssd import Disk
from shoal_kv_cache.store import Store
from shoal_kv_cache.tiers.ssd import Read

_PAGE_ENTRIES = 64


class Verifier:
    """One pass over the index per tier, a page at a time, beside everything else."""

    def __init__(self, store: Store, disk: Disk | None) -> None:
        self._store, self._disk = store, disk

    async def verify(self, tiers: Sequence[pb.Tier.ValueType]) -> AsyncIterator[pb.VerifyResponse]:
        """See Verify. Raises InvalidArgument (TIER_NOT_HERE), and MeshError where the disk cannot be read."""
        own = [pb.TIER_RAM, *([pb.TIER_SSD] if self._disk is not None else [])]
        for tier in tiers or own:
            if tier not in own:
                raise InvalidArgument.at("tiers", f"{pb.Tier.Name(tier)} is not of this node", reason="TIER_NOT_HERE")
        for tier in tiers or own:
            progress = pb.VerifyResponse(tier=tier)
            cursor: int | None = 0
            while cursor is not None:
                page, cursor = self._store.index.page(cursor, _PAGE_ENTRIES)
                if tier == pb.TIER_RAM:
                    self._check_memory(page, progress)
                else:
                    await self._check_disk(page, progress)
                yield progress
        yield pb.VerifyResponse(is_done=True)

    async def check(self, held: Held) -> int:
        """Reads both copies of one entry and drops what is damaged; how many that were.

        A disk that cannot be read now is left for later: what is read of it is checked then.
        """
        progress = pb.VerifyResponse()
        self._check_memory([held], progress)
        if self._disk is not None:
            with contextlib.suppress(MeshError):
                await self._check_disk([held], progress)
        return progress.damaged_count

    def _check_memory(self, page: Sequence[Held], progress: pb.VerifyResponse) -> None:
        there = [(held.entry, held.slab) for held in page if held.slab is not None]
        progress.checked_count += len(there)
        progress.checked_bytes += sum(entry.size_bytes for entry, _ in there)
        progress.damaged_count += self._store.drop_damaged(there)

    async def _check_disk(self, page: Sequence[Held], progress: pb.VerifyResponse) -> None:
        assert self._disk is not None
        there = [held for held in page if held.location is not None]
        reads = [
            Read(held.location, held.entry.size_bytes, held.entry.checksum)
            for held in there
            if held.location is not None
        ]
        results = await self._disk.read(reads) if reads else []
        for held, result in zip(there, results, strict=True):
            progress.checked_count += 1
            progress.checked_bytes += held.entry.size_bytes
            if not isinstance(result, MeshError):
                continue
            if not isinstance(result, (ChecksumMismatch, NotFound)):
                raise result
            assert held.location is not None
            changes = Changes()
            # One that moved or went since the page was made is not damaged.
            if self._store.index.lose_location(held.entry.key, held.location, changes):
                progress.damaged_count += 1
                self._store.counts.corrupt_count += 1
            self._store.settle(changes)
