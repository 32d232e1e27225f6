"""The one thread that changes files. What waits for it together is made durable together."""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from itertools import compress

from shoal_common.errors import MeshError

from shoal_kv_cache.tiers.descriptions import GroupForm, Record
from shoal_kv_cache.tiers.ssd.aligned import AlignedPool, Gate
from shoal_kv_cache.tiers.ssd.catalog import Catalog
from shoal_kv_cache.tiers.ssd.checkpoints import Checkpoints
from shoal_kv_cache.tiers.ssd.disk import Disk
from shoal_kv_cache.tiers.ssd.errors import SsdUnavailable, from_os
from shoal_kv_cache.tiers.ssd.layout import PAGE, Body, location_of, pages_of
from shoal_kv_cache.tiers.ssd.log import Log
from shoal_kv_cache.tiers.ssd.segments import OpenFiles, Segment
from shoal_kv_cache.tiers.ssd.values import Fsync

logger = logging.getLogger(__name__)

_MAX_GROUP_BYTES = 32 << 20
# A checkpoint writes the page maps of all files that changed: not each second.
_TICKS_A_CHECKPOINT = 5


@dataclass(slots=True, eq=False, kw_only=True)
class Append:
    """Payloads in aligned memory, whole pages each; answers their locations, 0 for a copy of what died meanwhile.

    body          what its header will say of them
    header_bytes  what is left free before them, for the header of the batch
    is_last       nothing more comes from the same caller; until then nobody waits for it to be durable
    """

    forms: Sequence[GroupForm]
    records: Sequence[Record]
    body: Body
    buffer: mmap.mmap
    used_bytes: int
    header_bytes: int
    is_last: bool = True
    done: Future[list[int]] = field(default_factory=Future)


@dataclass(slots=True, eq=False)
class Remove:
    """Tombstones for these locations."""

    locations: Sequence[int]
    done: Future[list[int]] = field(default_factory=Future)


@dataclass(slots=True, eq=False)
class Retire:
    """Files to delete once everything else is durable; answers nothing."""

    segments: Sequence[Segment]
    done: Future[list[int]] = field(default_factory=Future)


@dataclass(slots=True, eq=False)
class Sync:
    """Everything before it is to be durable and in the index."""

    done: Future[list[int]] = field(default_factory=Future)


Job = Append | Remove | Retire | Sync


