"""Copies payloads into aligned memory and hands them to the writer."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import xxhash
from shoal_common.errors import ChecksumMismatch, MeshError
from shoal_common.kv_transport.buffers import Buffer

from shoal_kv_cache.core.entries import Entry
from shoal_kv_cache.tiers.descriptions import GroupForm, Record, encode_form
from shoal_kv_cache.tiers.ssd.aligned import AlignedPool, Gate
from shoal_kv_cache.tiers.ssd.catalog import Catalog
from shoal_kv_cache.tiers.ssd.errors import SsdBusy, SsdTimeout
from shoal_kv_cache.tiers.ssd.health import Health
from shoal_kv_cache.tiers.ssd.layout import PAGE, Body, header_pages, pages_of
from shoal_kv_cache.tiers.ssd.writer import Append, Remove, Writer

Copy: TypeAlias = tuple[GroupForm, Record, Buffer]
"""A payload with its description."""
STAGE_BYTES = 3 << 20
"""What is written in one go."""
MAX_STAGED_BYTES = 2 * STAGE_BYTES
"""What may wait to be written: one is filled while the other is written, and both stay in the processor's cache."""
# Of what is usual, in a call's first batch.
_FIRST_PART = 6
# Bounds on a batch's header, which must stay below MAX_HEADER_BYTES whatever the names' lengths.
_MAX_RECORDS = 2048
_MAX_FORMS = 4
# Left for the header in a buffer; a batch with a longer one gets a buffer of its own.
_USUAL_HEADER_BYTES = 2 * PAGE


@dataclass(slots=True)
class _Batch:
    """What is written as one: its forms with the pages of a payload of each, and the pages of all."""

    copies: list[Copy] = field(default_factory=list)
    forms: dict[GroupForm, int] = field(default_factory=dict)
    page_count: int = 0


class Staging:
    """Cuts what is to be written into batches, one piece of aligned memory each. Safe to use from several threads."""

    def __init__(self, writer: Writer, catalog: Catalog, pool: AlignedPool, gate: Gate, health: Health) -> None:
        self._writer, self._catalog, self._pool, self._gate, self._health = writer, catalog, pool, gate, health

    def append(self, items: Sequence[tuple[Entry, Buffer]], give_up_at_s: float) -> list[int]:
        """As SsdTier.append."""
        return self.append_copies(_copies(items), give_up_at_s)

    def append_copies(self, copies: Iterable[Copy], give_up_at_s: float) -> list[int]:
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

    def _batches(self, copies: Iterable[Copy]) -> Iterator[tuple[_Batch, bool]]:
        """What is written as one, and whether it is the last. The first is small: the disk waits for it."""
        max_pages = (self._pool.buffer_bytes - _USUAL_HEADER_BYTES) // PAGE // _FIRST_PART
        batch = _Batch()
        for copy in copies:
            shared = copy[0]
            page_count = batch.forms.get(shared) or pages_of(shared.form.size_bytes)
            is_long = len(batch.copies) >= _MAX_RECORDS or len(batch.forms) >= _MAX_FORMS
            if batch.copies and (is_long or batch.page_count + page_count > max_pages):
                yield batch, False
                batch = _Batch()
                max_pages = (self._pool.buffer_bytes - _USUAL_HEADER_BYTES) // PAGE
            batch.forms[shared] = page_count
            batch.page_count += page_count
            batch.copies.append(copy)
        if batch.copies:
            yield batch, True

    def _stage(self, batch: _Batch, give_up_at_s: float) -> Append:
        forms = list(batch.forms)
        header_bytes = header_pages(sum(len(encode_form(shared)) for shared in forms), len(batch.copies)) * PAGE
        used_bytes = header_bytes + batch.page_count * PAGE
        if not self._gate.enter(used_bytes, give_up_at_s):
            error = SsdBusy(f"{used_bytes} bytes found no room to be written from", wanted_bytes=used_bytes)
            self._health.written(error)
            raise error
        buffer = self._pool.take(used_bytes)
        try:
            records = _fill(memoryview(buffer)[header_bytes:used_bytes], batch)
        except ChecksumMismatch:
            self._pool.give(buffer)
            self._gate.leave(used_bytes)
            raise
        return Append(
            forms=forms,
            records=records,
            body=Body.of(forms, records),
            buffer=buffer,
            used_bytes=used_bytes,
            header_bytes=header_bytes,
        )

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


def _copies(items: Iterable[tuple[Entry, Buffer]]) -> Iterator[Copy]:
    """Made while others are written already."""
    known: dict[tuple[int, int], GroupForm] = {}
    for entry, payload in items:
        (kind, block_hash), ids = entry.key, (id(entry.group), id(entry.form))
        shared = known.get(ids)
        if shared is None:
            shared = known[ids] = GroupForm(entry.group, entry.form)
        yield shared, Record(kind, 0, entry.position_end, 0, entry.checksum, 0, block_hash, entry.parent_hash), payload


def _fill(memory: memoryview, batch: _Batch) -> list[Record]:
    """Copies payloads, each to the begin of a page, and checks the copies. Raises ChecksumMismatch.

    Little is done for each: as long as this holds the interpreter, the writer cannot begin its next write.
    """
    to = np.frombuffer(memory, np.uint8)
    numbers = {shared: number for number, shared in enumerate(batch.forms)}
    records: list[Record] = []
    page = 0
    for shared, record, payload in batch.copies:
        begin, size_bytes = page * PAGE, shared.form.size_bytes
        view = memoryview(payload)
        if view.nbytes != size_bytes:
            raise _mismatch(record, shared, view.nbytes)
        copy = to[begin : begin + size_bytes]
        copy[:] = np.frombuffer(view, np.uint8)
        if xxhash.xxh3_64_intdigest(copy.data) != record.checksum:
            raise _mismatch(record, shared, size_bytes)
        kind, _, position_end, _, checksum, replaces, block_hash, parent_hash = record
        form_index = numbers[shared]
        records.append(Record(kind, form_index, position_end, page, checksum, replaces, block_hash, parent_hash))
        page += batch.forms[shared]
        to[begin + size_bytes : page * PAGE] = 0
    return records


def _mismatch(record: Record, shared: GroupForm, size_bytes: int) -> ChecksumMismatch:
    return ChecksumMismatch(
        f"a payload that ends at position {record.position_end} is damaged: {size_bytes} of"
        f" {shared.form.size_bytes} bytes",
        position_end=record.position_end,
        size_bytes=size_bytes,
        expected_bytes=shared.form.size_bytes,
    )
