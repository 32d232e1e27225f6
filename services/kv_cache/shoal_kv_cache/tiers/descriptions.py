"""Descriptions of payloads as bytes, wherever they are kept. Pure; little endian."""

from __future__ import annotations

import struct
from typing import NamedTuple

from shoal_common.kv_transport.buffers import Buffer

from shoal_kv_cache.core.entries import HASH_BYTES, Entry, Form, Group, Key, Kind

_FORM = struct.Struct("<HHBBIQBx")
_RECORD = struct.Struct("<BxxxIIIQQ32s32s")
RECORD_BYTES = _RECORD.size
_KIND_CODES = {Kind.BLOCK: 1, Kind.SNAPSHOT: 2}
_KINDS = {code: kind for kind, code in _KIND_CODES.items()}


class Malformed(Exception):
    """Not what it should be: damaged, torn, or never written."""


class GroupForm(NamedTuple):
    """What many records have in common."""

    group: Group
    form: Form


class Record(NamedTuple):
    """One payload in a file. `replaces` is the location that compaction copied it from, or 0."""

    kind: Kind
    form_index: int
    position_end: int
    page: int
    checksum: int
    replaces: int
    block_hash: bytes
    parent_hash: bytes

    def entry(self, shared: GroupForm) -> Entry:
        """The description that it was made from."""
        return Entry(
            Key(self.kind, self.block_hash),
            shared.group,
            self.parent_hash,
            self.position_end,
            shared.form,
            self.checksum,
        )


def encode_form(shared: GroupForm) -> bytes:
    """Group and form as bytes."""
    (kv_id, numerics_id, tag), form = (
        (_utf8(shared.group.kv_id), _utf8(shared.group.numerics_id), shared.group.tenant_tag),
        shared.form,
    )
    dtype = _utf8(form.dtype)
    fixed = _FORM.pack(
        len(kv_id), len(numerics_id), len(tag), len(dtype), form.positions, form.size_bytes, len(form.shape)
    )
    return b"".join((fixed, struct.pack(f"<{len(form.shape)}Q", *form.shape), kv_id, numerics_id, tag, dtype))


def decode_form(data: Buffer, offset: int = 0) -> tuple[GroupForm, int]:
    """The form at `offset` and the offset behind it. Raises Malformed."""
    try:
        kv_length, numerics_length, tag_length, dtype_length, positions, size_bytes, rank = _FORM.unpack_from(
            data, offset
        )
        offset += _FORM.size
        shape = struct.unpack_from(f"<{rank}Q", data, offset)
        offset += 8 * rank
        parts = []
        for length in (kv_length, numerics_length, tag_length, dtype_length):
            parts.append(bytes(data[offset : offset + length]))
            offset += length
        group = Group(parts[0].decode(), parts[1].decode(), parts[2])
        return GroupForm(group, Form(positions, shape, parts[3].decode(), size_bytes)), offset
    except (struct.error, UnicodeDecodeError) as error:
        raise Malformed(str(error)) from error


def pack_record(record: Record, first: int = 0) -> bytes:
    """Fixed size, for headers and for the index, with its page counted from `first`."""
    kind, form_index, position_end, page, checksum, replaces, block_hash, parent_hash = record
    code = _KIND_CODES[kind]
    return _RECORD.pack(code, form_index, position_end, first + page, checksum, replaces, block_hash, parent_hash)


def unpack_record(data: Buffer, offset: int = 0) -> Record:
    """Raises struct.error or KeyError."""
    code, *rest = _RECORD.unpack_from(data, offset)
    return Record(_KINDS[code], *rest)


def kind_of(code: int) -> Kind:
    """The kind that a record's first byte says. Raises KeyError."""
    return _KINDS[code]


def _utf8(text: str) -> bytes:
    return text.encode()


assert RECORD_BYTES == 32 + 2 * HASH_BYTES
