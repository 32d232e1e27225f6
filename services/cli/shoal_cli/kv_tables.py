"""What KV cache nodes hold, as tables for people and as JSON for programs. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.kv_cache.v1 import kv_cache_service_pb2 as pb

_TIER_NAMES = {
    pb.TIER_RAM: "memory",
    pb.TIER_SSD: "disk",
    pb.TIER_PEERS: "peers",
    pb.TIER_REMOTE: "remote",
}
_STATS_HEADER = ("node", "tier", "blocks", "snapshots", "used", "of", "read", "written", "failed", "dropped", "state")
_GROUPS_HEADER = ("node", "model", "numerics", "tenant", "tier", "blocks", "snapshots", "used")
_SHORT = 12
"""Digits of an id that are shown to people; --json has all."""


def tier_name(tier: pb.Tier.ValueType) -> str:
    """The tier in one word."""
    return _TIER_NAMES.get(tier, "?")


def size(num_bytes: float) -> str:
    """Bytes for people, in powers of 1024 as the settings count them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"


def stats_lines(address: str, stats: pb.GetStatsResponse) -> list[tuple[str, ...]]:
    """Rows of one node."""
    return [
        (
            stats.node_id or address,
            tier_name(one.tier),
            f"{one.block_count:,}",
            f"{one.snapshot_count:,}",
            size(one.used_bytes),
            size(one.capacity_bytes) if one.capacity_bytes else "-",
            size(one.read_bytes),
            size(one.written_bytes),
            f"{one.failure_count:,}",
            f"{one.dropped_count:,}",
            one.failing_reason or "ok",
        )
        for one in stats.tiers
    ]


def stats_table(answers: Sequence[tuple[str, pb.GetStatsResponse]]) -> str:
    """One row per node and tier, then one line of hits per node."""
    rows = [row for address, stats in answers for row in stats_lines(address, stats)]
    lines = [_table(_STATS_HEADER, rows), ""]
    lines += [f"{stats.node_id or address}: {_hits(stats)}" for address, stats in answers]
    return "\n".join(lines)


def groups_table(answers: Sequence[tuple[str, pb.ListGroupsResponse]]) -> str:
    """One row per node, group and tier that holds any of it."""
    rows = [
        (
            address,
            _short(group.kv_id),
            _short(group.numerics_id),
            _short(group.tenant_tag.hex()) or "-",
            tier_name(tier.tier),
            f"{tier.block_count:,}",
            f"{tier.snapshot_count:,}",
            size(tier.used_bytes),
        )
        for address, listed in answers
        for group in sorted(listed.groups, key=lambda one: (one.kv_id, one.numerics_id, one.tenant_tag))
        for tier in group.tiers
    ]
    return _table(_GROUPS_HEADER, rows)


def stats_as_json(address: str, stats: pb.GetStatsResponse) -> dict[str, object]:
    """One node."""
    return {
        "address": address,
        "node_id": stats.node_id,
        "leases": stats.lease_count,
        "acquires": stats.acquire_count,
        "hits": stats.hit_count,
        "queried_tokens": stats.queried_tokens,
        "hit_tokens": stats.hit_tokens,
        "evicted": stats.evicted_count,
        "corrupt": stats.corrupt_count,
        "tiers": [_tier_as_json(one) for one in stats.tiers],
    }


def groups_as_json(address: str, listed: pb.ListGroupsResponse) -> list[dict[str, object]]:
    """All groups of one node."""
    return [
        {
            "address": address,
            "kv_id": group.kv_id,
            "numerics_id": group.numerics_id,
            "tenant_tag": group.tenant_tag.hex(),
            "tiers": [_tier_as_json(one) for one in group.tiers],
        }
        for group in listed.groups
    ]


def _tier_as_json(one: pb.TierStats) -> dict[str, object]:
    return {
        "tier": tier_name(one.tier),
        "blocks": one.block_count,
        "snapshots": one.snapshot_count,
        "used_bytes": one.used_bytes,
        "capacity_bytes": one.capacity_bytes,
        "read_bytes": one.read_bytes,
        "written_bytes": one.written_bytes,
        "failures": one.failure_count,
        "dropped": one.dropped_count,
        "failing_reason": one.failing_reason,
    }


def _hits(stats: pb.GetStatsResponse) -> str:
    share = f"{stats.hit_tokens / stats.queried_tokens:.1%}" if stats.queried_tokens else "-"
    return (
        f"{stats.acquire_count:,} acquires, {stats.hit_count:,} with a hit, {share} of the tokens asked for; "
        f"{stats.lease_count:,} leases, {stats.evicted_count:,} evicted, {stats.corrupt_count:,} damaged"
    )


def _short(text: str) -> str:
    return text[:_SHORT]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, *rows]
    widths = [max(len(row[column]) for row in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in lines
    )
