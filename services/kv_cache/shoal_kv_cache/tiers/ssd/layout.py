"""Bytes of a segment file. Pure.

A file is a header page and then batches, one after the other. A batch is a header of whole pages that describes its
records, then their payloads, each at the start of a page. Little endian. A header is valid only where it was written:
it names its file (number and random id) and its own page, and is checksummed; so no payload can pass for one.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import xxhash
from shoal_common.kv_transport.buffers import Buffer

from shoal_kv_cache.tiers.descriptions import (
    RECORD_BYTES,
    GroupForm,
    Malformed,
    Record,
    decode_form,
    encode_form,
    pack_record,
    unpack_record,
)

PAGE = 4096
"""Unit of place, and what O_DIRECT wants of memory, offsets and sizes."""
PAGE_BITS = 24
MAX_FILE_BYTES = PAGE << PAGE_BITS
FILE_ID_BYTES = 16
MAX_HEADER_BYTES = 1 << 20
VERSION = 1

_FILE = struct.Struct("<8sHxxIQ16sQ")
_BATCH = struct.Struct("<8sBxxxIIIIIQ16s")
_CHECKSUM = struct.Struct("<Q")
_FILE_MAGIC, _BATCH_MAGIC = b"SHOALSEG", b"SHOALBAT"
RECORD_ROW = np.dtype(
    [
        ("kind", "u1"),
        ("pad", "V3"),
        ("form_index", "<u4"),
        ("position_end", "<u4"),
        ("page", "<u4"),
        ("checksum", "<u8"),
        ("replaces", "<u8"),
        ("block_hash", "V32"),
        ("parent_hash", "V32"),
    ]
)
"""A record as pack_record writes it, for many at once."""
assert RECORD_ROW.itemsize == RECORD_BYTES
MAX_TOMBSTONES = (MAX_HEADER_BYTES - _BATCH.size - _CHECKSUM.size) // 8


class OtherVersion(Exception):
    """A segment file that this version cannot read and must not touch."""

    def __init__(self, version: int) -> None:
        super().__init__(f"segment files of version {version}, this is version {VERSION}")
        self.version = version


class FileHeader(NamedTuple):
    """First page of a segment file."""

    number: int
    file_id: bytes


class BatchKind(IntEnum):
    """What a batch holds."""

    RECORDS = 1
    TOMBSTONES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A decoded batch header. page_count counts header and payloads; tombstones are locations, in whichever file.

    header  the header as it lies in the file, without what fills its last page
    """

    page: int
    page_count: int
    header: bytes
    forms: Sequence[GroupForm] = ()
    records: Sequence[Record] = ()
    tombstones: Sequence[int] = ()


class Body(NamedTuple):
    """What a batch header says of its records, wherever the batch will lie: pages count from the first payload."""

    form_count: int
    record_count: int
    forms: bytes
    records: bytes

    @classmethod
    def of(cls, forms: Sequence[GroupForm], records: Sequence[Record]) -> Body:
        """Of records whose pages count so."""
        return cls(
            len(forms), len(records), b"".join(map(encode_form, forms)), b"".join([pack_record(one) for one in records])
        )


def pages_of(size_bytes: int) -> int:
    """Pages that so many bytes take."""
    return -(-size_bytes // PAGE)


def location_of(number: int, page: int) -> int:
    """Place of a payload among all files."""
    return number << PAGE_BITS | page


def number_and_page(location: int) -> tuple[int, int]:
    """The file and the page of a location."""
    return location >> PAGE_BITS, location & ((1 << PAGE_BITS) - 1)


def encode_file_header(header: FileHeader) -> bytes:
    """One page."""
    fields = (_FILE_MAGIC, VERSION, PAGE, header.number, header.file_id)
    unsigned = _FILE.pack(*fields, 0)[: -_CHECKSUM.size]
    return (unsigned + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(unsigned))).ljust(PAGE, b"\0")


def decode_file_header(data: Buffer) -> FileHeader:
    """Raises Malformed, and OtherVersion where it is whole and says so."""
    if len(data) < _FILE.size:
        raise Malformed("too short")
    magic, version, page, number, file_id, checksum = _FILE.unpack_from(data)
    unsigned = memoryview(data)[: _FILE.size - _CHECKSUM.size]
    if magic != _FILE_MAGIC or checksum != xxhash.xxh3_64_intdigest(unsigned):
        raise Malformed("not a segment file")
    if version != VERSION:
        raise OtherVersion(version)
    if page != PAGE:
        raise Malformed(f"pages of {page} bytes")
    return FileHeader(number, file_id)


def header_pages(form_bytes: int, record_count: int) -> int:
    """Pages of the header of a batch of records."""
    return pages_of(_BATCH.size + form_bytes + record_count * RECORD_BYTES + _CHECKSUM.size)


