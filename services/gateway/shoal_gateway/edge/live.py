"""Which gateways live, by presence, and so which share of every limit is this one's. Pure."""

from __future__ import annotations

from shoal_common.presence import Presence

from shoal_gateway.edge.limits import Share


class LiveGateways:
    """The gateways that take requests; this one always does."""

    def __init__(self, own_id: str) -> None:
        self._own_id = own_id
        self._others: set[str] = set()
        self.share = Share()

    def announced(self, gateway: Presence) -> None:
        """A gateway is up, or says something new. One that drains takes no more requests."""
        if gateway.is_draining:
            self.lapsed(gateway.instance_id)
        elif gateway.instance_id != self._own_id:
            self._others.add(gateway.instance_id)
            self._divide()

    def lapsed(self, instance_id: str) -> None:
        """A gateway is gone."""
        self._others.discard(instance_id)
        self._divide()

    def _divide(self) -> None:
        before = sum(one < self._own_id for one in self._others)
        self.share = Share(before, len(self._others) + 1)
