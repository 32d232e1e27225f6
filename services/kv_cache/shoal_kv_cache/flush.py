"""Flush: everything that matches goes, from every tier of this node, what is on its way included."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from shoal_common.errors import MeshError

from shoal_kv_cache.core.changes import Changes
from shoal_kv_cache.core.flush_epochs import Filter
from shoal_kv_cache.core.flush_log import FlushLog, FlushRecord
from shoal_kv_cache.flush_file import FlushFile
from shoal_kv_cache.movement.background import WriteBack
from shoal_kv_cache.movement.ssd import Disk
from shoal_kv_cache.store import Store
from shoal_kv_cache.tiers.remote import RemoteStore

logger = logging.getLogger(__name__)

_REMOTE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Flushed:
    """What went."""

    block_count: int
    snapshot_count: int
    remote_count: int


class Flusher:
    """Does flushes and keeps the log of them. Belongs to one event loop.

    Invariant: when a flush returns, nothing that was begun before it and matches it is visible here, will become
    visible, or comes back with a restart; and the log has it, on disk too where there is one.
    """

    def __init__(
        self,
        store: Store,
        *,
        writers: Sequence[WriteBack],
        disk: Disk | None,
        remote: RemoteStore | None,
        file: FlushFile | None = None,
    ) -> None:
        """writers   to disk, to the remote store, to other nodes
        file      keeps the log; None: it ends with this process
        """
        self._store, self._writers, self._disk, self._remote = store, tuple(writers), disk, remote
        self._file = file
        self.log = file.read() if file is not None else FlushLog()
        self._writing = asyncio.Lock()

    async def flush(self, what: Filter, *, flush_id: str = "") -> Flushed:
        """Drops what matches. Raises MeshError where a tier could not be reached: then call it again."""
        return await self._do([FlushRecord(flush_id or secrets.token_hex(16), what)], reaches_remote=True)

    async def finish(self) -> None:
        """Does what a process before this one began, before anything is served. Never raises MeshError."""
        await self._try([*self.log.unfinished()], reaches_remote=True)

    async def catch_up(self, theirs: Sequence[FlushRecord], *, has_forgotten: bool, reaches_remote: bool) -> None:
        """Does what another node knows of and this one does not. Never raises MeshError.

        reaches_remote  False for a node that comes: what it wrote out was flushed by those that were there
        """
        await self._try(self.log.missed(theirs, has_forgotten=has_forgotten), reaches_remote=reaches_remote)

    async def _try(self, records: Sequence[FlushRecord], *, reaches_remote: bool) -> None:
        if not records:
            return
        try:
            flushed = await self._do(records, reaches_remote=reaches_remote)
        except MeshError as error:
            # Memory and the index are rid of it; the next start begins with what is not done.
            logger.warning("a flush is not complete", extra={"reason": error.reason, "error": error.message})
            return
        logger.info("flushed late", extra={"flushes": len(records), "blocks": flushed.block_count})

    async def _do(self, records: Sequence[FlushRecord], *, reaches_remote: bool) -> Flushed:
        whats = _fewest([one.what for one in records])
        # From here on puts, loads and write-back that began before do not commit.
        for what in whats:
            self._store.epochs.flush(what)
        failures: list[MeshError] = []
        await self._note(records, is_done=False, failures=failures)
        counts = [await self._drop(what) for what in whats]
        # A batch that is being written now undoes what is stale of it when it ends; those after it find nothing.
        for writer in self._writers:
            await writer.quiesce()
        if self._disk is not None:
            try:
                await self._disk.remove_all()
                await self._disk.sync()
            except MeshError as error:
                failures.append(error)
        remote_count = 0
        for what in whats if self._remote is not None and reaches_remote else ():
            assert self._remote is not None
            try:
                remote_count += await self._remote.delete_groups(
                    kv_id=what.kv_id, tenant_tag=what.tenant_tag, timeout_s=_REMOTE_TIMEOUT_S
                )
            except MeshError as error:
                failures.append(error)
        if not failures and not (self._disk is not None and self._disk.tier.has_unreadable_files):
            # Else it is done again at the next start, when those files may be readable.
            await self._note(records, is_done=True, failures=failures)
        if failures:
            raise failures[0]
        return Flushed(sum(blocks for blocks, _ in counts), sum(snapshots for _, snapshots in counts), remote_count)

    async def _note(self, records: Sequence[FlushRecord], *, is_done: bool, failures: list[MeshError]) -> None:
        for one in records:
            self.log.note(one.flush_id, one.what, is_done=is_done)
        if self._file is None or self._disk is None:
            return
        # One after the other, and each the whole log as it is then: the last one written is the newest.
        async with self._writing:
            kept, forgotten, has_forgotten = self.log.records, self.log.forgotten, self.log.has_forgotten
            file = self._file
            try:
                await self._disk.call(lambda: file.write(kept, forgotten=forgotten, has_forgotten=has_forgotten))
            except MeshError as error:
                failures.append(error)

    async def _drop(self, what: Filter) -> tuple[int, int]:
        # Of a thousand flushes that a node has missed few mean anything that it holds.
        if not any(what.matches(group.kv_id, group.tenant_tag) for group in self._store.index.groups()):
            return 0, 0
        changes = Changes()
        block_count = snapshot_count = 0
        for step in self._store.index.flush(changes, kv_id=what.kv_id, tenant_tag=what.tenant_tag):
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


def _fewest(whats: Sequence[Filter]) -> list[Filter]:
    """Each once; everything alone where that is among them."""
    return [Filter()] if Filter() in whats else list(dict.fromkeys(whats))
