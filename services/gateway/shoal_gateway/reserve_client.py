"""Placements from whichever scheduler replica is up; a broken replica's requests go to another one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from shoal.scheduler.v1 import scheduler_service_pb2 as pb
from shoal_common.rhythm import until_next
from shoal_common.rpc import Channels

from shoal_gateway.replica_link import ReplicaLink

_TICK_S = 0.5
_UNANSWERED_S = 2.0
"""A replica that says nothing about a Submit for so long is passed over while there is another one."""


class Reserving(Protocol):
    """A request that a scheduler keeps the books of. Called on the event loop; must not block."""

    @property
    def request_id(self) -> str:
        """Its name."""
        ...

    def introduction(self) -> pb.ReserveRequest:
        """Submit if it waits for a placement, Adopt if it runs."""
        ...

    @property
    def waits(self) -> bool:
        """It waits for a placement."""
        ...

    @property
    def has_output(self) -> bool:
        """It has said something already: better late than broken off."""
        ...

    def on_queued(self, position: int) -> None:
        """It waits, with so many before it."""

    def on_placement(self, placement: pb.Placement) -> None:
        """Where to run."""

    def on_denied(self, reason: str, retry_after_s: float | None) -> None:
        """It will not run."""


@dataclass(slots=True)
class _Held:
    """A request and the replica that has its books; None until one is up."""

    request: Reserving
    replica: ReplicaLink | None
    asked_at_s: float
    """When it was last sent to the replica; without one, since when it waits for one."""
    is_answered: bool


class ReserveClient:
    """All requests of this gateway and all scheduler replicas. A request is at one replica at a time.

    Losing a replica never touches a running answer: its books are opened again elsewhere by Adopt.
    """

    def __init__(
        self,
        *,
        gateway_id: str,
        channels: Channels,
        scheduler_wait_s: float = 10.0,
        on_change: Callable[[bool], None] = lambda is_connected: None,
    ) -> None:
        """scheduler_wait_s: a new request is denied when no replica comes up for so long.

        `on_change` is told `is_connected` whenever a replica comes up or goes.
        """
        self._gateway_id, self._channels, self._scheduler_wait_s = gateway_id, channels, scheduler_wait_s
        self._on_change = on_change
        self._replicas: dict[str, ReplicaLink] = {}
        self._announced: set[str] = set()
        self._held: dict[str, _Held] = {}
        self._turn = 0
        self._closing: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_connected(self) -> bool:
        """Some replica would take a request now."""
        return any(link.is_up for link in self._replicas.values())

    def start(self) -> None:
        """Begin to look for replicas that do not answer."""
        self._task = asyncio.create_task(self._tick_for_ever())

    def announced(self, replica_id: str, address: str) -> None:
        """A replica is up at this address."""
        self._announced.add(replica_id)
        link = self._replicas.get(replica_id)
        if link is None:
            self._replicas[replica_id] = ReplicaLink(
                replica_id=replica_id,
                address=address,
                gateway_id=self._gateway_id,
                channels=self._channels,
                on_up=self._up,
                on_down=self._down,
                on_message=self._on_message,
            )

    def lapsed(self, replica_id: str) -> None:
        """Presence no longer lists it. A stream that still works is used on; it is closed once it breaks."""
        self._announced.discard(replica_id)
        link = self._replicas.get(replica_id)
        if link is not None and not link.is_up:
            self._close(link)

    def submit(self, request: Reserving) -> None:
        """Ask for a placement; answered by the request's methods. Waits here while no replica is up."""
        held = _Held(request, None, 0.0, False)
        self._held[request.request_id] = held
        self._introduce(held)

    def tell(self, message: pb.ReserveRequest, *, can_wait: bool = False) -> None:
        """Report about a request to the replica that has its books; what can wait may leave with a later message."""
        held = self._held.get(message.request_id)
        if held is None:
            return
        held.asked_at_s, held.is_answered = asyncio.get_running_loop().time(), not held.request.waits
        if held.replica is not None:
            held.replica.send(message, can_wait=can_wait)

    def forget(self, request_id: str, last_word: pb.ReserveRequest) -> None:
        """The request has ended: Finished or Cancelled. Safe to repeat."""
        held = self._held.pop(request_id, None)
        if held is not None and held.replica is not None:
            held.replica.send(last_word, can_wait=True)

    async def close(self) -> None:
        """End all streams."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._held.clear()
        for link in list(self._replicas.values()):
            await link.close()
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _introduce(self, held: _Held, avoid: ReplicaLink | None = None) -> None:
        up = [link for link in self._replicas.values() if link.is_up and link is not avoid]
        # An announced replica before one that only still answers.
        up = [link for link in up if link.replica_id in self._announced] or up
        held.asked_at_s, held.is_answered = asyncio.get_running_loop().time(), not held.request.waits
        if not up:
            held.replica = None
            return
        self._turn += 1
        held.replica = up[self._turn % len(up)]
        held.replica.send(held.request.introduction())

    def _up(self, link: ReplicaLink) -> None:
        self._on_change(True)
        for held in self._held.values():
            if held.replica is None:
                self._introduce(held)

    def _down(self, link: ReplicaLink) -> None:
        self._on_change(self.is_connected)
        for held in self._held.values():
            if held.replica is link:
                self._introduce(held)
        if link.replica_id not in self._announced:
            self._close(link)

    def _close(self, link: ReplicaLink) -> None:
        if self._replicas.pop(link.replica_id, None) is not None:
            self._channels.drop(link.address)
            task = asyncio.create_task(link.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _on_message(self, link: ReplicaLink, message: pb.ReserveResponse) -> None:
        held = self._held.get(message.request_id)
        if held is None or held.replica is not link:
            return
        held.is_answered = True
        kind = message.WhichOneof("message")
        if kind == "placement":
            held.request.on_placement(message.placement)
        elif kind == "queued":
            held.request.on_queued(message.queued.position)
        elif kind == "denied":
            denied = message.denied
            retry_after_s = None
            if denied.HasField("retry_after"):
                retry_after_s = denied.retry_after.seconds + denied.retry_after.nanos / 1e9
            held.request.on_denied(denied.reason, retry_after_s)

    async def _tick_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(until_next(_TICK_S))
            overdue_s = loop.time() - _UNANSWERED_S
            for held in list(self._held.values()):
                silent = held.replica
                if silent is None:
                    self._deny_if_homeless(held, loop.time())
                    continue
                if held.is_answered or held.asked_at_s > overdue_s or not held.request.waits:
                    continue
                if any(link.is_up and link is not silent for link in self._replicas.values()):
                    cancelled = pb.ReserveRequest(request_id=held.request.request_id, cancelled=pb.Cancelled())
                    silent.send(cancelled)
                    self._introduce(held, avoid=silent)

    def _deny_if_homeless(self, held: _Held, now_s: float) -> None:
        request = held.request
        if request.waits and not request.has_output and now_s - held.asked_at_s > self._scheduler_wait_s:
            request.on_denied("NO_SCHEDULER", self._scheduler_wait_s)