class Writer:
    """Takes jobs in order. A job whose caller gave up (its future is cancelled) is undone when it comes to be."""

    def __init__(
        self,
        log: Log,
        catalog: Catalog,
        checkpoints: Checkpoints,
        files: OpenFiles,
        disk: Disk,
        *,
        pool: AlignedPool,
        gate: Gate,
        fsync: Fsync,
        interval_s: float,
        failed: Callable[[MeshError | None], None],
    ) -> None:
        """failed: told what a write came to, None for success."""
        self._log, self._catalog, self._checkpoints, self._files = log, catalog, checkpoints, files
        self._disk, self._pool, self._gate, self._failed = disk, pool, gate, failed
        self._fsync, self._interval_s = fsync, interval_s
        self._jobs: deque[Job] = deque()
        self._wake = threading.Condition()
        self._is_closing = False
        self._held: list[tuple[Job, list[int]]] = []
        self._thread = threading.Thread(target=self._run, name="ssd-writer", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Takes a job. Raises SsdUnavailable when closed."""
        with self._wake:
            if self._is_closing:
                raise SsdUnavailable("the disk tier is closed", reason="SSD_CLOSED")
            self._jobs.append(job)
            self._wake.notify()

    def close(self, timeout_s: float) -> None:
        """Does what waits, syncs and ends; gives up after timeout_s."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        next_tick_s = time.monotonic() + self._interval_s
        ticks = 0
        while True:
            group = self._take(next_tick_s)
            try:
                if group:
                    self._write(group)
                    self._answer_held(is_forced=False)
                if not group or time.monotonic() >= next_tick_s:
                    ticks += 1
                    self._tick(with_checkpoint=self._is_closing or ticks % _TICKS_A_CHECKPOINT == 0)
                    next_tick_s = time.monotonic() + self._interval_s
            except Exception:
                logger.exception("the disk tier's writer failed")
                self._held.clear()
                for job in group:
                    _answer(job, SsdUnavailable("the writer failed"))
            if self._is_closing and not group:
                self._log.close()
                self._checkpoints.close()
                return

    def _take(self, until_s: float) -> list[Job]:
        """Everything that waits, up to a size; nothing when it is time for the tick, or the end."""
        with self._wake:
            while not self._jobs and not self._is_closing:
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    return []
                self._wake.wait(left_s)
            group: list[Job] = []
            size_bytes = 0
            while self._jobs and size_bytes < _MAX_GROUP_BYTES:
                job = self._jobs.popleft()
                size_bytes += job.used_bytes if isinstance(job, Append) else 0
                group.append(job)
            return group

    def _write(self, group: Sequence[Job]) -> None:
        for job in group:
            try:
                if not (isinstance(job, Append) and job.done.cancelled()):
                    self._held.append((job, self._do(job)))
            except OSError as error:
                self._fail(job, error, "writing")
            finally:
                self._release(job)

    def _answer_held(self, *, is_forced: bool) -> None:
        """Answers what is written, durable where it must be; together with more of the same caller if that comes."""
        is_awaited = any(not isinstance(job, Append) or job.is_last for job, _ in self._held)
        if self._fsync is Fsync.ALWAYS and not is_awaited and not is_forced:
            return
        answers, self._held = self._held, []
        if self._fsync is Fsync.ALWAYS:
            try:
                self._log.sync()
                self._disk.reached("sync.done")
            except OSError as error:
                for job, locations in answers:
                    self._kill(locations)
                    if isinstance(job, Remove):
                        with self._catalog.lock:
                            self._catalog.unwritten.update(job.locations)
                    self._fail(job, error, "making writes durable")
                return
        abandoned: list[int] = []
        for job, locations in answers:
            self._failed(None)
            if not _answer(job, locations):
                abandoned.extend(location for location in locations if location)
        if abandoned:
            self._undo(abandoned)

    def _do(self, job: Job) -> list[int]:
        match job:
            case Append():
                return self._append(job)
            case Remove():
                self._bury(job.locations)
            case Retire():
                self._retire(job.segments)
            case Sync():
                if self._fsync is not Fsync.NEVER:
                    self._log.sync()
                self._checkpoints.run()
        return []

    def _append(self, job: Append) -> list[int]:
        # A copy of a record that was removed while compaction had it in hand must not bring it back.
        is_alive = [not record.replaces or self._catalog.find(record.replaces) is not None for record in job.records]
        alive, body = job.records, job.body
        if not all(is_alive):
            alive = list(compress(job.records, is_alive))
            body = Body.of(job.forms, alive)
        if not alive:
            return [0] * len(job.records)
        counts = [pages_of(shared.form.size_bytes) for shared in job.forms]
        payloads = [(record.page, counts[record.form_index]) for record in alive]
        with self._catalog.lock:
            self._catalog.copied.update(
                (record.replaces, counts[record.form_index] * PAGE) for record in alive if record.replaces
            )
        written = self._log.append(body, payloads, memoryview(job.buffer)[: job.used_bytes], job.header_bytes)
        self._checkpoints.add(location_of(written.number, written.page), written.header)
        begin = location_of(written.number, written.first)
        return [begin + record.page if alive else 0 for record, alive in zip(job.records, is_alive, strict=True)]

    def _bury(self, locations: Sequence[int]) -> None:
        if not locations:
            return
        self._log.append_tombstones(locations)
        with self._catalog.lock:
            self._catalog.unwritten.difference_update(locations)

    def _retire(self, segments: Sequence[Segment]) -> None:
        if self._fsync is not Fsync.NEVER:
            self._log.sync()
        self._disk.reached("retire.durable")
        # A tombstone never lies in an older file than what it ends, and its file must not go first.
        for segment in sorted(segments, key=lambda segment: segment.number):
            self._disk.delete(segment.path)
            if self._fsync is not Fsync.NEVER:
                self._disk.sync_directory(segment.path.parent)
            self._files.forget(segment.path)
            self._catalog.drop(segment.number)
            self._checkpoints.forget_file(segment.number)
            self._disk.reached("retire.deleted")

    def _tick(self, *, with_checkpoint: bool) -> None:
        self._answer_held(is_forced=True)
        try:
            if self._fsync is not Fsync.NEVER:
                self._log.sync()
        except OSError as error:
            self._failed(from_os(error, "making writes durable"))
            return
        if with_checkpoint:
            self._disk.reached("checkpoint.begun")
            self._checkpoints.run()
            self._disk.reached("checkpoint.done")

    def _undo(self, locations: Sequence[int]) -> None:
        self._kill(locations)
        try:
            self._bury(locations)
        except OSError as error:
            self._failed(from_os(error, "undoing a late write"))

    def _kill(self, locations: Sequence[int]) -> None:
        for location in locations:
            self._catalog.kill(location)

    def _fail(self, job: Job, error: OSError, doing: str) -> None:
        failure = from_os(error, doing)
        self._failed(failure)
        _answer(job, failure)

    def _release(self, job: Job) -> None:
        if isinstance(job, Append):
            self._gate.leave(job.used_bytes)
            self._pool.give(job.buffer)


def _answer(job: Job, answer: list[int] | MeshError) -> bool:
    """False when nobody waits any more."""
    try:
        if isinstance(answer, MeshError):
            job.done.set_exception(answer)
        else:
            job.done.set_result(answer)
    except InvalidStateError:
        return False
    return True
