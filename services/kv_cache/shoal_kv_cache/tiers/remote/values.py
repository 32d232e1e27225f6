"""What lies under a name: a header that describes the payload, and the payload. Pure."""

from __future__ import annotations

import struct

import xxhash
from shoal_common.errors import ChecksumMismatch
from shoal_common.kv_transport.buffers import Buffer

from shoal_kv_cache.core.entries import Entry
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
from shoal_kv_cache.tiers.remote.names import Name
from shoal_kv_cache.tiers.remote.store import Loaded

_HEAD = struct.Struct("<8sHxxI")
_CHECKSUM = struct.Struct("<Q")
_MAGIC = b"SHOALVAL"
_VERSION = 1
MAX_HEADER_BYTES = 4096


def encode_header(entry: Entry) -> bytes:
    """What comes before the payload. Raises ValueError if the group's names are too long for it."""
    key = entry.key
    record = Record(key.kind, 0, entry.position_end, 0, entry.checksum, 0, key.block_hash, entry.parent_hash)
    body = pack_record(record) + encode_form(GroupForm(entry.group, entry.form))
    head = _HEAD.pack(_MAGIC, _VERSION, len(body)) + body
    if len(head) + _CHECKSUM.size > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {len(head)} bytes")
    return head + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head))


def decode(name: Name, value: Buffer) -> Loaded:
    """The payload that `value` holds. Raises ChecksumMismatch unless it is the one that `name` names, and whole."""
    view = memoryview(value)
    try:
        entry, begin = _described(view)
    except (Malformed, struct.error, KeyError) as error:
        raise _mismatch(name, f"its header is damaged ({error})") from error
    if (entry.group, entry.key) != name:
        raise _mismatch(name, "it is another one")
    payload = view[begin:]
    if len(payload) != entry.size_bytes or xxhash.xxh3_64_intdigest(payload) != entry.checksum:
        raise _mismatch(name, f"{len(payload)} of {entry.size_bytes} bytes")
    return Loaded(entry, payload)


def _described(view: memoryview) -> tuple[Entry, int]:
    magic, version, body_bytes = _HEAD.unpack_from(view)
    end = _HEAD.size + body_bytes
    if magic != _MAGIC or version != _VERSION or end > MAX_HEADER_BYTES:
        raise Malformed("not a value of this version")
    (checksum,) = _CHECKSUM.unpack_from(view, end)
    if checksum != xxhash.xxh3_64_intdigest(view[:end]):
        raise Malformed("checksum")
    shared, _ = decode_form(view, _HEAD.size + RECORD_BYTES)
    return unpack_record(view, _HEAD.size).entry(shared), end + _CHECKSUM.size


def _mismatch(name: Name, what: str) -> ChecksumMismatch:
    return ChecksumMismatch(f"a value of the remote store is damaged: {what}", name=name.text)
