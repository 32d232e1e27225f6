"""One reader that waits for one event at a time, thousands of times, each with its own patience."""

from __future__ import annotations

import asyncio


class Waiting:
    """Wakes one waiter, at the event or when its patience ends. Belongs to one event loop.

    A timer per wait would cost more than the wait: one is kept, and set anew only when it rings too early or would
    ring too late.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[bool] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._rings_at_s = self._due_s = 0.0

    @property
    def is_waiting(self) -> bool:
        """Somebody waits, and has not been woken."""
        return self._waiter is not None and not self._waiter.done()

    async def wait(self, timeout_s: float) -> bool:
        """Until `wake`, True; False if it was not called in `timeout_s`."""
        self._due_s = self._loop.time() + timeout_s
        if self._timer is None or self._due_s < self._rings_at_s:
            self._set_timer()
        self._waiter = self._loop.create_future()
        try:
            return await self._waiter
        finally:
            self._waiter = None

    def wake(self) -> None:
        """The event came. Nothing is kept for a waiter that comes later."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)

    def close(self) -> None:
        """Nobody waits any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self) -> None:
        self.close()
        self._rings_at_s = self._due_s
        self._timer = self._loop.call_at(self._due_s, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return
        # A loop's timers may ring a little early.
        if self._loop.time() < self._due_s - 0.0005:
            self._set_timer()
        else:
            self._waiter.set_result(False)
