"""Tells the mesh every second that this instance lives, and its load. From a thread that nothing else can block."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
from collections.abc import Callable

import uvloop

from shoal_common.bus import Bus
from shoal_common.errors import Unavailable
from shoal_common.load import LoadReport
from shoal_common.load_reporter import LoadReporter
from shoal_common.presence import HEARTBEAT_S, LAPSE_S, Presence
from shoal_common.presence_bucket import PresenceBucket
from shoal_common.rhythm import until_next

logger = logging.getLogger(__name__)

_JOIN_TIMEOUT_S = 5.0


class Announcer:
    """Announces one instance until `stop`, which says goodbye. Has an event loop and a NATS connection of its own.

    presence      the first announcement; `update` changes fields, which go out at once
    sample_load   called on the announcer's thread once a second; must not block
    """

    def __init__(
        self, *, nats_url: str, mesh: str, presence: Presence, sample_load: Callable[[], LoadReport] | None = None
    ) -> None:
        self._url, self._mesh = nats_url, mesh
        self._presence = presence
        self._sample_load = sample_load
        self._thread = threading.Thread(target=self._run, name="announcer", daemon=True)
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None
        self._stopping = False
        self._written: tuple[Presence, bytes] | None = None
        self._known_until_s = 0.0

    @property
    def presence(self) -> Presence:
        """What is announced now."""
        return self._presence

    def start(self) -> None:
        """Begin. If NATS is away, announcing begins when it comes."""
        self._thread.start()

    def update(self, **changes: object) -> None:
        """Announce other values from now on: `update(is_draining=True)`. From any thread."""
        with self._lock:
            self._presence = dataclasses.replace(self._presence, **changes)  # type: ignore[arg-type]
        self._nudge()

    def stop(self) -> None:
        """Say goodbye and end the thread; waits for it, 5 s at most. Blocking: call it off the event loop."""
        self._stopping = True
        self._nudge()
        if self._thread.is_alive():
            self._thread.join(_JOIN_TIMEOUT_S)

    def _nudge(self) -> None:
        loop, wake = self._loop, self._wake
        if loop is not None and wake is not None:
            try:
                loop.call_soon_threadsafe(wake.set)
            except RuntimeError:
                logger.debug("announcer has ended already")

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._announce())
        except Exception as error:
            logger.error("announcer failed; this instance will be taken for dead", exc_info=error)

    async def _announce(self) -> None:
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        wake = self._wake
        bus = Bus(self._url, name=f"{self._presence.instance_id} announcer")
        bucket = PresenceBucket(bus, self._mesh)
        loads = LoadReporter(bus, mesh=self._mesh, role=self._presence.role, instance_id=self._presence.instance_id)

        async def announce_again() -> None:
            bucket.doubt()
            # Who connected meanwhile, as after a restart of the server, may know nobody.
            self._known_until_s = 0.0
            wake.set()

        bus.on_connect(announce_again)
        await bus.start()
        while not self._stopping:
            if bus.is_connected:
                await self._beat(bucket, loads)
            try:
                await asyncio.wait_for(wake.wait(), until_next(HEARTBEAT_S))
            except TimeoutError:
                continue
            wake.clear()
        if bus.is_connected:
            try:
                await bucket.say_goodbye(self._presence.instance_id)
            except Unavailable as error:
                logger.info("no goodbye, readers wait for the lapse", extra={"error": error.message})
        await bus.close()

    def _as_json(self) -> bytes:
        presence = self._presence
        if self._written is None or self._written[0] is not presence:
            self._written = presence, presence.to_json()
        return self._written[1]

    async def _beat(self, bucket: PresenceBucket, loads: LoadReporter) -> None:
        # Readers take no load of an instance they do not know. Where they do, both leave together: a message by itself
        # wakes the server and every reader once more.
        now_s = time.monotonic()
        is_known = now_s < self._known_until_s
        if is_known:
            await self._report(loads)
        try:
            await bucket.put(self._presence.instance_id, self._as_json())
            self._known_until_s = now_s + LAPSE_S
        except Unavailable as error:
            self._known_until_s = 0.0
            logger.warning("heartbeat failed", extra={"error": error.message})
        if not is_known:
            await self._report(loads)

    async def _report(self, loads: LoadReporter) -> None:
        if self._sample_load is not None:
            await loads.publish(self._sample_load())
