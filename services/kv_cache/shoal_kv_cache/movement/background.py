"""Carries what was stored here to a slower place, in the background, as far as that keeps up."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from shoal_common.errors import MeshError, Unavailable

from shoal_kv_cache.core.entries import Group, Key
from shoal_kv_cache.core.token_bucket import TokenBucket
from shoal_kv_cache.core.write_queue import WriteQueue
from shoal_kv_cache.tier_counts import TierCounts

logger = logging.getLogger(__name__)

_BATCH_BYTES = 8 << 20
_BATCH_ITEMS = 256
_BURST_S = 0.25
"""A limit holds over any quarter of a second."""
_REST_S = (1.0, 30.0)


class Item(NamedTuple):
    """An entry to carry."""

    group: Group
    key: Key


class Sink(Protocol):
    """Where items go."""

    async def write(self, items: Sequence[Item]) -> int:
        """Carries those that are still held; returns the bytes. Raises MeshError; then some may have arrived."""
        ...


class WriteBack:
    """A queue bounded in bytes, and a task that empties it, oldest first, within a limit on bytes per second.

    A batch that fails is dropped and counted, never repeated: what is lost is a copy. Then the sink rests, longer each
    time. Belongs to one event loop.
    """

    def __init__(
        self,
        sink: Sink,
        counts: TierCounts,
        *,
        name: str,
        max_queued_bytes: int,
        bytes_per_s: float,
        batch_bytes: int = _BATCH_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """bytes_per_s: 0 for no limit. batch_bytes: what the sink is given in one call, about."""
        self._sink, self._counts, self._name, self._clock = sink, counts, name, clock
        self._batch_bytes = batch_bytes
        self._queue: WriteQueue[Item] = WriteQueue(max_queued_bytes)
        self._bucket = TokenBucket(bytes_per_s, burst_bytes=bytes_per_s * _BURST_S, now_s=clock())
        self._wake, self._has_room = asyncio.Event(), asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._waiting: dict[Item, asyncio.Future[None]] = {}
        self._failure: MeshError | None = None
        self._rest_s, self._rest_until_s = _REST_S[0], 0.0
        self._busy: asyncio.Future[int] | None = None
        self._busy_bytes = 0

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait or are on their way."""
        return self._queue.queued_bytes + self._busy_bytes

    def offer(self, item: Item, size_bytes: int) -> bool:
        """Queues an item; False, and counted, where there is no room."""
        if not self._queue.offer(item, size_bytes):
            self._counts.dropped_count += 1
            return False
        self._idle.clear()
        self._wake.set()
        return True

    async def carry(self, items: Sequence[tuple[Item, int]]) -> None:
        """Queues items and waits until they have arrived, or need not any more. Raises what failed."""
        for item, size_bytes in items:
            self._raise_if_resting()
            while not self._queue.offer(item, size_bytes):
                self._has_room.clear()
                await self._has_room.wait()
                self._raise_if_resting()
            if item not in self._waiting:
                self._waiting[item] = asyncio.get_running_loop().create_future()
            self._idle.clear()
            self._wake.set()
        futures = [self._waiting[item] for item, _ in items if item in self._waiting]
        for future in futures:
            await asyncio.shield(future)

    async def quiesce(self) -> None:
        """Waits until the batch that is on its way now has ended; not for those after it."""
        if self._busy is not None:
            await asyncio.wait({self._busy})

    async def idle(self) -> None:
        """Waits until nothing is queued or on its way. Give it a deadline."""
        await self._idle.wait()

    async def run(self) -> None:
        """Carries what is offered, for ever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                # What waits meanwhile is bounded by the queue.
                await asyncio.sleep(max(self._rest_until_s - self._clock(), 0.0))
                waiting_bytes = self._queue.queued_bytes
                batch = self._queue.take(self._batch_bytes, _BATCH_ITEMS)
                self._busy_bytes = waiting_bytes - self._queue.queued_bytes
                self._has_room.set()
                self._busy = asyncio.ensure_future(self._carry(batch))
                try:
                    size_bytes = await asyncio.shield(self._busy)
                except asyncio.CancelledError:
                    self._busy.cancel()
                    await asyncio.gather(self._busy, return_exceptions=True)
                    raise
                finally:
                    self._busy, self._busy_bytes = None, 0
                await asyncio.sleep(self._bucket.take(size_bytes, self._clock()))
            self._idle.set()

    async def _carry(self, batch: Sequence[Item]) -> int:
        try:
            size_bytes = await self._sink.write(batch)
        except MeshError as error:
            self._failed(batch, error)
            return 0
        except asyncio.CancelledError:
            self._settle(batch, Unavailable("the node is stopping", reason="STOPPING"))
            raise
        except Exception:
            # A bug, told once; one batch must not end the writing of all that follow.
            logger.exception("write-back failed", extra={"to": self._name, "items": len(batch)})
            self._failed(batch, Unavailable("a bug, see the log of the node", reason="INTERNAL"))
            return 0
        self._failure, self._rest_s = None, _REST_S[0]
        if size_bytes:
            self._counts.wrote(size_bytes)
        self._settle(batch, None)
        return size_bytes

    def _failed(self, batch: Sequence[Item], error: MeshError) -> None:
        self._counts.failed(error.reason)
        self._counts.dropped_count += len(batch)
        self._failure = error
        self._rest_until_s = self._clock() + self._rest_s
        self._rest_s = min(2 * self._rest_s, _REST_S[1])
        logger.warning(
            "write-back failed",
            extra={"to": self._name, "reason": error.reason, "error": error.message, "items": len(batch)},
        )
        # Not only the batch: whoever waits for the rest would wait for the end of the rest.
        self._settle(list(self._waiting), error)

    def _settle(self, batch: Sequence[Item], error: MeshError | None) -> None:
        for item in batch:
            future = self._waiting.pop(item, None)
            if future is None or future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
                # Whoever waited may have left.
                future.exception()

    def _raise_if_resting(self) -> None:
        if self._failure is not None and self._clock() < self._rest_until_s:
            raise self._failure
