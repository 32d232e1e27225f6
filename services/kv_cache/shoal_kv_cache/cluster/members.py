"""The live nodes as one of them sees them, and which of them own a segment."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from shoal_common.presence import Presence

from shoal_kv_cache.core.rendezvous import Ring

ROLE = "kv_cache"
NODE_LABEL = "node_id"
"""Presence label: the stable name by which a node owns segments."""
_REST_S = 5.0


@dataclass(frozen=True, slots=True)
class Peer:
    """Another live node."""

    node_id: str
    instance_id: str
    address: str


def peer_of(presence: Presence) -> Peer:
    """A node as it announces itself."""
    return Peer(presence.labels.get(NODE_LABEL) or presence.instance_id, presence.instance_id, presence.address)


class Members:
    """Who is there, this node included.

    Invariant: the ring holds exactly this node and the others that announced themselves and do not drain; of two
    instances with one name the one that came up last counts. A node that failed just now is asked again only after a
    rest: a stopped one would cost every prompt the whole timeout. It keeps its segments meanwhile.
    """

    def __init__(
        self, *, node_id: str, instance_id: str, copies: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.node_id = node_id
        self._instance_id, self._copies, self._clock = instance_id, copies, clock
        self._by_instance: dict[str, Peer] = {}
        self._by_node: dict[str, Peer] = {}
        self._rest_until_s: dict[str, float] = {}
        self._ring = Ring([node_id], copies=copies)

    def __len__(self) -> int:
        """Other nodes."""
        return len(self._by_node)

    def up(self, presence: Presence) -> Peer | None:
        """An instance announces itself, or says something new; returns it if it is another node that has come."""
        if presence.role != ROLE or presence.instance_id == self._instance_id:
            return None
        known = self._by_instance.pop(presence.instance_id, None)
        peer = peer_of(presence)
        if not presence.is_draining and peer.node_id != self.node_id:
            self._by_instance[presence.instance_id] = peer
        self._changed()
        return peer if known is None and presence.instance_id in self._by_instance else None

    def down(self, instance_id: str) -> None:
        """An instance is gone."""
        if self._by_instance.pop(instance_id, None) is not None:
            self._changed()

    def owners(self, first_hash: bytes) -> tuple[str, ...]:
        """Names of the owners of a segment, best first; this node may be among them."""
        return self._ring.owners(first_hash)

    def peer(self, node_id: str) -> Peer | None:
        """Another node to call now; None if it is gone or rests."""
        if self._rest_until_s.get(node_id, 0.0) > self._clock():
            return None
        return self._by_node.get(node_id)

    def peers(self) -> list[Peer]:
        """All others, resting ones too."""
        return list(self._by_node.values())

    def failed(self, node_id: str) -> None:
        """A node did not answer."""
        self._rest_until_s[node_id] = self._clock() + _REST_S

    def _changed(self) -> None:
        self._by_node = {peer.node_id: peer for peer in self._by_instance.values()}
        self._rest_until_s = {one: until for one, until in self._rest_until_s.items() if one in self._by_node}
        names = (self.node_id, *self._by_node)
        if set(names) != set(self._ring.node_ids):
            self._ring = Ring(names, copies=self._copies)
