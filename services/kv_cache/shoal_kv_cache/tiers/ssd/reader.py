"""Reads payloads: neighbours together, verified before anybody sees them, bounded in time."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import xxhash
from shoal_common.errors import ChecksumMismatch, MeshError, NotFound

from shoal_kv_cache.tiers.ssd.aligned import AlignedPool, Gate, copy_bytes
from shoal_kv_cache.tiers.ssd.catalog import Catalog
from shoal_kv_cache.tiers.ssd.disk import Disk
from shoal_kv_cache.tiers.ssd.errors import SsdBusy, SsdTimeout, from_os
from shoal_kv_cache.tiers.ssd.layout import PAGE, number_and_page, pages_of
from shoal_kv_cache.tiers.ssd.segments import OpenFiles
from shoal_kv_cache.tiers.ssd.values import Read

BUFFER_BYTES = 2 << 20
CHUNK_BYTES = 1 << 20
"""What is read in one go, where a payload is not larger: few bytes, checked and copied while they are in the cache."""
# A batch's header between two payloads is cheaper read than gone around.
_MAX_GAP_PAGES = 4


Result: TypeAlias = bytes | MeshError | None


@dataclass(slots=True, eq=False)
class _Chunk:
    """Neighbours on disk: places of the reads in the caller's list, and their pages counted from `page`."""

    path: Path
    page: int
    end: int
    places: list[int]
    reads: list[Read]
    offsets: list[int]
    done: Future[list[Result]] = field(default_factory=Future)

    @property
    def size_bytes(self) -> int:
        return (self.end - self.page) * PAGE


class Reader:
    """A few threads that read into memory of their own, and copy out of it what is right.

    So a disk that answers late writes into nothing that the caller has given to others meanwhile. Who gives up
    cancels; what began to be copied before that ends first.
    """

    def __init__(
        self,
        catalog: Catalog,
        files: OpenFiles,
        disk: Disk,
        *,
        pool: AlignedPool,
        gate: Gate,
        threads: int,
        finished: Callable[[int, MeshError | None], None],
    ) -> None:
        """finished: told the bytes of payloads and what they came to."""
        self._catalog, self._files, self._disk = catalog, files, disk
        self._pool, self._gate, self._finished = pool, gate, finished
        self._chunks: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"ssd-reader-{index}", daemon=True) for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def read_many(self, reads: Sequence[Read], timeout_s: float) -> list[Result]:
        """As SsdTier.read_many."""
        give_up_at_s = time.monotonic() + timeout_s
        results: list[Result] = [None] * len(reads)
        waiting: deque[_Chunk] = deque()
        for chunk in self._chunked(reads, results):
            # Nothing is held while this waits for others.
            while waiting and (len(waiting) > len(self._threads) or waiting[0].done.done()):
                self._collect(waiting.popleft(), results, give_up_at_s)
            while not (is_in := self._gate.enter(chunk.size_bytes, 0.0 if waiting else give_up_at_s)) and waiting:
                self._collect(waiting.popleft(), results, give_up_at_s)
            if is_in:
                waiting.append(chunk)
                self._chunks.put(chunk)
            else:
                self._fail(chunk, results, SsdBusy(f"{chunk.size_bytes} bytes found no room to be read into"))
        for chunk in waiting:
            self._collect(chunk, results, give_up_at_s)
        return results

    def close(self, timeout_s: float) -> None:
        """Ends the threads, those that the disk does not hold; reads that wait are answered first."""
        for _ in self._threads:
            self._chunks.put(None)
        give_up_at_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, give_up_at_s - time.monotonic()))

    def _chunked(self, reads: Sequence[Read], results: list[Result]) -> Iterator[_Chunk]:
        chunk: _Chunk | None = None
        for place in sorted(range(len(reads)), key=lambda place: reads[place].location):
            read = reads[place]
            segment = self._catalog.find(read.location)
            if segment is None:
                results[place] = NotFound(f"nothing is kept at {read.location}", location=read.location)
                continue
            page = number_and_page(read.location)[1]
            end = page + pages_of(read.size_bytes)
            is_near = (
                chunk is not None
                and chunk.path == segment.path
                and chunk.end <= page <= chunk.end + _MAX_GAP_PAGES
                and (end - chunk.page) * PAGE <= CHUNK_BYTES
            )
            if chunk is None or not is_near:
                if chunk is not None:
                    yield chunk
                chunk = _Chunk(segment.path, page, page, [], [], [])
            chunk.places.append(place)
            chunk.reads.append(read)
            chunk.offsets.append((page - chunk.page) * PAGE)
            chunk.end = end
        if chunk is not None:
            yield chunk

    def _collect(self, chunk: _Chunk, results: list[Result], give_up_at_s: float) -> None:
        try:
            found = self._wait_for(chunk, give_up_at_s)
        except MeshError as error:
            self._fail(chunk, results, error)
            return
        good_bytes = 0
        for place, read, result in zip(chunk.places, chunk.reads, found, strict=True):
            results[place] = result
            if isinstance(result, MeshError):
                self._finished(0, result)
            else:
                good_bytes += read.size_bytes
        if good_bytes:
            self._finished(good_bytes, None)

    @staticmethod
    def _wait_for(chunk: _Chunk, give_up_at_s: float) -> list[Result]:
        try:
            return chunk.done.result(max(0.0, give_up_at_s - time.monotonic()))
        except FutureTimeout:
            if chunk.done.cancel():
                raise SsdTimeout("the disk did not answer in time") from None
            return chunk.done.result()

    def _fail(self, chunk: _Chunk, results: list[Result], error: MeshError) -> None:
        for place in chunk.places:
            results[place] = error
        self._finished(0, error)

    def _run(self) -> None:
        while (chunk := self._chunks.get()) is not None:
            if not chunk.done.cancelled():
                buffer = self._pool.take(chunk.size_bytes)
                self._load(chunk, memoryview(buffer)[: chunk.size_bytes])
                self._pool.give(buffer)
            self._gate.leave(chunk.size_bytes)

    def _load(self, chunk: _Chunk, view: memoryview) -> None:
        failure: MeshError | None = None
        try:
            with self._files.use(chunk.path) as descriptor:
                view = view[: self._disk.read(descriptor, view, chunk.page * PAGE)]
        except OSError as error:
            failure = from_os(error, "reading")
        # From here on nobody can cancel.
        if not chunk.done.set_running_or_notify_cancel():
            return
        if failure is not None:
            chunk.done.set_exception(failure)
            return
        try:
            reads = zip(chunk.reads, chunk.offsets, strict=True)
            chunk.done.set_result([_deliver(read, view[offset : offset + read.size_bytes]) for read, offset in reads])
        except Exception as error:
            chunk.done.set_exception(error)


def _deliver(read: Read, data: memoryview) -> Result:
    if len(data) == read.size_bytes and xxhash.xxh3_64_intdigest(data) == read.checksum:
        if read.into is None:
            return bytes(data)
        begin = 0
        for part in read.into:
            copy_bytes(part, data[begin : begin + len(part)])
            begin += len(part)
        return None
    return ChecksumMismatch(
        f"the payload at {read.location} is damaged: {len(data)} of {read.size_bytes} bytes",
        location=read.location,
        size_bytes=len(data),
        expected_bytes=read.size_bytes,
    )
