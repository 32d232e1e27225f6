"""What a put may announce."""

from __future__ import annotations

import math

from shoal.common.v1 import kv_transport_pb2 as transport_pb
from shoal.kv_cache.v1 import kv_cache_service_pb2 as pb
from shoal_common.errors import InvalidArgument
from shoal_common.kv_transport import ITEM_BYTES

from shoal_kv_cache.core.entries import BLOCK_TOKENS, HASH_BYTES, Kind
from shoal_kv_cache.store import KIND

MAX_PAYLOADS = 1024
MAX_PAYLOAD_BYTES = 64 << 20
MAX_NAME_BYTES = 128
MAX_POSITIONS = 1 << 26
"""Far beyond any context: what is laid out by position must not be as long as a caller says."""
_MAX_DIMENSIONS = 8


def check_begin(begin: pb.PutBegin) -> None:
    """Raises InvalidArgument (MALFORMED_PAYLOAD) naming the first wrong field."""
    check_names(begin.kv_id, begin.numerics_id, begin.tenant_tag)
    if len(begin.payloads) > MAX_PAYLOADS:
        raise malformed("begin.payloads", f"{len(begin.payloads)} payloads, at most {MAX_PAYLOADS}")
    if len(begin.parent_hashes) != len(begin.payloads):
        raise malformed("begin.parent_hashes", f"{len(begin.parent_hashes)} for {len(begin.payloads)} payloads")
    for index, payload in enumerate(begin.payloads):
        _check(f"begin.payloads[{index}]", payload, begin.kv_id)
        if len(begin.parent_hashes[index]) != HASH_BYTES:
            raise malformed(f"begin.parent_hashes[{index}]", f"must be {HASH_BYTES} bytes")


def check_names(kv_id: str, numerics_id: str, tenant_tag: bytes) -> None:
    """Raises InvalidArgument for names longer than any that we make: every place that keeps them has its own limit."""
    sizes = len(kv_id.encode()), len(numerics_id.encode()), len(tenant_tag)
    if max(sizes) <= MAX_NAME_BYTES:
        return
    for field, size in zip(("kv_id", "numerics_id", "tenant_tag"), sizes, strict=True):
        if size > MAX_NAME_BYTES:
            raise InvalidArgument.at(field, f"{size} bytes, at most {MAX_NAME_BYTES}")


def malformed(field: str, description: str) -> InvalidArgument:
    """A put that is not as it should be."""
    return InvalidArgument.at(field, description, reason="MALFORMED_PAYLOAD")


def _check(where: str, payload: transport_pb.Payload, kv_id: str) -> None:
    if payload.kind not in KIND:
        raise malformed(f"{where}.kind", "only blocks and encoder windows are stored")
    if len(payload.block_hash) != HASH_BYTES:
        raise malformed(f"{where}.block_hash", f"must be {HASH_BYTES} bytes")
    if payload.kv_id != kv_id:
        raise malformed(f"{where}.kv_id", "differs from the put's")
    if payload.position_end % BLOCK_TOKENS or not 0 <= payload.position_begin < payload.position_end:
        raise malformed(f"{where}.position_end", f"must be a multiple of {BLOCK_TOKENS} above position_begin")
    if KIND[payload.kind] is Kind.BLOCK and payload.position_end - payload.position_begin != BLOCK_TOKENS:
        raise malformed(f"{where}.position_begin", f"a block is {BLOCK_TOKENS} positions")
    if payload.position_end > MAX_POSITIONS:
        raise malformed(f"{where}.position_end", f"at most {MAX_POSITIONS}")
    if len(payload.shape) > _MAX_DIMENSIONS:
        raise malformed(f"{where}.shape", f"{len(payload.shape)} dimensions, at most {_MAX_DIMENSIONS}")
    if payload.dtype not in ITEM_BYTES:
        raise malformed(f"{where}.dtype", f"{payload.dtype!r} is not stored")
    size_bytes = math.prod(payload.shape) * ITEM_BYTES[payload.dtype]
    if not 0 < payload.size_bytes <= MAX_PAYLOAD_BYTES or size_bytes != payload.size_bytes:
        raise malformed(f"{where}.size_bytes", f"{payload.size_bytes} given, {size_bytes} by shape")
