"""What the KV cache nodes hold, followed through their events, and the hit that a worker can expect."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence

from shoal_common.presence import Presence

from shoal_scheduler.core.event_log import EventLog, KvChange
from shoal_scheduler.core.prefix_index import PrefixIndex

HOST_LABEL = "host_id"
"""Presence label of the host: a worker talks to the node on its own."""

_WAY_SHARE = 16
"""Loading a token from another node costs about such a part of computing it."""


class KvView:
    """The index with one event log per node. Invariant: the index knows exactly the nodes that are up."""

    def __init__(self, *, max_entries: int, max_waiting_events: int, replay_tokens: int) -> None:
        self.index = PrefixIndex(max_entries=max_entries)
        self._max_waiting_events = max_waiting_events
        self._replay_tokens = replay_tokens
        self._logs: dict[str, EventLog] = {}
        self._hosts: dict[str, str] = {}
        self.on_need: Callable[[], None] = lambda: None
        """Called whenever a node may need a list."""

    def up(self, presence: Presence) -> None:
        """A node is up."""
        if presence.instance_id not in self._logs:
            self._logs[presence.instance_id] = EventLog(max_waiting=self._max_waiting_events)
            self.index.add_node(presence.instance_id)
            self.on_need()
        self._hosts[presence.instance_id] = presence.labels.get(HOST_LABEL, "")

    def down(self, node_id: str) -> None:
        """A node is gone. Safe to repeat."""
        if self._logs.pop(node_id, None) is not None:
            del self._hosts[node_id]
            self.index.forget_node(node_id)

    def take(self, node_id: str, change: KvChange) -> None:
        """An event came; those of unknown nodes are dropped, their list will hold it."""
        log = self._logs.get(node_id)
        if log is not None:
            self._apply(node_id, log.take(change))
            if log.needs_list:
                self.on_need()

    def listed(self, node_id: str, number: int, blocks: Sequence[int], snapshots: Sequence[int]) -> None:
        """A list of all that a node holds as of event `number` came."""
        log = self._logs.get(node_id)
        later = log.listed(number) if log is not None else None
        if later is not None:
            self.index.clear(node_id)
            self.index.stored(node_id, blocks, snapshots)
            self._apply(node_id, later)

    def doubt(self) -> None:
        """The connection was lost: every node must be listed again."""
        for log in self._logs.values():
            log.doubt()
        self.on_need()

    def needing_list(self) -> Sequence[str]:
        """Nodes to be listed."""
        return [node_id for node_id, log in self._logs.items() if log.needs_list]

    def hits(self, chains: Mapping[str, array[int]], prompt_tokens: int) -> Hits:
        """What the nodes can spare a prompt, per pair."""
        # A hit leaves the replayed end of the prompt to compute.
        reach = prompt_tokens - self._replay_tokens
        found = {pair: self.index.hits(chain, reach) for pair, chain in chains.items()}
        of_all = {pair: self.index.hit_of_all(chain, reach) for pair, chain in chains.items()}
        return Hits({pair: (found[pair], of_all[pair]) for pair in chains if of_all[pair]}, self._hosts)

    def _apply(self, node_id: str, changes: Sequence[KvChange]) -> None:
        for change in changes:
            if change.is_cleared:
                self.index.clear(node_id)
            self.index.removed(node_id, change.removed_blocks, change.removed_snapshots)
            self.index.stored(node_id, change.stored_blocks, change.stored_snapshots)


class Hits:
    """Expected hits of one prompt.

    by_pair   tokens that each node can spare alone, and that all together can
    """

    def __init__(self, by_pair: Mapping[str, tuple[Mapping[str, int], int]], hosts: Mapping[str, str]) -> None:
        self._by_pair, self._hosts = by_pair, hosts
        self._known: dict[tuple[str, str], int] = {}

    def on(self, worker: Presence) -> int:
        """Tokens that a worker can load, from the nodes of its host if there are any, else from the best of all.

        What they lack and others have they fetch; for the way it counts for a sixteenth less.
        """
        if not self._by_pair:
            return 0
        key = (worker.numerics_id, worker.labels.get(HOST_LABEL, ""))
        if key not in self._known:
            self._known[key] = self._find(*key)
        return self._known[key]

    def _find(self, numerics_id: str, host: str) -> int:
        by_node, of_all = self._by_pair.get(numerics_id, ({}, 0))
        local = [node_id for node_id, its_host in self._hosts.items() if host and its_host == host]
        here = max((by_node.get(node_id, 0) for node_id in local or by_node), default=0)
        return of_all - (of_all - here) // _WAY_SHARE
