"""Tells the bus what changed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from shoal.kv_cache.v1 import events_pb2 as pb
from shoal_common import subjects
from shoal_common.bus import Bus

from shoal_kv_cache.core.changes import Changes
from shoal_kv_cache.core.entries import Key, Kind

logger = logging.getLogger(__name__)

_MAX_PENDING = 4096
_AGAIN_S = 1.0
_MAX_HASHES = 4096
"""Of one event: 140 KB, well below what the bus takes, and a reader is never long busy with one."""


class EventStream:
    """Numbers changes from 1 without gaps and publishes them in order. Readers that miss some ask for the list.

    The queue is bounded: past it events are dropped with their numbers, which is a gap like any other. A gap shows by
    what comes after it: where nothing does, an event without content follows as soon as the bus takes one.
    """

    def __init__(self, bus: Bus, *, mesh: str, instance_id: str) -> None:
        self._bus = bus
        self._subject = subjects.kv_events(mesh, instance_id)
        self._instance_id = instance_id
        self._queue: asyncio.Queue[pb.KvEvent] = asyncio.Queue(_MAX_PENDING)
        self.sequence_number = 0
        self.dropped_count = 0
        self._lost_number = self._sent_number = 0

    def emit(self, changes: Changes, *, is_empty: bool = False) -> None:
        """Queues events for what became visible or stopped being so.

        is_empty: nothing is visible after these changes: one short event says it, whatever went.
        """
        if is_empty:
            if changes.removed:
                self._emit(cleared=True)
            return
        # What was removed and stored again in one step is held: removals go first.
        for removed in _parts(changes.removed):
            self._emit(removed_blocks=_hashes(removed, Kind.BLOCK), removed_snapshots=_hashes(removed, Kind.SNAPSHOT))
        for stored in _parts(changes.stored):
            self._emit(stored_blocks=_hashes(stored, Kind.BLOCK), stored_snapshots=_hashes(stored, Kind.SNAPSHOT))

    async def run(self) -> None:
        """Publishes until cancelled. What cannot be sent is lost, and shows as a gap."""
        while True:
            try:
                async with asyncio.timeout(_AGAIN_S if self._lost_number > self._sent_number else None):
                    event = await self._queue.get()
            except TimeoutError:
                event = self._next()
            if await self._bus.publish(self._subject, event.SerializeToString()):
                self._sent_number = event.sequence_number
            else:
                self._lose(event)

    def _emit(
        self,
        *,
        stored_blocks: Sequence[bytes] = (),
        stored_snapshots: Sequence[bytes] = (),
        removed_blocks: Sequence[bytes] = (),
        removed_snapshots: Sequence[bytes] = (),
        cleared: bool = False,
    ) -> None:
        event = self._next(
            stored_blocks=stored_blocks,
            stored_snapshots=stored_snapshots,
            removed_blocks=removed_blocks,
            removed_snapshots=removed_snapshots,
            cleared=cleared,
        )
        try:
            self._queue.put_nowait(event)
        except asyncio.QueueFull:
            self._lose(event)

    def _lose(self, event: pb.KvEvent) -> None:
        self.dropped_count += 1
        # Where there is no bus there is no reader.
        if not self._bus.is_off:
            self._lost_number = max(self._lost_number, event.sequence_number)

    def _next(self, **content: Any) -> pb.KvEvent:
        self.sequence_number += 1
        return pb.KvEvent(instance_id=self._instance_id, sequence_number=self.sequence_number, **content)


def _parts(keys: Sequence[Key]) -> Iterator[Sequence[Key]]:
    return (keys[begin : begin + _MAX_HASHES] for begin in range(0, len(keys), _MAX_HASHES))


def _hashes(keys: Sequence[Key], kind: Kind) -> list[bytes]:
    return [key.block_hash for key in keys if key.kind is kind]
