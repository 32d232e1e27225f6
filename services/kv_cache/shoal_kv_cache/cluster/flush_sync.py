"""Hears from other nodes of the flushes that this one missed."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import grpc
from shoal.kv_cache.v1 import kv_cache_service_pb2 as pb
from shoal.kv_cache.v1 import kv_cache_service_pb2_grpc as rpc
from shoal_common.rpc import Channels, from_rpc_error, is_transport_failure

from shoal_kv_cache.cluster.members import Members, Peer
from shoal_kv_cache.core.flush_epochs import Filter
from shoal_kv_cache.core.flush_log import FlushRecord
from shoal_kv_cache.flush import Flusher

logger = logging.getLogger(__name__)

MAX_ID_CHARS = 64
_AT_ONCE = 16
_AGAIN_S = (0.5, 30.0)
_LOOK_S = 1.0
_LOOKS_PER_ROUND = 10
_STALL_S = 2.0
"""A node that did not run for so long may have been given up by whoever flushed: presence lapses after 3 s."""
_ASKED_IN_DOUBT = 8
_DOUBT, _TURN = "doubt", "turn"
"""Names of tasks beside those that are named by instances."""


class FlushSync:
    """Asks all nodes that live before this one serves, each one that comes up later, and now and then one in turn.

    A node that was stopped for a while asks before it serves on: whoever flushed meanwhile did not reach it. One that
    does not answer is asked again as long as it announces itself. Belongs to one event loop.
    """

    def __init__(
        self,
        flusher: Flusher,
        members: Members,
        channels: Channels,
        *,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._flusher, self._members, self._channels, self._timeout_s = flusher, members, channels, timeout_s
        self._clock = clock
        self._ran_at_s = clock()
        self._turn = 0
        self._limit = asyncio.Semaphore(_AT_ONCE)
        self._caught_up = asyncio.Event()
        self._asking: dict[str, asyncio.Task[Any]] = {}

    def may_serve(self) -> bool:
        """Whether this node may serve what it holds now. If not, it is about to find out: wait for it."""
        if self._caught_up.is_set() and self._clock() - self._ran_at_s > _STALL_S:
            self._doubt()
        return self._caught_up.is_set()

    async def wait_caught_up(self, timeout_s: float) -> bool:
        """Waits until it may; False if that takes longer."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._caught_up.wait()
        except TimeoutError:
            return False
        return True

    async def catch_up(self, others: Sequence[Peer]) -> None:
        """Before anything is served: what an earlier process left undone, and what those that live now know."""
        await self._flusher.finish()
        await asyncio.gather(*(self._ask(peer, reaches_remote=False) for peer in others))
        self._caught_up.set()

    def peer_up(self, peer: Peer) -> None:
        """A node has come, or come back: it may know of flushes that did not reach this one."""
        if peer.instance_id not in self._asking:
            self._spawn(peer.instance_id, self._ask_until_answered(peer))

    async def run(self) -> None:
        """Asks one node after the other, for ever."""
        while True:
            for _ in range(_LOOKS_PER_ROUND):
                if self.may_serve():
                    self._ran_at_s = self._clock()
                await asyncio.sleep(_LOOK_S)
            others = self._members.peers()
            if others and _TURN not in self._asking:
                self._turn = (self._turn + 1) % len(others)
                self._spawn(_TURN, self._ask(others[self._turn], reaches_remote=True))

    def _doubt(self) -> None:
        """This node did not run for a while: what it holds may have been flushed elsewhere."""
        self._ran_at_s = self._clock()
        others = self._members.peers()
        if others:
            self._caught_up.clear()
            self._spawn(_DOUBT, self._ask_some(random.sample(others, min(len(others), _ASKED_IN_DOUBT))))

    async def _ask_some(self, others: Sequence[Peer]) -> None:
        try:
            await asyncio.gather(*(self._ask(peer, reaches_remote=True) for peer in others))
        finally:
            self._caught_up.set()

    def _spawn(self, name: str, work: Coroutine[Any, Any, object]) -> None:
        task = self._asking[name] = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(lambda _: self._asking.pop(name, None))

    async def close(self) -> None:
        """Asks nobody any more."""
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask_until_answered(self, peer: Peer) -> None:
        again_s = _AGAIN_S[0]
        while peer in self._members.peers() and not await self._ask(peer, reaches_remote=True):
            await asyncio.sleep(again_s)
            again_s = min(2 * again_s, _AGAIN_S[1])

    async def _ask(self, peer: Peer, *, reaches_remote: bool) -> bool:
        """False where there was no answer."""
        channel = self._channels.get(peer.address)
        try:
            async with self._limit:
                answer = await rpc.KvCacheServiceStub(channel.as_grpc()).ListFlushes(
                    pb.ListFlushesRequest(known_digest=self._flusher.log.digest()), timeout=self._timeout_s
                )
        except grpc.aio.AioRpcError as error:
            if is_transport_failure(error):
                self._channels.rebuild(channel)
            reason = from_rpc_error(error).reason
            logger.info("no list of flushes", extra={"peer": peer.node_id, "reason": reason})
            return False
        theirs = [record_of(one) for one in answer.records if 0 < len(one.flush_id) <= MAX_ID_CHARS]
        await self._flusher.catch_up(theirs, has_forgotten=answer.has_forgotten, reaches_remote=reaches_remote)
        return True


def record_of(message: pb.FlushRecord) -> FlushRecord:
    """A record as another node tells it."""
    what = Filter(
        kv_id=message.kv_id if message.HasField("kv_id") else None,
        tenant_tag=message.tenant_tag if message.HasField("tenant_tag") else None,
    )
    return FlushRecord(message.flush_id, what)


def message_of(record: FlushRecord) -> pb.FlushRecord:
    """A record as it is told to others."""
    return pb.FlushRecord(flush_id=record.flush_id, kv_id=record.what.kv_id, tenant_tag=record.what.tenant_tag)
