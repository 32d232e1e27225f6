"""Which kv_cache node a worker talks to."""

from __future__ import annotations

from shoal_common.kv_transport import host_id
from shoal_common.presence import Presence
from shoal_common.watcher import Watcher

ROLE = "kv_cache"
HOST_LABEL = "host_id"
"""Presence label by which instances of one host find each other; its value is `kv_transport.host_id()`."""


class CacheNodes:
    """The node of this host, else any; a fixed address where one is set. None while there is none."""

    def __init__(self, *, address: str, watcher: Watcher | None) -> None:
        """address: host:port from the settings, empty to follow presence through `watcher`."""
        self._address, self._watcher = address, watcher

    def pick(self) -> str | None:
        """host:port of the node to talk to now."""
        if self._address:
            return self._address
        if self._watcher is None:
            return None
        live = [one for one in self._watcher.of_role(ROLE) if not one.is_draining]
        return min(live, key=_far_then_id).address if live else None


def _far_then_id(presence: Presence) -> tuple[bool, str]:
    here = host_id()
    return (here == "" or presence.labels.get(HOST_LABEL) != here, presence.instance_id)
