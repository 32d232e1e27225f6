"""Counts of a node, for GetStats, ListGroups and the metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shoal.kv_cache.v1 import kv_cache_service_pb2 as pb

from shoal_kv_cache.core.index import Usage
from shoal_kv_cache.core.prefix_plan import Level
from shoal_kv_cache.store import Store
from shoal_kv_cache.tier_counts import TierCounts

TIERS = {
    Level.RAM: pb.TIER_RAM,
    Level.SSD: pb.TIER_SSD,
    Level.PEERS: pb.TIER_PEERS,
    Level.REMOTE: pb.TIER_REMOTE,
}
NAMES = {Level.RAM: "memory", Level.SSD: "disk", Level.PEERS: "peers", Level.REMOTE: "remote"}


class NodeStats:
    """Reads what the others count. `counts` has one entry per tier that this node has, nearest first."""

    def __init__(
        self,
        store: Store,
        counts: Mapping[Level, TierCounts],
        *,
        node_id: str,
        ssd_capacity_bytes: Callable[[], int],
    ) -> None:
        self.store, self.counts = store, counts
        self._node_id, self._ssd_capacity_bytes = node_id, ssd_capacity_bytes
        self.latest: dict[str, float] = {}
        """Figures as of the last `refresh`: what another thread may read."""
        self.refresh()

    def get_stats(self) -> pb.GetStatsResponse:
        """See GetStats."""
        ram, ssd = self.store.index.usage()
        used = {Level.RAM: ram, Level.SSD: ssd}
        snapshot_count = self.store.index.snapshot_count()
        counts = self.store.counts
        return pb.GetStatsResponse(
            block_count=len(self.store.index) - snapshot_count,
            snapshot_count=snapshot_count,
            used_bytes=ram.used_bytes,
            capacity_bytes=self.store.ram.capacity_bytes,
            lease_count=len(self.store.index.leases),
            acquire_count=counts.acquire_count,
            hit_count=counts.hit_count,
            queried_tokens=counts.queried_tokens,
            hit_tokens=counts.hit_tokens,
            evicted_count=counts.evicted_count,
            corrupt_count=counts.corrupt_count,
            tiers=[self._tier(level, used.get(level, Usage())) for level in self.counts],
            node_id=self._node_id,
        )

    def list_groups(self, kv_id: str | None, tenant_tag: bytes | None) -> pb.ListGroupsResponse:
        """See ListGroups."""
        answer = pb.ListGroupsResponse()
        for group, usages in self.store.index.groups().items():
            if kv_id not in (None, group.kv_id) or tenant_tag not in (None, group.tenant_tag):
                continue
            tiers = [
                pb.TierStats(
                    tier=TIERS[level],
                    block_count=usage.block_count,
                    snapshot_count=usage.snapshot_count,
                    used_bytes=usage.used_bytes,
                )
                for level, usage in zip((Level.RAM, Level.SSD), usages, strict=True)
                if level in self.counts
            ]
            answer.groups.add(
                kv_id=group.kv_id, numerics_id=group.numerics_id, tenant_tag=group.tenant_tag, tiers=tiers
            )
        return answer

    def refresh(self) -> None:
        """Takes the figures anew."""
        self.latest = self.numbers()

    def numbers(self) -> dict[str, float]:
        """Figures of the node by name."""
        ram, _ = self.store.index.usage()
        counts = self.store.counts
        return {
            "used_bytes": ram.used_bytes,
            "entries": len(self.store.index),
            "leases": len(self.store.index.leases),
            "acquire_count": counts.acquire_count,
            "hit_count": counts.hit_count,
            "queried_tokens": counts.queried_tokens,
            "hit_tokens": counts.hit_tokens,
            "evicted_count": counts.evicted_count,
            "corrupt_count": counts.corrupt_count,
            "unfilled_bytes": self.store.fills.kept_bytes,
        }

    def _tier(self, level: Level, usage: Usage) -> pb.TierStats:
        counts = self.counts[level]
        capacity = {Level.RAM: self.store.ram.capacity_bytes, Level.SSD: self._ssd_capacity_bytes()}
        return pb.TierStats(
            tier=TIERS[level],
            block_count=usage.block_count,
            snapshot_count=usage.snapshot_count,
            used_bytes=usage.used_bytes,
            capacity_bytes=capacity.get(level, 0),
            read_bytes=counts.read_bytes,
            written_bytes=counts.written_bytes,
            failure_count=counts.failure_count,
            dropped_count=counts.dropped_count,
            failing_reason=counts.failing_reason,
        )
