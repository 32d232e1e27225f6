"""Copies payloads out of a mapped arena."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from shoal.common.v1 import kv_transport_pb2 as pb

from shoal_common.errors import DataLoss
from shoal_common.kv_transport.slabs import stretches
from shoal_common.kv_transport.wanted import Wanted

_CHUNK_BYTES = 512 << 10
"""Copied, then checked while it is in the cache of the core."""


class SharedCopy:
    """One pull, cut into chunks that any number of threads take from one queue; each payload is checked where it lands.

    Whoever calls `run` works until no chunk is left. While bytes are copied or checked other threads run.
    """

    def __init__(
        self, arena: memoryview, grant: pb.TransportGrant, wanted: Sequence[Wanted], memory: memoryview
    ) -> None:
        """Raises DataLoss (SHORT_PAYLOAD) where the grant points outside of the arena."""
        self._source, self._target, self._memory = (
            np.frombuffer(arena, np.uint8),
            np.frombuffer(memory, np.uint8),
            memory,
        )
        self._base, self._slab_bytes = grant.first_slab_offset, grant.slab_bytes
        self._chunks: deque[tuple[Wanted, int, int]] = deque()
        for one in wanted:
            self._check(one)
            step = max(1, _CHUNK_BYTES // one.stride)
            self._chunks += [(one, first, min(one.count, first + step)) for first in range(0, one.count, step)]

    def run(self, max_chunks: int = 1 << 30) -> bool:
        """Copy and check chunks; whether some are left. Raises ChecksumMismatch, after which nobody goes on."""
        for _ in range(max_chunks):
            try:
                one, first, end = self._chunks.popleft()
            except IndexError:
                return False
            try:
                self._copy(one, first, end)
                one.verify(self._memory, first, end)
            except BaseException:
                self._chunks.clear()
                raise
        return bool(self._chunks)

    def _check(self, one: Wanted) -> None:
        begin, end = one.arena_offset, one.arena_offset + one.size_bytes
        if one.slabs:
            begin = self._base + min(one.slabs) * self._slab_bytes
            end = self._base + (max(one.slabs) + 1) * self._slab_bytes
            if not self._slab_bytes or len(one.slabs) != one.count * self._per_payload(one):
                raise DataLoss(f"{len(one.slabs)} slabs for {one.count} payloads", reason="SHORT_PAYLOAD")
        if not 0 <= begin <= end <= self._source.nbytes:
            size = self._source.nbytes
            raise DataLoss(f"{begin}..{end} is outside of an arena of {size} bytes", reason="SHORT_PAYLOAD")

    def _per_payload(self, one: Wanted) -> int:
        return max(1, -(-one.size_bytes // self._slab_bytes))

    def _copy(self, one: Wanted, first: int, end: int) -> None:
        if not one.slabs:
            self._move(one.arena_offset, one.begin, one.size_bytes)
            return
        count = self._per_payload(one)
        if one.stride == count * self._slab_bytes:
            # Slabs that follow each other are payloads that follow each other in the destination too.
            self._gather(
                one.slabs[first * count : end * count], one.begin + first * one.stride, (end - first) * one.stride
            )
            return
        for index in range(first, end):
            slabs = one.slabs[index * count : (index + 1) * count]
            self._gather(slabs, one.begin + index * one.stride, one.size_bytes)

    def _gather(self, slabs: Sequence[int], at: int, size_bytes: int) -> None:
        for slab, stretch in stretches(slabs):
            part = min(stretch * self._slab_bytes, size_bytes)
            self._move(self._base + slab * self._slab_bytes, at, part)
            at, size_bytes = at + part, size_bytes - part

    def _move(self, from_: int, to: int, size_bytes: int) -> None:
        self._target[to : to + size_bytes] = self._source[from_ : from_ + size_bytes]
