"""Commands on their way to the step thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from shoal_common.errors import Unavailable

from shoal_engine.errors import CommandQueueFull

Result = TypeVar("Result")


class CommandQueue:
    """Calls waiting for one thread, in order. At most `limit` wait, urgent ones not counted; none after `close`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._changed = threading.Condition()
        self._is_closed = False

    def put(self, call: Callable[[], Result], *, urgent: bool = False) -> Future[Result]:
        """Queue a call; the future gets its result or exception.

        urgent   not refused for a full queue: for calls that let go of something, at most one per request
        raises   CommandQueueFull, Unavailable after `close`
        """
        future: Future[Result] = Future()
        with self._changed:
            if self._is_closed:
                raise Unavailable("the engine is closed", reason="ENGINE_CLOSED")
            if not urgent and len(self._waiting) >= self._limit:
                raise CommandQueueFull(f"{self._limit} commands wait for the engine", limit=self._limit)
            self._waiting.append((future, call))
            self._changed.notify()
        return future

    def run_waiting(self) -> None:
        """Run what waits now, in the calling thread. Exceptions go to the futures."""
        for _ in range(len(self._waiting)):
            future, call = self._waiting.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)

    def wait(self) -> bool:
        """Block until something waits or the queue is closed. False: closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            return bool(self._waiting) or not self._is_closed

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        """Take nothing more and wake the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def fail_waiting(self, error: Exception) -> None:
        """Give `error` to everything that waits."""
        while self._waiting:
            future, _ = self._waiting.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
