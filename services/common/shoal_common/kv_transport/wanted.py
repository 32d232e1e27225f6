"""What a pull wants, and where in its destination each payload goes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import xxhash
from shoal.common.v1 import kv_transport_pb2 as pb

from shoal_common.errors import ChecksumMismatch
from shoal_common.kv_transport.slabs import ALIGNMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Payloads of one size that follow each other in their export.

    position_begin  first position of the first; each has `positions`
    checksums       XXH3-64 of each
    slabs           where they lie in an arena of slabs, else empty
    arena_offset    where the only one lies in an arena without
    begin, stride   offset of the first in the destination, and of each from the one before; multiples of 64
    """

    first_payload_id: int
    size_bytes: int
    position_begin: int
    positions: int
    checksums: Sequence[int]
    slabs: Sequence[int]
    arena_offset: int
    begin: int
    stride: int

    @property
    def count(self) -> int:
        """Payloads."""
        return len(self.checksums)

    def views(self, memory: memoryview) -> list[memoryview]:
        """Each payload in the destination, read-only."""
        whole = memory.toreadonly()
        begins = range(self.begin, self.begin + self.count * self.stride, self.stride)
        return [whole[begin : begin + self.size_bytes] for begin in begins]

    def verify(self, memory: memoryview, first: int, end: int) -> None:
        """Check payloads [first, end) of these in the destination. Raises ChecksumMismatch."""
        size = self.size_bytes
        for index in range(first, end):
            begin = self.begin + index * self.stride
            if xxhash.xxh3_64_intdigest(memory[begin : begin + size]) != self.checksums[index]:
                position = self.position_begin + index * self.positions
                raise ChecksumMismatch(
                    f"payload {self.first_payload_id + index} of positions {position}..{position + self.positions}"
                    f" is damaged",
                    payload_id=self.first_payload_id + index,
                    position_begin=position,
                    position_end=position + self.positions,
                    size_bytes=size,
                )


def wanted_runs(runs: Iterable[pb.PayloadRun]) -> tuple[list[Wanted], int]:
    """Runs laid out one after the other; how many bytes that takes."""
    found: list[Wanted] = []
    at = 0
    for run in runs:
        stride = _aligned(run.size_bytes)
        one = Wanted(
            first_payload_id=run.first_payload_id,
            size_bytes=run.size_bytes,
            position_begin=run.position_begin,
            positions=run.positions,
            checksums=list(run.checksums),
            slabs=list(run.slabs),
            arena_offset=0,
            begin=at,
            stride=stride,
        )
        if one.count:
            found.append(one)
            at += one.count * stride
    return found, at


def wanted_payloads(payloads: Iterable[pb.Payload]) -> tuple[list[Wanted], int]:
    """Single payloads laid out one after the other; how many bytes that takes."""
    found: list[Wanted] = []
    at = 0
    for payload in payloads:
        stride = _aligned(payload.size_bytes)
        found.append(
            Wanted(
                first_payload_id=payload.payload_id,
                size_bytes=payload.size_bytes,
                position_begin=payload.position_begin,
                positions=payload.position_end - payload.position_begin,
                checksums=(payload.checksum,),
                slabs=(),
                arena_offset=payload.arena_offset,
                begin=at,
                stride=stride,
            )
        )
        at += stride
    return found, at


def _aligned(size_bytes: int) -> int:
    return max(ALIGNMENT, size_bytes + -size_bytes % ALIGNMENT)
