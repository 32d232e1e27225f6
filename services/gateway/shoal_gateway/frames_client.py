"""The Frames streams to all decode workers this gateway knows or uses."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from shoal_common.rhythm import until_next
from shoal_common.rpc import Channels

from shoal_gateway.pulse import SILENCE_S, STANDSTILL_S, Pulse
from shoal_gateway.worker_link import WorkerLink

_TICK_S = 0.5
_LINGER_S = 30.0
"""A worker that is not announced keeps its stream so long after its last attempt."""


class FramesClient:
    """One link per address: a worker that restarts there takes the place of the one before.

    A link lives while a worker is announced at its address or has attempts of ours.
    """

    def __init__(
        self,
        *,
        gateway_id: str,
        channels: Channels,
        silence_s: float = SILENCE_S,
        standstill_s: float = STANDSTILL_S,
        on_change: Callable[[bool], None] = lambda is_connected: None,
    ) -> None:
        """`on_change` is told `is_connected` whenever a stream opens or ends."""
        self._on_change = on_change
        self._gateway_id, self._channels = gateway_id, channels
        self._silence_s, self._standstill_s = silence_s, standstill_s
        self._links: dict[str, WorkerLink] = {}
        self._numbers = itertools.count(1)
        self._announced: dict[str, str] = {}
        self._idle_since_s: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def is_connected(self) -> bool:
        """Some worker has an open stream."""
        return any(link.is_open for link in self._links.values())

    def start(self) -> None:
        """Begin to judge the workers' pulses."""
        self._task = asyncio.create_task(self._tick_for_ever())

    def link(self, address: str) -> WorkerLink:
        """The link to a worker; made now if there is none, so that its stream opens in the background."""
        link = self._links.get(address)
        if link is None:
            pulse = Pulse(silence_s=self._silence_s, standstill_s=self._standstill_s)
            link = self._links[address] = WorkerLink(
                address=address,
                gateway_id=self._gateway_id,
                channels=self._channels,
                pulse=pulse,
                numbers=self._numbers,
                on_change=self._changed,
            )
        return link

    def announced(self, worker_id: str, address: str) -> None:
        """The worker is up: open its stream before the first request needs it."""
        self._announced[worker_id] = address
        self.link(address)

    def lapsed(self, worker_id: str) -> None:
        """Presence no longer lists the worker. What runs there goes on; the link goes when nothing does."""
        self._announced.pop(worker_id, None)

    async def close(self) -> None:
        """End all streams."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        links, self._links = list(self._links.values()), {}
        for link in links:
            await link.close()

    def _changed(self) -> None:
        self._on_change(self.is_connected)

    async def _tick_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        last_s = loop.time()
        while True:
            await asyncio.sleep(until_next(_TICK_S))
            now_s = loop.time()
            # A gateway that slept itself must not take its sleep for the workers'.
            was_stalled = now_s - last_s > 2 * _TICK_S
            last_s = now_s
            for link in self._links.values():
                link.check(now_s, was_stalled=was_stalled)
            await self._close_unused(now_s)

    async def _close_unused(self, now_s: float) -> None:
        announced = set(self._announced.values())
        for address, link in list(self._links.items()):
            if address in announced or not link.is_idle:
                self._idle_since_s.pop(address, None)
            elif now_s - self._idle_since_s.setdefault(address, now_s) >= _LINGER_S:
                del self._links[address], self._idle_since_s[address]
                self._changed()
                await link.close()
                if address not in self._links:
                    self._channels.drop(address)
