"""Copies payloads out of a mapped arena."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from shoal.common.v1 import kv_transport_pb2 as pb

from shoal_common.errors import DataLoss
from shoal_common.kv_transport.wanted import Wanted

_CHUNK_BYTES = 512 << 10
"""Copied, then checked while it is in the cache of the core."""


def copy_out(arena: memoryview, grant: pb.TransportGrant, wanted: Sequence[Wanted], memory: memoryview) -> None:
    """Copy every payload to its place in `memory` and check it there. Lets other threads run.

    Raises ChecksumMismatch, DataLoss (SHORT_PAYLOAD) where the grant points outside of the arena.
    """
    source, target = np.frombuffer(arena, np.uint8), np.frombuffer(memory, np.uint8)
    for one in wanted:
        if not one.slabs:
            _check_inside(one.arena_offset, one.arena_offset + one.size_bytes, source)
            target[one.begin : one.begin + one.size_bytes] = source[one.arena_offset :][: one.size_bytes]
            one.verify(memory, 0, 1)
        else:
            _copy_run(source, target, grant, one, memory)


def _copy_run(
    source: NDArray[np.uint8], target: NDArray[np.uint8], grant: pb.TransportGrant, one: Wanted, memory: memoryview
) -> None:
    slab_bytes, slabs = grant.slab_bytes, one.slabs
    per_payload = max(1, -(-one.size_bytes // max(1, slab_bytes)))
    if not slab_bytes or len(slabs) != one.count * per_payload:
        raise DataLoss(
            f"{len(slabs)} slabs for {one.count} payloads of {per_payload}",
            reason="SHORT_PAYLOAD",
            payload_id=one.first_payload_id,
        )
    base = grant.first_slab_offset
    _check_inside(base + min(slabs) * slab_bytes, base + (max(slabs) + 1) * slab_bytes, source)
    if one.stride == per_payload * slab_bytes:
        # Slabs that follow each other are payloads that follow each other in the destination too.
        per_chunk = max(1, _CHUNK_BYTES // one.stride)
        for first in range(0, one.count, per_chunk):
            end = min(one.count, first + per_chunk)
            at = one.begin + first * one.stride
            for begin, size in _stretches(slabs[first * per_payload : end * per_payload]):
                from_ = base + begin * slab_bytes
                target[at : at + size * slab_bytes] = source[from_ : from_ + size * slab_bytes]
                at += size * slab_bytes
            one.verify(memory, first, end)
        return
    for index in range(one.count):
        at, left = one.begin + index * one.stride, one.size_bytes
        for begin, size in _stretches(slabs[index * per_payload : (index + 1) * per_payload]):
            part = min(size * slab_bytes, left)
            from_ = base + begin * slab_bytes
            target[at : at + part] = source[from_ : from_ + part]
            at, left = at + part, left - part
        one.verify(memory, index, index + 1)


def _stretches(slabs: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First slab and number of each stretch of slabs that follow each other."""
    begin = previous = slabs[0]
    for slab in slabs[1:]:
        if slab != previous + 1:
            yield begin, previous + 1 - begin
            begin = slab
        previous = slab
    yield begin, previous + 1 - begin


def _check_inside(begin: int, end: int, arena: NDArray[np.uint8]) -> None:
    if not 0 <= begin <= end <= arena.nbytes:
        raise DataLoss(f"{begin}..{end} is outside of an arena of {arena.nbytes} bytes", reason="SHORT_PAYLOAD")
