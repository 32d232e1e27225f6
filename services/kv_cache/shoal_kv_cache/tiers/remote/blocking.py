"""Blocking calls of a store, off the event loop and bounded even when they hang."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

from shoal_kv_cache.tiers.remote.errors import RemoteBusy

T = TypeVar("T")


class BlockingCalls:
    """A few threads that end with the process, hung or not. Invariant: at most max_calls are under way.

    A call that its caller gave up counts until it ends.
    """

    def __init__(self, name: str, *, threads: int, max_calls: int) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._count, self._max_calls = 0, max_calls
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True) for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises. Raises RemoteBusy when too much is under way."""
        with self._lock:
            if self._count >= self._max_calls:
                raise RemoteBusy(f"{self._count} calls are under way", call_count=self._count)
            self._count += 1
        done: Future[T] = Future()
        self._jobs.put((done, work))
        return await asyncio.wrap_future(done)

    def close(self) -> None:
        """Lets the threads end when they are free."""
        for _ in self._threads:
            self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            done, work = job
            try:
                if not done.cancelled():
                    self._settle(done, work)
            finally:
                with self._lock:
                    self._count -= 1

    @staticmethod
    def _settle(done: Future[Any], work: Callable[[], Any]) -> None:
        try:
            result = work()
        except BaseException as error:
            _quietly(done.set_exception, error)
        else:
            _quietly(done.set_result, result)


def _quietly(settle: Callable[[Any], None], outcome: object) -> None:
    try:
        settle(outcome)
    except InvalidStateError:
        return  # its caller gave up meanwhile