def encode_records(header: FileHeader, page: int, body: Body, first: int, end: int) -> bytes:
    """Header of a batch at `page` with payloads from page `first` to `end`; without what fills its last page."""
    rows = np.frombuffer(bytearray(body.records), RECORD_ROW)
    rows["page"] += first
    packed = body.forms + rows.tobytes()
    return _sealed(header, BatchKind.RECORDS, page, body.form_count, body.record_count, end - page, packed)


def encode_tombstones(header: FileHeader, page: int, locations: Sequence[int]) -> bytes:
    """A batch of tombstones at `page`, at most MAX_TOMBSTONES; whole pages."""
    body = struct.pack(f"<{len(locations)}Q", *locations)
    page_count = pages_of(_BATCH.size + len(body) + _CHECKSUM.size)
    sealed = _sealed(header, BatchKind.TOMBSTONES, page, 0, len(locations), page_count, body)
    return sealed.ljust(page_count * PAGE, b"\0")


def batch_header_bytes(header: FileHeader, page: int, data: Buffer) -> int:
    """How many bytes the header that begins in `data` has; says nothing of its content. Raises Malformed."""
    if len(data) < _BATCH.size:
        raise Malformed("too short")
    magic, _, _, _, header_bytes, own_page, page_count, number, file_id = _BATCH.unpack_from(data)
    is_ours = magic == _BATCH_MAGIC and own_page == page and (number, file_id) == header
    if not is_ours or not _BATCH.size < header_bytes <= MAX_HEADER_BYTES or page_count < pages_of(header_bytes):
        raise Malformed("no batch begins here")
    return int(header_bytes)


def peek_file_header(data: Buffer) -> FileHeader:
    """Number and id of the file that a batch header names, to be checked by decoding it. Raises Malformed."""
    if len(data) < _BATCH.size or bytes(data[: len(_BATCH_MAGIC)]) != _BATCH_MAGIC:
        raise Malformed("no batch begins here")
    *_, number, file_id = _BATCH.unpack_from(data)
    return FileHeader(number, file_id)


def split_records(header: FileHeader, page: int, data: Buffer) -> tuple[int, Body]:
    """Page count and content of a batch of records; pages are the file's. Raises Malformed."""
    kind, page_count, form_count, record_count, whole = _unsealed(header, page, data)
    rows_end = len(whole) - _CHECKSUM.size
    rows_begin = rows_end - record_count * RECORD_BYTES
    if kind != BatchKind.RECORDS or rows_begin < _BATCH.size:
        raise Malformed("not a batch of records")
    return page_count, Body(form_count, record_count, whole[_BATCH.size : rows_begin], whole[rows_begin:rows_end])


def decode_forms(packed: Buffer, form_count: int, offset: int = 0) -> list[GroupForm]:
    """The forms that `packed` has from `offset` on. Raises Malformed."""
    forms = []
    for _ in range(form_count):
        shared, offset = decode_form(packed, offset)
        forms.append(shared)
    return forms


def decode_batch(header: FileHeader, page: int, data: Buffer) -> Batch:
    """The batch whose whole header `data` begins with. Raises Malformed."""
    kind, page_count, form_count, count, whole = _unsealed(header, page, data)
    try:
        if kind == BatchKind.TOMBSTONES:
            tombstones = struct.unpack_from(f"<{count}Q", whole, _BATCH.size)
            return Batch(page=page, page_count=page_count, header=whole, tombstones=tombstones)
        forms = decode_forms(whole, form_count, _BATCH.size)
        begin = len(whole) - _CHECKSUM.size - count * RECORD_BYTES
        records = [unpack_record(whole, begin + index * RECORD_BYTES) for index in range(count)]
    except (struct.error, KeyError) as error:
        raise Malformed(str(error)) from error
    return Batch(page=page, page_count=page_count, header=whole, forms=forms, records=records)


def _unsealed(header: FileHeader, page: int, data: Buffer) -> tuple[int, int, int, int, bytes]:
    """Kind, page count, form count, count and all bytes of a header. Raises Malformed."""
    header_bytes = batch_header_bytes(header, page, data)
    if len(data) < header_bytes:
        raise Malformed("the header is cut")
    whole = bytes(memoryview(data)[:header_bytes])
    body_end = header_bytes - _CHECKSUM.size
    if _CHECKSUM.unpack_from(whole, body_end)[0] != xxhash.xxh3_64_intdigest(memoryview(whole)[:body_end]):
        raise Malformed("the header is damaged")
    _, kind, form_count, count, _, _, page_count, _, _ = _BATCH.unpack_from(whole)
    return kind, page_count, form_count, count, whole


def _sealed(
    header: FileHeader, kind: BatchKind, page: int, form_count: int, count: int, page_count: int, body: bytes
) -> bytes:
    header_bytes = _BATCH.size + len(body) + _CHECKSUM.size
    head = _BATCH.pack(
        _BATCH_MAGIC, kind, form_count, count, header_bytes, page, page_count, header.number, header.file_id
    )
    checksum = xxhash.xxh3_64_intdigest(head + body)
    return b"".join((head, body, _CHECKSUM.pack(checksum)))
