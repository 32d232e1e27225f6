"""Which kv_cache node a worker talks to."""

from __future__ import annotations

from shoal_common.bus import Bus
from shoal_common.kv_cache_client.nodes import REST_S, CacheNodes
from shoal_common.kv_transport import host_id
from shoal_common.presence import Presence
from shoal_common.watcher import Watcher


class Fleet(Watcher):
    """A fleet that the test names."""

    def __init__(self, *live: Presence) -> None:
        super().__init__(Bus.off(), mesh="test")
        self.live = live

    def of_role(self, role: str) -> tuple[Presence, ...]:
        return tuple(one for one in self.live if one.role == role)


def node(name: str, *, host: str = "elsewhere", is_draining: bool = False) -> Presence:
    return Presence(instance_id=name, role="kv_cache", address=name, labels={"host_id": host}, is_draining=is_draining)


def test_the_node_of_this_host_comes_first_and_a_draining_one_never() -> None:
    fleet = Fleet(node("a"), node("b", host=host_id()), node("c", host=host_id(), is_draining=True))
    assert CacheNodes(address="", watcher=fleet).pick() == "b"


def test_a_fixed_address_is_used_whatever_the_fleet_says() -> None:
    assert CacheNodes(address="fixed:1", watcher=Fleet(node("a"))).pick() == "fixed:1"


def test_without_nodes_there_is_none() -> None:
    assert CacheNodes(address="", watcher=Fleet()).pick() is None
    assert CacheNodes(address="", watcher=None).pick() is None


def test_a_node_that_failed_rests_while_another_or_none_is_asked() -> None:
    now_s = 10.0
    nodes = CacheNodes(address="", watcher=Fleet(node("a"), node("b")), clock=lambda: now_s)
    assert nodes.pick() == "a"
    nodes.failed("a")
    assert nodes.pick() == "b"
    nodes.failed("b")
    assert nodes.pick() is None
    now_s += REST_S
    assert nodes.pick() == "a"
