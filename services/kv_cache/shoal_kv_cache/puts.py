"""One put: announced, filled, then visible at once, or nothing."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.common.v1 import kv_transport_pb2 as transport_pb
from shoal.kv_cache.v1 import kv_cache_service_pb2 as pb
from shoal_common.errors import InvalidArgument, MeshError
from shoal_common.kv_transport import ITEM_BYTES, PayloadSpec, verify

from shoal_kv_cache.core.entries import BLOCK_TOKENS, HASH_BYTES, Entry, Key, Kind
from shoal_kv_cache.store import PAYLOAD_KIND, Store

_KIND = {payload_kind: kind for kind, payload_kind in PAYLOAD_KIND.items()}
MAX_PAYLOADS = 1024
MAX_PAYLOAD_BYTES = 64 << 20


class Put:
    """Collects the payloads of one put. Invariant: what it stored is discarded unless it is committed."""

    def __init__(self, store: Store, begin: pb.PutBegin) -> None:
        """Raises InvalidArgument (MALFORMED_PAYLOAD) naming the field."""
        if len(begin.payloads) > MAX_PAYLOADS:
            raise _malformed("begin.payloads", f"{len(begin.payloads)} payloads, at most {MAX_PAYLOADS}")
        if len(begin.parent_hashes) != len(begin.payloads):
            raise _malformed("begin.parent_hashes", f"{len(begin.parent_hashes)} for {len(begin.payloads)} payloads")
        for index, payload in enumerate(begin.payloads):
            _check(f"begin.payloads[{index}]", payload, begin.kv_id)
            if len(begin.parent_hashes[index]) != HASH_BYTES:
                raise _malformed(f"begin.parent_hashes[{index}]", f"must be {HASH_BYTES} bytes")
        self._store, self._begin = store, begin
        self._wanted = [
            index
            for index, payload in enumerate(begin.payloads)
            if Key(_KIND[payload.kind], payload.block_hash) not in store.index
        ]
        self._pending = list(self._wanted)
        self._buffer = bytearray()
        self._entries: list[Entry] = []
        self._failure: MeshError | None = None

    @property
    def wanted_ids(self) -> Sequence[int]:
        """payload_id of what is not held yet, in the order in which it must be sent."""
        return [self._begin.payloads[index].payload_id for index in self._wanted]

    def fill(self, data: pb.PutData) -> None:
        """Takes the next bytes. A failure waits for `commit`: a writer in full flow would not hear of it before.

        After one nothing more is kept.
        """
        if self._failure is None:
            try:
                self._take(data)
            except MeshError as error:
                self._failure = error
                self.discard()

    def commit(self) -> int:
        """Makes everything visible; returns how many were new.

        Raises what failed: InvalidArgument out of order or with payloads missing, ChecksumMismatch, ArenaFull.
        """
        if self._failure is not None:
            raise self._failure
        if self._pending:
            raise _malformed("commit", f"{len(self._pending)} payloads are missing")
        entries, self._entries = self._entries, []
        return self._store.commit(entries)

    def discard(self) -> None:
        """Gives back what was not committed. Safe to repeat."""
        self._buffer = bytearray()
        entries, self._entries = self._entries, []
        self._store.discard(entries)

    def _take(self, data: pb.PutData) -> None:
        if not self._pending:
            raise _malformed("data", "all wanted payloads are sent")
        payload = self._begin.payloads[self._pending[0]]
        end = len(self._buffer) + len(data.data)
        if data.payload_id != payload.payload_id or data.offset != len(self._buffer) or end > payload.size_bytes:
            raise _malformed("data", f"payload {payload.payload_id} goes on at byte {len(self._buffer)}")
        self._buffer += data.data
        if end == payload.size_bytes:
            verify(payload, self._buffer)
            self._entries.append(self._entry(self._pending.pop(0), self._store.make_room(self._buffer)))
            self._buffer = bytearray()

    def _entry(self, index: int, location: int) -> Entry:
        payload, begin = self._begin.payloads[index], self._begin
        return Entry(
            key=Key(_KIND[payload.kind], payload.block_hash),
            parent_hash=begin.parent_hashes[index],
            kv_id=begin.kv_id,
            numerics_id=begin.numerics_id,
            tenant_tag=begin.tenant_tag,
            position_begin=payload.position_begin,
            position_end=payload.position_end,
            shape=tuple(payload.shape),
            dtype=payload.dtype,
            size_bytes=payload.size_bytes,
            checksum=payload.checksum,
            location=location,
        )


def _check(where: str, payload: transport_pb.Payload, kv_id: str) -> None:
    if payload.kind not in _KIND:
        raise _malformed(f"{where}.kind", "only blocks and encoder windows are stored")
    if len(payload.block_hash) != HASH_BYTES:
        raise _malformed(f"{where}.block_hash", f"must be {HASH_BYTES} bytes")
    if payload.kv_id != kv_id:
        raise _malformed(f"{where}.kv_id", "differs from the put's")
    if payload.position_end % BLOCK_TOKENS or not 0 <= payload.position_begin < payload.position_end:
        raise _malformed(f"{where}.position_end", f"must be a multiple of {BLOCK_TOKENS} above position_begin")
    if _KIND[payload.kind] is Kind.BLOCK and payload.position_end - payload.position_begin != BLOCK_TOKENS:
        raise _malformed(f"{where}.position_begin", f"a block is {BLOCK_TOKENS} positions")
    if payload.dtype not in ITEM_BYTES:
        raise _malformed(f"{where}.dtype", f"{payload.dtype!r} is not stored")
    spec = PayloadSpec(
        kind=payload.kind,
        position_begin=payload.position_begin,
        position_end=payload.position_end,
        shape=tuple(payload.shape),
        dtype=payload.dtype,
        kv_id=payload.kv_id,
    )
    if not 0 < payload.size_bytes <= MAX_PAYLOAD_BYTES or spec.size_bytes != payload.size_bytes:
        raise _malformed(f"{where}.size_bytes", f"{payload.size_bytes} given, {spec.size_bytes} by shape")


def _malformed(field: str, description: str) -> InvalidArgument:
    return InvalidArgument.at(field, description, reason="MALFORMED_PAYLOAD")
