"""What a payload is and how its bytes are checked."""

from __future__ import annotations

import math
from dataclasses import dataclass

import xxhash
from shoal.common.v1 import kv_transport_pb2 as pb

from shoal_common.errors import ChecksumMismatch, InvalidArgument
from shoal_common.kv_transport.buffers import Buffer

ITEM_BYTES = {"uint8": 1, "float32": 4}
"""Element types that travel, and their sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadSpec:
    """Logical rows: what they are, where they belong. Sizes and checksums come from the bytes.

    kind            PayloadKind
    position_begin  first token position
    position_end    one past the last
    shape           of the array; C order
    dtype           "uint8" or "float32", little endian
    kv_id           layout, formats and weights
    block_hash      32 bytes for blocks and snapshots, else empty
    """

    kind: pb.PayloadKind.ValueType
    position_begin: int
    position_end: int
    shape: tuple[int, ...]
    dtype: str
    kv_id: str
    block_hash: bytes = b""

    @property
    def size_bytes(self) -> int:
        """Bytes that the array takes. Raises InvalidArgument for an unknown dtype."""
        return _size_bytes(self.shape, self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """Payloads of one kind and size whose positions follow each other, as PayloadRun describes them.

    kind            PayloadKind of each
    position_begin  first position of the first
    positions       of each
    shape, dtype    of each array
    kv_id           layout, formats and weights
    """

    kind: pb.PayloadKind.ValueType
    position_begin: int
    positions: int
    shape: tuple[int, ...]
    dtype: str
    kv_id: str

    @property
    def size_bytes(self) -> int:
        """Bytes of each array. Raises InvalidArgument for an unknown dtype."""
        return _size_bytes(self.shape, self.dtype)


def checksum_of(data: Buffer) -> int:
    """XXH3-64 of the bytes."""
    return xxhash.xxh3_64_intdigest(memoryview(data))


def describe(payload_id: int, spec: PayloadSpec, data: Buffer) -> pb.Payload:
    """The message that announces `data`. Raises InvalidArgument when the bytes do not fill the shape."""
    size_bytes = memoryview(data).nbytes
    if size_bytes != spec.size_bytes:
        raise InvalidArgument.at(
            "payload.shape", f"{spec.size_bytes} bytes by shape, {size_bytes} given", reason="MALFORMED_PAYLOAD"
        )
    return pb.Payload(
        payload_id=payload_id,
        kind=spec.kind,
        position_begin=spec.position_begin,
        position_end=spec.position_end,
        shape=spec.shape,
        dtype=spec.dtype,
        kv_id=spec.kv_id,
        size_bytes=size_bytes,
        checksum=checksum_of(data),
        block_hash=spec.block_hash,
    )


def verify(payload: pb.Payload, data: Buffer) -> None:
    """Raises ChecksumMismatch unless `data` is what `payload` announces."""
    size_bytes = memoryview(data).nbytes
    if size_bytes != payload.size_bytes or checksum_of(data) != payload.checksum:
        raise ChecksumMismatch(
            f"payload {payload.payload_id} of positions {payload.position_begin}..{payload.position_end} is damaged:"
            f" {size_bytes} of {payload.size_bytes} bytes",
            payload_id=payload.payload_id,
            position_begin=payload.position_begin,
            position_end=payload.position_end,
            size_bytes=size_bytes,
            expected_bytes=payload.size_bytes,
        )


def _size_bytes(shape: tuple[int, ...], dtype: str) -> int:
    if dtype not in ITEM_BYTES:
        raise InvalidArgument.at("payload.dtype", f"{dtype!r} does not travel", reason="MALFORMED_PAYLOAD")
    return math.prod(shape) * ITEM_BYTES[dtype]
