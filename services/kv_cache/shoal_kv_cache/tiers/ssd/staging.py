"""Copies payloads into aligned memory and hands them to the writer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeAlias

import xxhash
from shoal_common.errors import ChecksumMismatch, MeshError
from shoal_common.kv_transport.buffers import Buffer

from shoal_kv_cache.core.entries import Entry
from shoal_kv_cache.tiers.descriptions import GroupForm, Record
from shoal_kv_cache.tiers.ssd.aligned import AlignedPool, Gate
from shoal_kv_cache.tiers.ssd.catalog import Catalog
from shoal_kv_cache.tiers.ssd.errors import SsdBusy, SsdTimeout
from shoal_kv_cache.tiers.ssd.health import Health
from shoal_kv_cache.tiers.ssd.layout import PAGE, pages_of
from shoal_kv_cache.tiers.ssd.writer import Append, Remove, Writer

Copy: TypeAlias = tuple[GroupForm, Record, Buffer]
"""A payload with its description."""
STAGE_BYTES = 4 << 20
"""What is written in one go."""
# Bounds on a batch's header, which must stay below MAX_HEADER_BYTES whatever the names' lengths.
_MAX_RECORDS = 2048
_MAX_FORMS = 4


class Staging:
    """Cuts what is to be written into batches, one piece of aligned memory each. Safe to use from several threads."""

    def __init__(self, writer: Writer, catalog: Catalog, pool: AlignedPool, gate: Gate, health: Health) -> None:
        self._writer, self._catalog, self._pool, self._gate, self._health = writer, catalog, pool, gate, health

    def append(self, items: Sequence[tuple[Entry, Buffer]], give_up_at_s: float) -> list[int]:
        """As SsdTier.append."""
        shared: dict[tuple[int, int], GroupForm] = {}
        copies: list[Copy] = []
        for entry, payload in items:
            form = shared.setdefault((id(entry.group), id(entry.form)), GroupForm(entry.group, entry.form))
            key = entry.key
            copies.append(
                (
                    form,
                    Record(key.kind, 0, entry.position_end, 0, entry.checksum, 0, key.block_hash, entry.parent_hash),
                    payload,
                )
            )
        return self.append_copies(copies, give_up_at_s)

    def append_copies(self, copies: Sequence[Copy], give_up_at_s: float) -> list[int]:
        """The same for records; a location of 0 stands for a copy of what died meanwhile."""
        jobs: list[Append] = []
        try:
            for batch, is_last in self._batches(copies):
                job = self._stage(batch, give_up_at_s)
                job.is_last = is_last
                self._writer.submit(job)
                jobs.append(job)
            return [location for job in jobs for location in wait_for(job.done, give_up_at_s, self._health)]
        except MeshError:
            self._undo(jobs)
            raise

    def _batches(self, copies: Sequence[Copy]) -> Iterator[tuple[Sequence[Copy], bool]]:
        """What is written as one, and whether it is the last."""
        begin, size_bytes = 0, 0
        forms: set[GroupForm] = set()
        for index, (shared, _, _) in enumerate(copies):
            wanted_bytes = pages_of(shared.form.size_bytes) * PAGE
            is_long = index - begin >= _MAX_RECORDS or len(forms) >= _MAX_FORMS
            if index > begin and (is_long or size_bytes + wanted_bytes > self._pool.buffer_bytes):
                yield copies[begin:index], False
                begin, size_bytes, forms = index, 0, set()
            size_bytes += wanted_bytes
            forms.add(shared)
        if begin < len(copies):
            yield copies[begin:], True

    def _stage(self, batch: Sequence[Copy], give_up_at_s: float) -> Append:
        used_bytes = sum(pages_of(shared.form.size_bytes) for shared, _, _ in batch) * PAGE
        if not self._gate.enter(used_bytes, give_up_at_s):
            error = SsdBusy(f"{used_bytes} bytes found no room to be written from", wanted_bytes=used_bytes)
            self._health.written(error)
            raise error
        buffer = self._pool.take(used_bytes)
        view = memoryview(buffer)
        forms: dict[GroupForm, int] = {}
        records: list[Record] = []
        offset = 0
        try:
            for shared, record, payload in batch:
                end = offset + shared.form.size_bytes
                view[offset:end] = _checked(record, shared, payload)
                if xxhash.xxh3_64_intdigest(view[offset:end]) != record.checksum:
                    raise _mismatch(record, shared, shared.form.size_bytes)
                form_index = forms.setdefault(shared, len(forms))
                records.append(record._replace(form_index=form_index, page=offset // PAGE))
                offset += pages_of(shared.form.size_bytes) * PAGE
                view[end:offset] = bytes(offset - end)
        except ChecksumMismatch:
            self._pool.give(buffer)
            self._gate.leave(used_bytes)
            raise
        return Append(forms=list(forms), records=records, buffer=buffer, used_bytes=used_bytes)

    def _undo(self, jobs: Sequence[Append]) -> None:
        dead: list[int] = []
        for job in jobs:
            # The writer undoes what it finds cancelled; what is done already is undone here.
            if not job.done.cancel() and not job.done.exception():
                dead.extend(location for location in job.done.result() if location and self._catalog.kill(location))
        if dead:
            with suppress(MeshError):
                self._writer.submit(Remove(dead))


def wait_for(done: Future[list[int]], give_up_at_s: float, health: Health | None = None) -> list[int]:
    """What a job answers. Raises SsdTimeout when the time is over; the job is cancelled then."""
    try:
        return done.result(max(0.0, give_up_at_s - time.monotonic()))
    except TimeoutError:
        if not done.cancel():
            return done.result()
        error = SsdTimeout("the disk did not answer in time")
        if health is not None:
            health.written(error)
        raise error from None


def _checked(record: Record, shared: GroupForm, payload: Buffer) -> memoryview:
    view = memoryview(payload).cast("B")
    if len(view) != shared.form.size_bytes:
        raise _mismatch(record, shared, len(view))
    return view


def _mismatch(record: Record, shared: GroupForm, size_bytes: int) -> ChecksumMismatch:
    return ChecksumMismatch(
        f"a payload that ends at position {record.position_end} is damaged: {size_bytes} of"
        f" {shared.form.size_bytes} bytes",
        position_end=record.position_end,
        size_bytes=size_bytes,
        expected_bytes=shared.form.size_bytes,
    )
