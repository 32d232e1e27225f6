"""A few short pieces of work per turn of the event loop: a burst of requests holds up nothing that runs already."""

from __future__ import annotations

import asyncio
from collections import deque

PER_TURN = 6
"""Prompts are encoded in a fraction of a millisecond. More at once: whoever steps and streams waits for all of them.
Fewer: what could leave in one message leaves in several, and CPU per token grows (by a sixth at 2)."""


class Turns:
    """Gives out the turns of the running event loop, each to PER_TURN who ask, in their order.

    What comes at once would else be done at once: all prompts of a burst encoded before the first of them is placed,
    and no token of anybody written meanwhile. As many wait as the gateway has accepted; each turn lets some of them go.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = 0

    async def take(self) -> None:
        """Go on in this turn, or wait for one that has room."""
        loop = asyncio.get_running_loop()
        if self._taken < PER_TURN and not self._waiting:
            if not self._taken:
                loop.call_soon(self._next)
            self._taken += 1
            return
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiting.append(waiter)
        await waiter

    def _next(self) -> None:
        self._taken = 0
        while self._waiting and self._taken < PER_TURN:
            waiter = self._waiting.popleft()
            # Who was cancelled needs none.
            if not waiter.done():
                waiter.set_result(None)
                self._taken += 1
        if self._taken:
            asyncio.get_running_loop().call_soon(self._next)
