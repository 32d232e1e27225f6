"""Follows which instances live, and optionally their load."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from shoal_common import subjects
from shoal_common.bus import Bus, Message
from shoal_common.errors import Unavailable
from shoal_common.load import LoadReport, LoadTable, NumberedLoad
from shoal_common.presence import LAPSE_S, Presence, PresenceTable
from shoal_common.presence_bucket import PresenceBucket
from shoal_common.rhythm import until_next

logger = logging.getLogger(__name__)

_TICK_S = 0.5
_PING_TIMEOUT_S = 1.0
_STALL_S = LAPSE_S / 2
"""A reader that did not run for so long may have heartbeats waiting: it was as good as cut off."""

OnUp = Callable[[Presence], None]
OnDown = Callable[[str], None]


class Watcher:
    """The live fleet as this reader sees it. Belongs to the event loop of its bus.

    on_up     an instance is new or says something new
    on_down   an instance said goodbye or lapsed; never called because the reader itself was cut off
    """

    def __init__(
        self, bus: Bus, *, mesh: str, on_up: OnUp | None = None, on_down: OnDown | None = None, has_loads: bool = False
    ) -> None:
        self._bus, self._mesh = bus, mesh
        self._bucket = PresenceBucket(bus, mesh)
        self._table, self._loads = PresenceTable(), LoadTable()
        self._on_up, self._on_down = on_up, on_down
        self._has_loads = has_loads
        self._said: dict[str, bytes] = {}
        """What each live instance said last: most heartbeats say it again."""
        self._task: asyncio.Task[None] | None = None

    def snapshot(self) -> tuple[Presence, ...]:
        """All live instances, by id."""
        return self._table.snapshot()

    def of_role(self, role: str) -> tuple[Presence, ...]:
        """The live instances of one role, by id."""
        return tuple(one for one in self._table.snapshot() if one.role == role)

    def get(self, instance_id: str) -> Presence | None:
        """One live instance."""
        return self._table.get(instance_id)

    def load(self, instance_id: str) -> LoadReport | None:
        """The newest load report of a live instance."""
        return self._loads.get(instance_id)

    async def start(self) -> None:
        """Follow from now on. Before NATS is reached the view is empty."""
        if self._bus.is_off:
            return
        await self._bus.subscribe(self._bucket.subject, self._on_presence)
        if self._has_loads:
            await self._bus.subscribe(subjects.load(self._mesh, "*", "*"), self._on_load)
        self._bus.on_connect(self._read_snapshot)
        if self._bus.is_connected:
            await self._read_snapshot()
        self._task = asyncio.create_task(self._tick_for_ever())

    async def stop(self) -> None:
        """Follow no longer; the bus stays."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _read_snapshot(self) -> None:
        try:
            entries = await self._bucket.read_all()
        except Unavailable as error:
            # The next heartbeats bring the same within a second.
            logger.info("no snapshot of the fleet", extra={"error": error.message})
            return
        for instance_id, raw in entries.items():
            # What a live heartbeat said may be newer than the bucket.
            if self._table.get(instance_id) is None:
                self._take(raw)

    async def _on_presence(self, message: Message) -> None:
        if self._bucket.is_goodbye(dict(message.headers)):
            self._down(self._bucket.key(message.subject))
            return
        instance_id, raw = self._bucket.key(message.subject), message.payload
        if self._said.get(instance_id) != raw or not self._table.seen_again(instance_id, time.monotonic()):
            self._take(raw)

    async def _on_load(self, message: Message) -> None:
        try:
            numbered = NumberedLoad.from_json(message.payload)
        except ValueError as error:
            logger.warning("bad load report", extra={"subject": message.subject, "error": str(error)})
            return
        # Reports of the unknown would never be forgotten.
        if self._table.get(numbered.instance_id) is not None:
            self._loads.take(numbered)

    def _take(self, raw: bytes) -> None:
        try:
            presence = Presence.from_json(raw)
        except ValueError as error:
            logger.warning("bad presence", extra={"error": str(error)})
            return
        self._said[presence.instance_id] = raw
        if self._table.seen(presence, time.monotonic()) and self._on_up is not None:
            self._on_up(presence)

    def _down(self, instance_id: str) -> None:
        was_known = self._table.gone(instance_id)
        self._forget(instance_id, was_known)

    def _forget(self, instance_id: str, was_known: bool) -> None:
        self._loads.forget(instance_id)
        self._said.pop(instance_id, None)
        if was_known and self._on_down is not None:
            self._on_down(instance_id)

    async def _tick_for_ever(self) -> None:
        last_s = time.monotonic()
        while True:
            await asyncio.sleep(until_next(_TICK_S))
            now_s = time.monotonic()
            # The answer to a ping comes after everything that was sent before it: silence is then the others' silence.
            # Where all were heard just now, the reader is in touch without one.
            if now_s - last_s > _STALL_S or not (
                self._table.is_fresh(now_s) or await self._bus.ping(timeout_s=_PING_TIMEOUT_S)
            ):
                self._table.cut()
                last_s = time.monotonic()
                continue
            last_s = time.monotonic()
            for instance_id in self._table.in_touch(last_s):
                logger.info("instance lapsed", extra={"lapsed": instance_id})
                self._forget(instance_id, was_known=True)
