"""A node's counts as metrics."""

from __future__ import annotations

import functools
from typing import Literal

from shoal_common.telemetry import Metrics

from shoal_kv_cache.node import Node
from shoal_kv_cache.stats import NAMES

_NODE = {
    "used_bytes": "Payload bytes in memory",
    "entries": "Blocks and snapshots held",
    "leases": "Open leases",
    "acquire_count": "Acquires since the start",
    "hit_count": "Acquires that found a usable prefix",
    "queried_tokens": "Tokens asked for, in full blocks",
    "hit_tokens": "Tokens found usable",
    "evicted_count": "Payloads evicted",
    "corrupt_count": "Payloads dropped as damaged",
    "unfilled_bytes": "Bytes of memory that writers keep whose puts are over",
}
_TIER = {
    "read_bytes": "Payload bytes read from the tier",
    "written_bytes": "Payload bytes written to the tier",
    "failure_count": "Reads and writes of the tier that failed",
    "dropped_count": "Payloads that the tier would not take",
}


def observe_node(metrics: Metrics, node: Node) -> None:
    """Registers them; read at each scrape, on the admin thread."""

    def number(name: str) -> float:
        return node.stats.latest[name]

    for name, meaning in _NODE.items():
        metrics.observe(f"kv_cache_{name}", meaning, functools.partial(number, name))
    kind: Literal["counter", "gauge"] = "counter"
    for level, counts in node.counts.items():
        for name, meaning in _TIER.items():
            read = functools.partial(getattr, counts, name)
            metrics.observe(f"kv_cache_{NAMES[level]}_{name}", f"{meaning} ({NAMES[level]})", read, kind=kind)
    metrics.observe("kv_cache_peers", "Other nodes that live", lambda: len(node.members))
    metrics.observe("kv_cache_events_dropped", "Events not published", lambda: node.events.dropped_count, kind=kind)
    metrics.observe("kv_cache_queued_bytes", "Bytes that wait for slower tiers", lambda: node.queued_bytes)
