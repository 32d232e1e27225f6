"""Writes payloads into slabs that a holder has set aside."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from shoal.common.v1 import kv_transport_pb2 as pb

from shoal_common.errors import DataLoss
from shoal_common.kv_transport.buffers import Buffer
from shoal_common.kv_transport.slabs import slab_views


def fill(arena: memoryview, grant: pb.TransportGrant, slabs: Sequence[int], payloads: Sequence[Buffer]) -> None:
    """Copy payloads into `slabs`, each from the front of its own ones. Lets other threads run.

    Raises DataLoss (SHORT_PAYLOAD) when the slabs are not as many as that takes, or lie outside of the arena; then
    nothing is written.
    """
    needed = [max(1, -(-len(one) // max(1, grant.slab_bytes))) for one in payloads]
    base, slab_bytes = grant.first_slab_offset, grant.slab_bytes
    if not slab_bytes or sum(needed) != len(slabs) or base + (max(slabs, default=-1) + 1) * slab_bytes > arena.nbytes:
        raise DataLoss(
            f"{len(slabs)} slabs of {slab_bytes} bytes for {len(payloads)} payloads",
            reason="SHORT_PAYLOAD",
            slab_count=len(slabs),
            payload_count=len(payloads),
        )
    at = 0
    for one, count in zip(payloads, needed, strict=True):
        source, done = np.frombuffer(one, np.uint8), 0
        for view in slab_views(arena, base, slab_bytes, slabs[at : at + count], len(one)):
            np.frombuffer(view, np.uint8)[:] = source[done : done + view.nbytes]
            done += view.nbytes
        at += count
