"""Brings the bus's news to the scheduler: presence, load, KV events."""

from __future__ import annotations

import logging

from google.protobuf.message import DecodeError
from shoal.kv_cache.v1 import events_pb2
from shoal_common import subjects
from shoal_common.bus import Bus, Message
from shoal_common.load import LoadTable, NumberedLoad
from shoal_common.presence import Presence
from shoal_common.watcher import Watcher

from shoal_scheduler.core.event_log import KvChange
from shoal_scheduler.core.kv_view import KvView
from shoal_scheduler.core.requests import short_hash
from shoal_scheduler.desk import Desk

logger = logging.getLogger(__name__)

KV_CACHE = "kv_cache"


class FleetWatch:
    """Follows the mesh. While the bus is cut off nothing changes: the last view stays."""

    def __init__(self, bus: Bus, desk: Desk, kv: KvView, *, mesh: str, instance_id: str) -> None:
        self._bus, self._desk, self._kv = bus, desk, kv
        self._mesh, self._instance_id = mesh, instance_id
        self._loads = LoadTable()
        self._watcher = Watcher(bus, mesh=mesh, on_up=self._up, on_down=self._down)

    async def start(self) -> None:
        """Follow from now on."""
        await self._bus.subscribe(subjects.load(self._mesh, "*", "*"), self._on_load)
        await self._bus.subscribe(subjects.kv_events(self._mesh, "*"), self._on_kv_event)
        self._bus.on_connect(self._connected)
        await self._watcher.start()

    async def stop(self) -> None:
        """Follow no longer."""
        await self._watcher.stop()

    async def _connected(self) -> None:
        # Events may have been lost without a successor that shows the gap.
        self._kv.doubt()

    def _up(self, presence: Presence) -> None:
        if presence.role == KV_CACHE:
            self._kv.up(presence)
        self._desk.act(lambda scheduler, now_s: scheduler.instance_up(presence, now_s))

    def _down(self, instance_id: str) -> None:
        self._loads.forget(instance_id)
        self._kv.down(instance_id)
        self._desk.act(lambda scheduler, now_s: scheduler.instance_down(instance_id))

    async def _on_load(self, message: Message) -> None:
        try:
            numbered = NumberedLoad.from_json(message.payload)
        except ValueError as error:
            logger.warning("bad load report", extra={"subject": message.subject, "error": str(error)})
            return
        instance_id = numbered.instance_id
        if self._watcher.get(instance_id) is None or not self._loads.take(numbered):
            return
        is_own = instance_id == self._instance_id
        self._desk.act(
            lambda scheduler, now_s: scheduler.fleet.report(instance_id, numbered.report, now_s, is_own=is_own)
        )

    async def _on_kv_event(self, message: Message) -> None:
        try:
            event = events_pb2.KvEvent.FromString(message.payload)
        except DecodeError as error:
            logger.warning("bad KV event", extra={"subject": message.subject, "error": str(error)})
            return
        self._kv.take(
            event.instance_id,
            KvChange(
                number=event.sequence_number,
                stored_blocks=[short_hash(one) for one in event.stored_blocks],
                removed_blocks=[short_hash(one) for one in event.removed_blocks],
                stored_snapshots=[short_hash(one) for one in event.stored_snapshots],
                removed_snapshots=[short_hash(one) for one in event.removed_snapshots],
                is_cleared=event.cleared,
            ),
        )
