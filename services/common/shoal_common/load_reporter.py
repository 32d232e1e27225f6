"""Publishes load reports on the bus."""

from __future__ import annotations

from shoal_common import subjects
from shoal_common.bus import Bus
from shoal_common.load import LoadReport, NumberedLoad


class LoadReporter:
    """Publishes the reports of one instance."""

    def __init__(self, bus: Bus, *, mesh: str, role: str, instance_id: str) -> None:
        self._bus = bus
        self._role, self._instance_id = role, instance_id
        self._subject = subjects.load(mesh, role, instance_id)
        self._sequence_number = 0

    async def publish(self, report: LoadReport) -> None:
        """Send; a report lost is replaced by the next one."""
        self._sequence_number += 1
        numbered = NumberedLoad(
            role=self._role, instance_id=self._instance_id, sequence_number=self._sequence_number, report=report
        )
        await self._bus.publish(self._subject, numbered.to_json())
