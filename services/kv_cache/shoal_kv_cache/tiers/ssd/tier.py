"""Payloads on disk: append-only segment files that describe themselves; the index only saves time at the start."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal_common.errors import MeshError
from shoal_common.kv_transport.buffers import Buffer

from shoal_kv_cache.core.entries import Entry, Key
from shoal_kv_cache.tiers.ssd.aligned import AlignedPool, Gate
from shoal_kv_cache.tiers.ssd.catalog import Catalog
from shoal_kv_cache.tiers.ssd.checkpoints import Checkpoints
from shoal_kv_cache.tiers.ssd.compaction import Mover
from shoal_kv_cache.tiers.ssd.disk import Disk
from shoal_kv_cache.tiers.ssd.errors import SsdFull, SsdUnavailable, from_os
from shoal_kv_cache.tiers.ssd.health import Health
from shoal_kv_cache.tiers.ssd.index_db import IndexDamaged, IndexDb
from shoal_kv_cache.tiers.ssd.layout import MAX_FILE_BYTES, MAX_TOMBSTONES, PAGE, OtherVersion, pages_of
from shoal_kv_cache.tiers.ssd.lock import FolderLock
from shoal_kv_cache.tiers.ssd.log import Log
from shoal_kv_cache.tiers.ssd.reader import BUFFER_BYTES, Reader
from shoal_kv_cache.tiers.ssd.recovery import Recovery
from shoal_kv_cache.tiers.ssd.segments import OpenFiles
from shoal_kv_cache.tiers.ssd.staging import MAX_STAGED_BYTES, STAGE_BYTES, Staging, wait_for
from shoal_kv_cache.tiers.ssd.values import Fsync, Moved, Read, Recovered, SsdStats
from shoal_kv_cache.tiers.ssd.writer import Remove, Retire, Sync, Writer

logger = logging.getLogger(__name__)

_CLOSE_S = 5.0
_INDEX = "index"
_MIN_MAP_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    log: Log
    checkpoints: Checkpoints
    writer: Writer
    reader: Reader
    staging: Staging
    mover: Mover


class SsdTier:
    """Keeps payloads by location: a number below 2**64 that is never given out twice, over restarts too.

    Blocking and safe to call from several threads. Every call is bounded in time: it raises SsdTimeout where the disk
    does not answer, SsdBusy where the queue to it stays full. Errors of the disk never end the service.
    """

    def __init__(
        self,
        directory: Path,
        *,
        capacity_bytes: int,
        segment_file_bytes: int = 256 << 20,
        fsync: Fsync = Fsync.INTERVAL,
        fsync_interval_s: float = 1.0,
        read_threads: int = 4,
        queue_bytes: int = 64 << 20,
        timeout_s: float = 10.0,
        disk: Disk | None = None,
    ) -> None:
        """Opens the folder, made if missing; another process in it: SsdUnavailable (reason SSD_IN_USE).

        A folder that cannot be written is opened for reading: `append` and `remove` raise SsdReadOnly.

        capacity_bytes  live payloads, each in whole pages of 4 KiB; the files take up to `max_file_bytes`
        queue_bytes     reads, and writes up to 6 MiB, that may be under way at a time; more wait for their turn
        timeout_s       for calls that give none
        """
        if not PAGE <= segment_file_bytes <= MAX_FILE_BYTES // 2:
            raise ValueError(f"segment_file_bytes must be in [{PAGE}, {MAX_FILE_BYTES // 2}], got {segment_file_bytes}")
        self._lock = FolderLock(directory)
        self.directory, self._capacity_bytes = directory, capacity_bytes
        self._segment_file_bytes, self._fsync, self._interval_s = segment_file_bytes, fsync, fsync_interval_s
        self._timeout_s, self._queue_bytes, self._read_threads = timeout_s, queue_bytes, read_threads
        self._disk = disk if disk is not None else Disk()
        self._pool = AlignedPool(buffer_bytes=BUFFER_BYTES, max_kept=max(1, queue_bytes // BUFFER_BYTES))
        self._health = Health()
        self._catalog = Catalog()
        self._files = OpenFiles(self._disk)
        self._reserved_bytes = 0
        self._started: _Parts | None = None

    @property
    def max_file_bytes(self) -> int:
        """What all files together take at most, removed and copied payloads included."""
        return self._capacity_bytes * 5 // 4 + 3 * self._segment_file_bytes

    @property
    def has_unreadable_files(self) -> bool:
        """Whether files were there that could not be opened: what they hold may be found at the next start."""
        return bool(self._catalog.unreadable)

    def recover(self) -> Iterator[Recovered]:
        """Finds what is there, once and before anything else; cuts a torn end off, drops what the files do not have.

        Every record once, parents before children as far as both are there. Of what lies beyond the index's last
        checkpoint in the newest files the payloads are verified; of the rest when they are read. Raises SsdUnavailable;
        with reason SSD_OTHER_VERSION where there are segment files of another version, which are left as they are.
        """
        if self._started is not None:
            raise RuntimeError("recover is called once")
        try:
            try:
                found = self._recover(self._open_index())
            except IndexDamaged as error:
                logger.warning("the index is made again", extra={"error": str(error)})
                found = self._recover(self._fresh_index())
        except OSError as error:
            raise from_os(error, f"reading {self.directory}") from error
        except OtherVersion as error:
            logger.error("the folder is another version's", extra={"version": error.version})
            raise SsdUnavailable(
                f"{self.directory} has {error}", reason="SSD_OTHER_VERSION", version=error.version
            ) from error
        return found

    def append(self, items: Sequence[tuple[Entry, Buffer]], *, timeout_s: float | None = None) -> list[int]:
        """Writes payloads and returns their locations; durable on return under Fsync.ALWAYS. Copies before it waits.

        Raises SsdFull, SsdReadOnly, SsdUnavailable, SsdTimeout, SsdBusy, ChecksumMismatch (a payload is not what its
        entry says); then no location is held, and after a restart payloads of the call may at most be found whole.
        """
        wanted_bytes = sum(pages_of(entry.size_bytes) for entry, _ in items) * PAGE
        self._reserve(wanted_bytes)
        try:
            return self._parts.staging.append(items, self._give_up_at_s(timeout_s))
        finally:
            with self._catalog.lock:
                self._reserved_bytes -= wanted_bytes

    def read(
        self,
        location: int,
        size_bytes: int,
        checksum: int,
        into: memoryview | None = None,
        *,
        timeout_s: float | None = None,
    ) -> bytes | memoryview:
        """One payload, verified. Raises NotFound, ChecksumMismatch, SsdUnavailable, SsdTimeout, SsdBusy."""
        parts = None if into is None else (into,)
        (result,) = self.read_many([Read(location, size_bytes, checksum, parts)], timeout_s=timeout_s)
        if isinstance(result, MeshError):
            raise result
        if result is not None:
            return result
        assert into is not None
        return into

    def read_many(self, reads: Sequence[Read], *, timeout_s: float | None = None) -> list[bytes | MeshError | None]:
        """Several at once, faster: neighbours on disk are read together.

        For each the bytes, None if they are in `into`, or what went wrong with it. Raises nothing of the disk's.
        """
        return self._parts.reader.read_many(reads, self._timeout_s if timeout_s is None else timeout_s)

    def remove(self, keys: Sequence[tuple[Key, int]], *, timeout_s: float | None = None) -> None:
        """Forgets payloads by location; unknown ones are fine. A location moved by `compact` stands for both.

        In effect at once for this process, whatever is raised. Durable on return under Fsync.ALWAYS. When it raises (as
        append) the next start may find them again, unless the call is repeated until it returns.
        """
        dead = self._parts.mover.kill([location for _, location in keys])
        # None dead: they were, and this waits for what a call before it could not wait for.
        jobs = [Remove(dead[begin : begin + MAX_TOMBSTONES]) for begin in range(0, max(1, len(dead)), MAX_TOMBSTONES)]
        for job in jobs:
            self._parts.writer.submit(job)
        for job in jobs:
            wait_for(job.done, self._give_up_at_s(timeout_s), self._health)

    def compact(self, max_bytes: int, *, timeout_s: float | None = None) -> list[Moved]:
        """Copies the live records of the files that have the most waste, until about max_bytes are copied.

        Whole files: at least one, if any has enough waste to be worth it, and only when the last result is retired.
        Old locations can be read until `retire`, which is wanted also where nothing had to be moved. Raises as append;
        then nothing has moved.
        """
        return self._parts.mover.compact(max_bytes, self._give_up_at_s(timeout_s))

    def retire(self, *, timeout_s: float | None = None) -> int:
        """Deletes the files that the last `compact` emptied, once the copies are durable; returns the bytes freed.

        Call it when the new locations are in use. Raises as append; then it can be repeated.
        """
        segments = self._parts.mover.emptied
        if not segments:
            return 0
        freed_bytes = sum(segment.file_bytes for segment in segments)
        job = Retire(segments)
        self._parts.writer.submit(job)
        wait_for(job.done, self._give_up_at_s(timeout_s), self._health)
        self._parts.mover.retired()
        return freed_bytes

    @property
    def wants_compaction(self) -> bool:
        """Whether waste takes so much room that `compact` and `retire` should be called, until this is False."""
        mover = self._parts.mover
        return not mover.emptied and mover.waste_bytes > max(self._segment_file_bytes, self._capacity_bytes // 8)

    def sync(self, *, timeout_s: float | None = None) -> None:
        """Makes durable what was appended and removed (not under NEVER), and writes a checkpoint. Raises as append."""
        job = Sync()
        self._parts.writer.submit(job)
        wait_for(job.done, self._give_up_at_s(timeout_s), self._health)

    def stats(self) -> SsdStats:
        """Counts."""
        parts, health, catalog = self._parts, self._health, self._catalog
        return SsdStats(
            capacity_bytes=self._capacity_bytes,
            max_file_bytes=self.max_file_bytes,
            payload_bytes=catalog.payload_bytes,
            record_count=catalog.record_count,
            file_bytes=catalog.file_bytes,
            file_count=len(catalog.segments),
            read_bytes=health.read_bytes,
            written_bytes=parts.log.written_bytes,
            failure_count=health.failure_count,
            busy_count=health.busy_count,
            failing_reason=health.failing_reason,
            is_index_failing=parts.checkpoints.is_failing,
        )

    def close(self) -> None:
        """Syncs and ends, within a few seconds even when the disk hangs."""
        if self._started is not None:
            self._started.writer.close(_CLOSE_S)
            self._started.reader.close(_CLOSE_S)
        self._files.close()
        self._lock.close()

    @property
    def _parts(self) -> _Parts:
        if self._started is None:
            raise RuntimeError("recover comes first")
        return self._started

    def _give_up_at_s(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)

    def _reserve(self, wanted_bytes: int) -> None:
        with self._catalog.lock:
            free_bytes = self._capacity_bytes - self._catalog.payload_bytes - self._reserved_bytes
            # The last segment file's worth is for compaction, which frees more than it takes.
            file_bytes = self._catalog.file_bytes + self._reserved_bytes + self._segment_file_bytes
            free_bytes = min(free_bytes, self.max_file_bytes - file_bytes)
            if wanted_bytes > free_bytes:
                raise SsdFull(
                    f"{wanted_bytes} bytes wanted, {free_bytes} free", wanted_bytes=wanted_bytes, free_bytes=free_bytes
                )
            self._reserved_bytes += wanted_bytes

    def _recover(self, index: IndexDb | None) -> Iterator[Recovered]:
        self._catalog = Catalog()
        checkpoints = Checkpoints(self._catalog, index)
        try:
            recovery = Recovery(self._disk, self.directory, self._catalog, self._pool, checkpoints)
            found = recovery.run()
        except BaseException:
            checkpoints.close()
            raise
        if recovery.unreadable:
            self._health.read(0, from_os(recovery.unreadable[0], "recovering"))
        self._started = self._start(checkpoints)
        if self._catalog.unwritten:
            self._started.writer.submit(Remove(sorted(self._catalog.unwritten)[:MAX_TOMBSTONES]))
        return found

    def _start(self, checkpoints: Checkpoints) -> _Parts:
        disk, catalog, files, pool, health = self._disk, self._catalog, self._files, self._pool, self._health
        log = Log(
            disk,
            self.directory,
            catalog,
            segment_file_bytes=self._segment_file_bytes,
            is_synced=self._fsync is not Fsync.NEVER,
        )
        gate = Gate(min(self._queue_bytes, MAX_STAGED_BYTES))
        stages = AlignedPool(buffer_bytes=STAGE_BYTES, max_kept=max(1, MAX_STAGED_BYTES // STAGE_BYTES))
        writer = Writer(
            log,
            catalog,
            checkpoints,
            files,
            disk,
            pool=stages,
            gate=gate,
            fsync=self._fsync,
            interval_s=self._interval_s,
            failed=health.written,
        )
        reader = Reader(
            catalog,
            files,
            disk,
            pool=pool,
            gate=Gate(self._queue_bytes),
            threads=self._read_threads,
            finished=health.read,
        )
        staging = Staging(writer, catalog, stages, gate, health)
        mover = Mover(catalog, files, disk, pool, reader=reader, writer=writer, staging=staging)
        return _Parts(log=log, checkpoints=checkpoints, writer=writer, reader=reader, staging=staging, mover=mover)

    def _open_index(self) -> IndexDb | None:
        path = self.directory / _INDEX
        try:
            if not IndexDb.attempt(path):
                IndexDb.discard(path)
                IndexDb.attempt(path)
            return self._index(path)
        except IndexDamaged as error:
            logger.warning("the index is made again", extra={"error": str(error)})
            return self._fresh_index()
        except OSError:
            return None

    def _fresh_index(self) -> IndexDb | None:
        path = self.directory / _INDEX
        try:
            IndexDb.discard(path)
            return self._index(path)
        except (IndexDamaged, OSError) as error:
            logger.warning("the index cannot be written", extra={"error": str(error)})
            return None

    def _index(self, path: Path) -> IndexDb:
        map_bytes = _MIN_MAP_BYTES + self._capacity_bytes // 8
        return IndexDb(path, map_bytes=map_bytes, is_synced=self._fsync is not Fsync.NEVER)
