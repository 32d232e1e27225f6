"""An acquire as the node sees it, and how what was found is told. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from google.protobuf.duration_pb2 import Duration
from shoal.common.v1 import kv_transport_pb2 as transport_pb
from shoal.kv_cache.v1 import kv_cache_service_pb2 as pb
from shoal_common.errors import InvalidArgument

from shoal_kv_cache.core.entries import BLOCK_TOKENS, HASH_BYTES, Group, Key, Kind
from shoal_kv_cache.core.found import NO_SLAB, Found
from shoal_kv_cache.core.prefix_plan import Level, Reach, Whereabouts, Wish
from shoal_kv_cache.movement.promotion import OnDisk
from shoal_kv_cache.movement.sources import Sighting
from shoal_kv_cache.payload_checks import MAX_POSITIONS, check_names

_TIERS = {
    Level.RAM: pb.TIER_RAM,
    Level.SSD: pb.TIER_SSD,
    Level.PEERS: pb.TIER_PEERS,
    Level.REMOTE: pb.TIER_REMOTE,
}
_MAX_ID_CHARS = 256


class Asked(NamedTuple):
    """An acquire, parsed and checked. A tuple, not a dataclass, which would be a tenth of the time to answer it."""

    lease_id: str
    owner_id: str
    group: Group
    hashes: Sequence[bytes]
    first_index: int
    wish: Wish
    lease_s: float
    offer: transport_pb.TransportOffer
    is_from_peer: bool
    recompute_tokens_per_s: float
    budget_s: float


def asked_of(request: pb.AcquireRequest, *, max_lease_s: float, budget_s: float) -> Asked:
    """Raises InvalidArgument (MALFORMED_CHAIN) naming the field."""
    hashes = list(request.block_hashes)
    if set(map(len, hashes)) - {HASH_BYTES}:
        raise InvalidArgument.at("block_hashes", f"each must be {HASH_BYTES} bytes", reason="MALFORMED_CHAIN")
    max_hit_tokens, position_begin = request.max_hit_tokens, request.position_begin
    for field, value in (("max_hit_tokens", max_hit_tokens), ("position_begin", position_begin)):
        if value % BLOCK_TOKENS:
            raise InvalidArgument.at(field, f"must be a multiple of {BLOCK_TOKENS}", reason="MALFORMED_CHAIN")
    # A zero byte is in the names of this node's own leases.
    # Another node adds its own name to what it was given.
    max_chars = 2 * _MAX_ID_CHARS if request.is_from_peer else _MAX_ID_CHARS
    lease_id = request.lease_id
    if not 0 < len(lease_id) <= max_chars or "\0" in lease_id:
        raise InvalidArgument.at("lease_id", f"must be 1 to {max_chars} characters, none of them zero")
    if position_begin > MAX_POSITIONS:
        raise InvalidArgument.at("position_begin", f"at most {MAX_POSITIONS}", reason="MALFORMED_CHAIN")
    group = Group(request.kv_id, request.numerics_id, request.tenant_tag)
    check_names(group.kv_id, group.numerics_id, group.tenant_tag)
    first_index = position_begin // BLOCK_TOKENS
    return Asked(
        lease_id=lease_id,
        owner_id=request.owner_id,
        group=group,
        hashes=hashes,
        first_index=first_index,
        wish=Wish(
            max_blocks=min(max_hit_tokens // BLOCK_TOKENS, first_index + len(hashes)),
            want_replay=request.want_replay,
            blocks_only=request.blocks_only,
            replay_reach_tokens=request.replay_reach_tokens,
        ),
        lease_s=min(_seconds(request.time_to_live) or max_lease_s, max_lease_s),
        offer=request.offer,
        is_from_peer=request.is_from_peer,
        recompute_tokens_per_s=max(0.0, request.recompute_tokens_per_s),
        budget_s=budget_s,
    )


def _seconds(duration: Duration) -> float:
    # ToTimedelta refuses what is out of its range; a negative time is over at once.
    return duration.seconds + duration.nanos / 1e9


def whereabouts_of(found: Found, asked: Asked, *, is_disk_usable: bool) -> Whereabouts:
    """Positions before the chain's first hash are the caller's own affair: as good as in memory."""
    before = bytes([Level.RAM]) * found.first_index
    elsewhere = Level.SSD if is_disk_usable else Level.ABSENT
    if found.ram_count == found.block_count:
        here = bytes([Level.RAM]) * found.block_count
    else:
        here = np.where(found.slabs == NO_SLAB, np.uint8(elsewhere), np.uint8(Level.RAM)).astype(np.uint8).tobytes()
    absent = bytes(found.first_index + len(asked.hashes) - len(before) - len(here))
    places = zip(found.snapshot_places.tolist(), found.snapshot_in_ram.tolist(), strict=True)
    snapshots = {
        found.first_index + place: Level.RAM if is_in_ram else Level.SSD
        for place, is_in_ram in places
        if is_in_ram or is_disk_usable
    }
    return Whereabouts(levels=before + here + absent, snapshots=snapshots)


def first_wanted(asked: Asked, where: Whereabouts) -> int:
    """First block after the usable prefix: a snapshot above it may be elsewhere although its block is here."""
    present = where.levels.find(Level.ABSENT)
    end = min(len(where.levels) if present < 0 else present, asked.wish.max_blocks)
    if asked.wish.blocks_only:
        return end
    return max((index + 1 for index in where.snapshots if index < end), default=asked.first_index)


def with_sightings(where: Whereabouts, sightings: Mapping[Level, Sighting]) -> Whereabouts:
    """What is here, and what was seen elsewhere: each payload at the nearest place."""
    levels, snapshots = bytearray(where.levels), dict(where.snapshots)
    for level, sighting in sightings.items():
        for index in sighting.blocks:
            if levels[index] == Level.ABSENT:
                levels[index] = level
        for index in sighting.snapshots:
            snapshots.setdefault(index, level)
    return Whereabouts(levels=bytes(levels), snapshots=snapshots)


def on_disk(asked: Asked, found: Found, count: int, at: int | None, where: Whereabouts) -> list[OnDisk]:
    """What of the first `count` blocks found, and of the snapshot at the end of block `at`, is on disk alone."""
    wanted = []
    for row in range(max(count, 0)):
        if where.levels[found.first_index + row] != Level.SSD:
            continue
        assert found.form is not None
        key = Key(Kind.BLOCK, asked.hashes[row])
        wanted.append(OnDisk(key, int(found.locations[row]), found.form.size_bytes, int(found.checksums[row])))
    if at is not None and where.snapshots[at] == Level.SSD:
        last = found.describe_snapshot(int(found.rows[at - found.first_index]))
        assert last.location is not None
        key = Key(Kind.SNAPSHOT, asked.hashes[at - asked.first_index])
        wanted.append(OnDisk(key, last.location, last.form.size_bytes, last.checksum))
    return wanted


def tier_hit(one: Reach, used: Level) -> pb.TierHit:
    """A reach as it is told."""
    return pb.TierHit(
        tier=_TIERS[one.level],
        hit_tokens=one.hit_blocks * BLOCK_TOKENS,
        replay_tokens=one.replay_blocks * BLOCK_TOKENS,
        load_bytes=one.load_bytes,
        load_s=one.load_s,
        is_used=one.level <= used,
    )
