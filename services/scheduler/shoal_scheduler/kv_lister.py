"""Asks KV cache nodes for everything they hold, when their events alone do not tell."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable

import grpc
from shoal.kv_cache.v1 import kv_cache_service_pb2 as pb
from shoal.kv_cache.v1.kv_cache_service_pb2_grpc import KvCacheServiceStub
from shoal_common.rpc import Channels, from_rpc_error

from shoal_scheduler.core.kv_view import KvView
from shoal_scheduler.core.requests import short_chain

logger = logging.getLogger(__name__)

_LOOK_S = 0.1
_TIMEOUT_S = 10.0
_BACKOFF_S = (0.5, 8.0)
_MAX_AT_ONCE = 4


class KvLister:
    """Lists the nodes that need it, one list per node and four in all at a time, with growing pauses for each node.

    address_of   where a node listens; None if it is gone
    """

    def __init__(self, kv: KvView, channels: Channels, address_of: Callable[[str], str | None], *, limit: int) -> None:
        self._kv, self._channels, self._address_of, self._limit = kv, channels, address_of, limit
        self._pause_s: dict[str, float] = {}
        self._not_before_s: dict[str, float] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._needed = asyncio.Event()
        kv.on_need = self._needed.set

    async def run(self) -> None:
        """Look for such nodes until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._needed.wait()
                await asyncio.sleep(_LOOK_S)
                needing = set(self._kv.needing_list())
                for node_id in self._not_before_s.keys() - needing:
                    del self._not_before_s[node_id], self._pause_s[node_id]
                for node_id in needing - self._running.keys():
                    if len(self._running) < _MAX_AT_ONCE and loop.time() >= self._not_before_s.get(node_id, 0.0):
                        self._begin(node_id, loop)
                if not needing:
                    self._needed.clear()
        finally:
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    def _begin(self, node_id: str, loop: asyncio.AbstractEventLoop) -> None:
        pause_s = self._pause_s.get(node_id, _BACKOFF_S[0])
        self._not_before_s[node_id] = loop.time() + pause_s
        self._pause_s[node_id] = min(2 * pause_s, _BACKOFF_S[1])
        task = self._running[node_id] = loop.create_task(self._list(node_id))
        task.add_done_callback(lambda _: self._running.pop(node_id, None))

    async def _list(self, node_id: str) -> None:
        address = self._address_of(node_id)
        if address is None:
            return
        stub = KvCacheServiceStub(self._channels.get(address).as_grpc())
        number, blocks, snapshots = 0, array("Q"), array("Q")
        try:
            async for response in stub.ListHeld(pb.ListHeldRequest(), timeout=_TIMEOUT_S):
                if response.HasField("header"):
                    if response.header.instance_id != node_id:
                        logger.info("another instance listens there", extra={"node": node_id, "address": address})
                        return
                    number = response.header.sequence_number
                elif len(blocks) < self._limit and len(snapshots) < self._limit:
                    blocks.extend(short_chain(response.page.block_hashes))
                    snapshots.extend(short_chain(response.page.snapshot_hashes))
        except grpc.RpcError as error:
            logger.info("no list of a KV cache node", extra={"node": node_id, "reason": from_rpc_error(error).reason})
            return
        self._kv.listed(node_id, number, blocks, snapshots)
