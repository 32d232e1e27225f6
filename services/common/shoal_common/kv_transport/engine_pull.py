"""Pulls by a transfer engine: moves from the slabs of a grant, checked when all are there."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.common.v1 import kv_transport_pb2 as pb

from shoal_common.kv_transport.engines import Move, TransferEngine
from shoal_common.kv_transport.slabs import stretches
from shoal_common.kv_transport.wanted import Wanted


def pull_by_engine(
    engine: TransferEngine, grant: pb.TransportGrant, wanted: Sequence[Wanted], memory: memoryview, timeout_s: float
) -> None:
    """Take every payload to its place in `memory` and check it there.

    Raises EngineFailed, DeadlineExceeded, ChecksumMismatch.
    """
    moves = [move for one in wanted for move in moves_of(grant, one)]
    engine.read(grant.peer, grant.base_address, moves, memory, timeout_s=timeout_s)
    for one in wanted:
        one.verify(memory, 0, one.count)


def moves_of(grant: pb.TransportGrant, one: Wanted) -> list[Move]:
    """As few moves as the order of the slabs allows."""
    if not one.slabs:
        return [Move(one.arena_offset, one.begin, one.size_bytes)]
    base, slab_bytes = grant.first_slab_offset, grant.slab_bytes
    per_payload = len(one.slabs) // one.count
    if one.stride == per_payload * slab_bytes:
        groups = [(one.slabs, one.begin, one.count * one.stride)]
    else:
        groups = [
            (one.slabs[index * per_payload : (index + 1) * per_payload], one.begin + index * one.stride, one.size_bytes)
            for index in range(one.count)
        ]
    moves = []
    for slabs, at, left in groups:
        for slab, count in stretches(slabs):
            part = min(count * slab_bytes, left)
            moves.append(Move(base + slab * slab_bytes, at, part))
            at, left = at + part, left - part
    return moves
