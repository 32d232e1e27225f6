"""A worker that stops in the midst of filling a node's memory: run with its address and a chain's name."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

from shoal.common.v1 import kv_transport_pb2 as transport_pb
from shoal_common.kv_cache_client import put_call
from shoal_common.kv_transport import fill
from shoal_common.rpc import Channel
from support.kv_client import TestChain, begin_of, items_of

COUNT = 8


def stopping_fill(arena: memoryview, grant: transport_pb.TransportGrant, slabs: Sequence[int], parts: Any) -> None:
    half = len(parts) // 2
    fill(arena, grant, slabs[:half], parts[:half])
    # This thread itself: it would go on for a moment if another one took the signal.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    fill(arena, grant, slabs[half:], parts[half:])


async def main(address: str, name: str) -> None:
    """Puts one chain."""
    vars(put_call)["fill"] = stopping_fill
    items = items_of(TestChain(name, COUNT), 0, COUNT)
    channel = Channel(address)
    put = put_call.PutCall([transport_pb.TRANSPORT_KIND_SHM])
    try:
        await put.run(channel, begin_of(items), [one.data for one in items], timeout_s=20)
    finally:
        put.close()
        await channel.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
