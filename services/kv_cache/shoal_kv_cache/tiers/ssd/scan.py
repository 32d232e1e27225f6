"""Reads what batches a segment file has, without the index."""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

from shoal_kv_cache.tiers.descriptions import Malformed
from shoal_kv_cache.tiers.ssd.aligned import AlignedPool
from shoal_kv_cache.tiers.ssd.disk import Disk
from shoal_kv_cache.tiers.ssd.layout import (
    MAX_HEADER_BYTES,
    PAGE,
    Batch,
    FileHeader,
    batch_header_bytes,
    decode_batch,
    decode_file_header,
    pages_of,
    peek_file_header,
)

_CHUNK_BYTES = 1 << 20
_MAX_PAYLOAD_PAGES = 1 << 16


class Scanner:
    """Walks the batches of one file. Damaged stretches are passed over: the next header that is valid goes on.

    Raises OSError where the disk does.
    """

    def __init__(self, disk: Disk, pool: AlignedPool, descriptor: int, size_bytes: int) -> None:
        self._disk, self._pool, self._descriptor = disk, pool, descriptor
        self.end = size_bytes // PAGE

    def file_header(self, number: int) -> FileHeader | None:
        """The file's header: of its first page, else as the first batch has it; None if neither can be read.

        Raises OtherVersion.
        """
        try:
            header = decode_file_header(self._read(0, PAGE))
            return header if header.number == number else None
        except Malformed:
            pass
        for page in range(1, self.end):
            try:
                header = peek_file_header(self._read(page, PAGE))
                if header.number == number and self.batch_at(header, page) is not None:
                    return header
            except Malformed:
                continue
        return None

    def batches(self, header: FileHeader, begin: int) -> Iterator[Batch]:
        """The valid batches at or after page `begin`, in order."""
        page = begin
        while page < self.end:
            batch = self.batch_at(header, page)
            if batch is None:
                found = self._next_header(header, page + 1)
                if found is None:
                    return
                page = found
                continue
            yield batch
            page += batch.page_count

    def batch_at(self, header: FileHeader, page: int) -> Batch | None:
        """The batch whose header is at `page`, if it is whole."""
        try:
            first = self._read(page, PAGE)
            header_bytes = batch_header_bytes(header, page, first)
            whole = first if header_bytes <= PAGE else self._read(page, header_bytes)
            return decode_batch(header, page, whole)
        except Malformed:
            return None

    def is_intact(self, page: int, size_bytes: int, checksum: int) -> bool:
        """Whether the payload at `page` is all there."""
        if page + pages_of(size_bytes) > self.end or pages_of(size_bytes) > _MAX_PAYLOAD_PAGES:
            return False
        digest, left = xxhash.xxh3_64(), size_bytes
        while left > 0:
            data = self._read(page, min(left, _CHUNK_BYTES))
            digest.update(data)
            page, left = page + _CHUNK_BYTES // PAGE, left - len(data)
            if not data:
                return False
        return digest.intdigest() == checksum

    def _next_header(self, header: FileHeader, page: int) -> int | None:
        step = _CHUNK_BYTES // PAGE
        while page < self.end:
            data = memoryview(self._read(page, _CHUNK_BYTES))
            for index in range(0, len(data), PAGE):
                try:
                    batch_header_bytes(header, page + index // PAGE, data[index : index + PAGE])
                except Malformed:
                    continue
                if self.batch_at(header, page + index // PAGE) is not None:
                    return page + index // PAGE
            page += step
        return None

    def _read(self, page: int, size_bytes: int) -> bytes:
        size_bytes = min(size_bytes, (self.end - page) * PAGE, max(_CHUNK_BYTES, MAX_HEADER_BYTES))
        if size_bytes <= 0:
            return b""
        buffer = self._pool.take(size_bytes)
        try:
            view = memoryview(buffer)[: pages_of(size_bytes) * PAGE]
            count = self._disk.read(self._descriptor, view, page * PAGE)
            return bytes(view[: min(count, size_bytes)])
        finally:
            self._pool.give(buffer)
