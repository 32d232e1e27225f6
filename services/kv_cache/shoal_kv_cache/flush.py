"""Flush: everything that matches goes, from every tier of this node, what is on its way included."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from shoal_common.errors import MeshError

from shoal_kv_cache.core.changes import Changes
from shoal_kv_cache.core.flush_epochs import Filter
from shoal_kv_cache.movement.background import WriteBack
from shoal_kv_cache.movement.ssd import Disk
from shoal_kv_cache.store import Store
from shoal_kv_cache.tiers.remote import RemoteStore

_REMOTE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Flushed:
    """What went."""

    block_count: int
    snapshot_count: int
    remote_count: int


class Flusher:
    """Invariant: when a flush returns, nothing that was begun before it and matches it is visible here, will become
    visible, or comes back with a restart."""

    def __init__(
        self, store: Store, *, writers: Sequence[WriteBack], disk: Disk | None, remote: RemoteStore | None
    ) -> None:
        """writers: to disk, to the remote store, to other nodes."""
        self._store, self._writers, self._disk, self._remote = store, tuple(writers), disk, remote

    async def flush(self, one: Filter) -> Flushed:
        """Drops what matches. Raises MeshError where a tier could not be reached: then call it again."""
        # From here on puts, loads and write-back that began before do not commit.
        self._store.epochs.flush(one)
        block_count, snapshot_count = await self._drop(one)
        # A batch that is being written now undoes what is stale of it when it ends; those after it find nothing.
        for writer in self._writers:
            await writer.quiesce()
        failures: list[MeshError] = []
        if self._disk is not None:
            try:
                await self._disk.remove_all()
                await self._disk.sync()
            except MeshError as error:
                failures.append(error)
        remote_count = 0
        if self._remote is not None:
            try:
                remote_count = await self._remote.delete_groups(
                    kv_id=one.kv_id, tenant_tag=one.tenant_tag, timeout_s=_REMOTE_TIMEOUT_S
                )
            except MeshError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return Flushed(block_count, snapshot_count, remote_count)

    async def _drop(self, one: Filter) -> tuple[int, int]:
        changes = Changes()
        block_count = snapshot_count = 0
        for step in self._store.index.flush(changes, kv_id=one.kv_id, tenant_tag=one.tenant_tag):
            block_count += step.block_count
            snapshot_count += step.snapshot_count
            self._store.settle(changes)
            changes.stored.clear()
            changes.removed.clear()
            changes.freed_slabs.clear()
            changes.freed_ssd.clear()
            # Others get their turn: a million entries take a second.
            await asyncio.sleep(0)
        return block_count, snapshot_count
