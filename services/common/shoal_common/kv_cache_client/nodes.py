"""Which kv_cache node a worker talks to."""

from __future__ import annotations

import time
from collections.abc import Callable

from shoal_common.kv_transport import host_id
from shoal_common.presence import Presence
from shoal_common.watcher import Watcher

ROLE = "kv_cache"
HOST_LABEL = "host_id"
"""Presence label by which instances of one host find each other; its value is `kv_transport.host_id()`."""


REST_S = 5.0
"""How long a node that failed is left alone: a stopped one would cost every prompt its whole timeout."""


class CacheNodes:
    """The node of this host, else any; a fixed address where one is set. Nodes that failed just now are left out."""

    def __init__(self, *, address: str, watcher: Watcher | None, clock: Callable[[], float] = time.monotonic) -> None:
        """address: host:port from the settings, empty to follow presence through `watcher`."""
        self._address, self._watcher, self._clock = address, watcher, clock
        self._rest_until_s: dict[str, float] = {}

    def pick(self) -> str | None:
        """host:port of the node to talk to now; None while there is none."""
        if self._rest_until_s:
            now_s = self._clock()
            self._rest_until_s = {one: until_s for one, until_s in self._rest_until_s.items() if until_s > now_s}
        return next((one for one in self._in_order() if one not in self._rest_until_s), None)

    def failed(self, address: str) -> None:
        """A node did not answer: leave it alone for a while."""
        self._rest_until_s[address] = self._clock() + REST_S

    def _in_order(self) -> list[str]:
        if self._address:
            return [self._address]
        if self._watcher is None:
            return []
        live = [one for one in self._watcher.of_role(ROLE) if not one.is_draining]
        return [one.address for one in sorted(live, key=_far_then_id)]


def _far_then_id(presence: Presence) -> tuple[bool, str]:
    here = host_id()
    return (here == "" or presence.labels.get(HOST_LABEL) != here, presence.instance_id)
