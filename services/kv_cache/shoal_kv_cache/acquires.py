"""Acquires: the longest usable prefix, from as many tiers as are worth their time, pinned in memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from shoal.kv_cache.v1 import kv_cache_service_pb2 as pb
from shoal_common.errors import ResourceExhausted
from shoal_common.kv_transport.buffers import Buffer

from shoal_kv_cache.asked import Asked, first_wanted, on_disk, tier_hit, whereabouts_of, with_sightings
from shoal_kv_cache.core.entries import BLOCK_TOKENS, Entry, Group, Kind
from shoal_kv_cache.core.found import Copy, Found, FoundSnapshot, Usable
from shoal_kv_cache.core.in_memory import InMemory
from shoal_kv_cache.core.prefix_plan import Level, Reach, Whereabouts, choose, reaches_in_memory, reaches_of
from shoal_kv_cache.movement.promotion import Promoter
from shoal_kv_cache.movement.sources import Look, Sighting, Source
from shoal_kv_cache.movement.ssd import Disk
from shoal_kv_cache.store import Store

_MARGIN_S = 0.05
"""Kept back of a caller's time, so that it hears the answer."""
_GRACE_S = 5.0
"""How long a lease of loading outlives its time: it is released, unless this node dies."""
OnFilled = Callable[[Sequence[Entry]], None]


class Acquirer:
    """Answers acquires.

    What lies in memory is answered without an await. Else the local part is pinned under a lease of loading, slower
    tiers are asked and loaded within the caller's time, and the chain is looked up again: what that finds in memory is
    the answer. One load at a time per missing block: the others wait for it and look again.
    """

    def __init__(
        self,
        store: Store,
        promoter: Promoter,
        sources: Sequence[Source],
        *,
        disk: Disk | None,
        max_loads: int,
        on_filled: OnFilled,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """sources: beyond this node, nearest first. on_filled: told what was stored from them."""
        self._store, self._promoter, self._sources, self._clock = store, promoter, tuple(sources), clock
        self._on_filled = on_filled
        self._disk = disk
        self._levels = [Level.RAM, *([Level.SSD] if disk is not None else []), *(one.level for one in sources)]
        self._local_levels = [one for one in self._levels if one <= Level.SSD]
        self._rates = {one.level: one.rate for one in sources} | ({Level.SSD: disk.rate} if disk is not None else {})
        self._max_loads = max_loads
        self._loading: dict[tuple[Group, bytes], asyncio.Future[None]] = {}
        self._answers: dict[str, pb.AcquireResponse] = {}
        self._running: dict[str, asyncio.Future[None]] = {}

    async def acquire(self, asked: Asked) -> pb.AcquireResponse:
        """See Acquire. A repeat of a lease, also one that is still being worked on, gets the same answer.

        Raises TooManyLeases, ResourceExhausted (TOO_MANY_EXPORTS): nothing is pinned.
        """
        while True:
            known = self._answers.get(asked.lease_id)
            if known is not None:
                return known
            running = self._running.get(asked.lease_id)
            if running is None:
                break
            await asyncio.wait({running})
        future = self._running[asked.lease_id] = asyncio.get_running_loop().create_future()
        try:
            answer = await self._acquire(asked)
            # Released while it was loading: the caller has given up.
            if self._running.get(asked.lease_id) is not future:
                self._store.release(asked.lease_id)
                answer = pb.AcquireResponse()
            elif answer.runs:
                self._answers[asked.lease_id] = answer
            self._count(asked, answer)
            return answer
        except BaseException:
            self._store.release(asked.lease_id)
            raise
        finally:
            if self._running.get(asked.lease_id) is future:
                del self._running[asked.lease_id]
            future.set_result(None)

    def acquire_at_once(self, asked: Asked) -> pb.AcquireResponse | None:
        """The same without waiting, where memory has all that can be had. None: nothing has been done, `acquire` it."""
        known = self._answers.get(asked.lease_id)
        if known is not None:
            return known
        if asked.lease_id in self._running:
            return None
        found = self._store.index.find_in_memory(
            asked.group, asked.hashes, asked.first_index, max_blocks=asked.wish.max_blocks
        )
        if found is None:
            return self._nothing_at_once(asked)
        reaches = reaches_in_memory(found.usable, asked.wish, self._local_levels)
        if reaches[0].hit_blocks < asked.wish.max_blocks and not asked.is_from_peer and self._has_sources():
            return None
        try:
            answer = self._answer(asked, found, found.usable, reaches, used=Level.RAM)
        except ResourceExhausted:
            # What the caller releases by the same call may make room.
            return None
        if answer.runs:
            self._answers[asked.lease_id] = answer
        self._count(asked, answer)
        return answer

    def _nothing_at_once(self, asked: Asked) -> pb.AcquireResponse | None:
        """A miss, where this node has nothing of the chain and no other is to be asked."""
        if not asked.is_from_peer and self._has_sources():
            return None
        found = self._store.index.find(asked.group, asked.hashes, asked.first_index)
        if found.block_count:
            return None
        reaches = self._reaches(self._here(found, asked), found, asked, self._local_levels)
        answer = self._answer(asked, found, self._usable(asked, found), reaches, used=Level.RAM)
        self._count(asked, answer)
        return answer

    def release(self, lease_id: str) -> None:
        """Unpins, or gives up what is being loaded for it; unknown leases are fine."""
        self._running.pop(lease_id, None)
        self._answers.pop(lease_id, None)
        self._store.release(lease_id)

    def expire(self, now_s: float) -> None:
        """Ends the leases whose time is over."""
        self._forget(self._store.expire(now_s))

    def release_owner(self, owner_id: str) -> None:
        """Ends the leases of a dead instance."""
        self._forget(self._store.release_owner(owner_id))

    def _forget(self, lease_ids: Sequence[str]) -> None:
        for lease_id in lease_ids:
            self._answers.pop(lease_id, None)

    async def _acquire(self, asked: Asked) -> pb.AcquireResponse:
        deadline_s = self._clock() + asked.budget_s - _MARGIN_S
        while True:
            found = self._store.index.find(asked.group, asked.hashes, asked.first_index)
            where = self._here(found, asked)
            reaches = self._reaches(where, found, asked, self._local_levels)
            left_s = deadline_s - self._clock()
            if not self._may_load(asked, reaches, left_s):
                return self._answer(asked, found, self._usable(asked, found), reaches, used=Level.RAM)
            missing = self._first_missing(asked, where)
            other = self._loading.get((asked.group, missing))
            if other is None:
                break
            await asyncio.wait({other}, timeout=max(left_s, 0.0))
        loaded = self._loading[asked.group, missing] = asyncio.get_running_loop().create_future()
        try:
            return await self._load(asked, found, where, deadline_s)
        finally:
            del self._loading[asked.group, missing]
            loaded.set_result(None)

    def _here(self, found: Found, asked: Asked) -> Whereabouts:
        return whereabouts_of(found, asked, is_disk_usable=self._disk is not None and not self._disk.is_resting)

    def _may_load(self, asked: Asked, reaches: Sequence[Reach], left_s: float) -> bool:
        """Whether a slower tier may have more than memory, and there is time and room to ask."""
        ram, local = reaches[0], reaches[-1]
        if (
            not asked.hashes
            or ram.hit_blocks >= asked.wish.max_blocks
            or left_s <= 0
            or len(self._loading) >= self._max_loads
        ):
            return False
        is_more_here = local.load_bytes > 0
        return is_more_here or (not asked.is_from_peer and self._has_sources())

    def _has_sources(self) -> bool:
        return any(one.is_there for one in self._sources)

    async def _load(self, asked: Asked, found: Found, where: Whereabouts, deadline_s: float) -> pb.AcquireResponse:
        begun = self._store.epochs.now
        loading_id = asked.lease_id + "\0loading"
        local = found.usable(Copy.ANY, max_hit_tokens=asked.wish.max_blocks * BLOCK_TOKENS)
        count = max(0, min(found.block_count, asked.wish.max_blocks - found.first_index))
        ends_at_s = deadline_s + _GRACE_S
        self._store.pin(loading_id, asked.owner_id, ends_at_s, found, count, local.snapshot)
        sightings: dict[Level, Sighting] = {}
        try:
            await self._look(asked, where, sightings, deadline_s)
            # Looked up again: the lease of loading keeps what was found, not where it lies in the index.
            found = self._store.index.find(asked.group, asked.hashes, asked.first_index)
            where = with_sightings(self._here(found, asked), sightings)
            reaches = self._reaches(where, found, asked, self._levels)
            chosen = choose(
                reaches,
                asked.wish,
                recompute_tokens_per_s=asked.recompute_tokens_per_s,
                budget_s=deadline_s - self._clock(),
            )
            if chosen.level is not Level.RAM:
                await self._fetch(asked, found, where, chosen, sightings, begun, deadline_s)
            # The lease of loading still pins what was found, so that this finds it too.
            now_found = self._store.index.find(asked.group, asked.hashes, asked.first_index)
            return self._answer(asked, now_found, self._usable(asked, now_found), reaches, used=chosen.level)
        finally:
            self._store.release(loading_id)
            for sighting in sightings.values():
                await sighting.close()

    async def _look(
        self, asked: Asked, where: Whereabouts, sightings: dict[Level, Sighting], deadline_s: float
    ) -> None:
        """Asks the sources, nearest first, for what the nearer ones do not have."""
        for source in () if asked.is_from_peer else self._sources:
            begin = first_wanted(asked, with_sightings(where, sightings))
            left_s = deadline_s - self._clock()
            if begin >= asked.wish.max_blocks or left_s <= 0:
                break
            sighting = await source.look(
                Look(
                    lease_id=asked.lease_id,
                    owner_id=asked.owner_id,
                    group=asked.group,
                    hashes=asked.hashes,
                    first_index=asked.first_index,
                    begin=begin,
                    max_blocks=asked.wish.max_blocks,
                    blocks_only=asked.wish.blocks_only,
                    recompute_tokens_per_s=asked.recompute_tokens_per_s,
                    timeout_s=left_s,
                )
            )
            if sighting is not None:
                sightings[source.level] = sighting

    async def _fetch(
        self,
        asked: Asked,
        found: Found,
        where: Whereabouts,
        chosen: Reach,
        sightings: dict[Level, Sighting],
        begun: int,
        deadline_s: float,
    ) -> None:
        pinned = chosen.pinned_blocks(asked.wish)
        at = None if asked.wish.blocks_only or not chosen.hit_blocks else chosen.hit_blocks - 1
        wanted = on_disk(asked, found, min(pinned - found.first_index, found.block_count), at, where)
        left_s = max(deadline_s - self._clock(), 0.0)

        async def from_source(level: Level, sighting: Sighting) -> list[tuple[Entry, Buffer]]:
            blocks = [index for index in range(asked.first_index, pinned) if where.levels[index] == level]
            snapshot = at if at is not None and where.snapshots[at] == level else None
            if not blocks and snapshot is None:
                return []
            return list(await sighting.load(blocks, snapshot, timeout_s=left_s))

        parts = await asyncio.gather(
            self._promoter.from_disk(asked.group, wanted, timeout_s=left_s),
            *(from_source(level, one) for level, one in sightings.items() if level <= chosen.level),
        )
        loaded = [one for part in parts[1:] for one in part or []]
        loaded.sort(key=lambda one: (one[0].position_end, one[0].key.kind is Kind.SNAPSHOT))
        filled = await self._promoter.store_loaded(loaded, begun=begun)
        if filled:
            self._on_filled(filled)

    def _reaches(self, where: Whereabouts, found: Found, asked: Asked, levels: Sequence[Level]) -> list[Reach]:
        form = found.form or self._store.index.block_form(asked.group)
        snapshot_bytes = 0
        if len(found.snapshot_places):
            snapshot_bytes = found.describe_snapshot(int(found.rows[found.snapshot_places[-1]])).form.size_bytes
        block_bytes = form.size_bytes if form is not None else 0
        return reaches_of(
            where,
            asked.wish,
            levels=levels,
            block_bytes=block_bytes,
            snapshot_bytes=snapshot_bytes,
            rates=self._rates,
        )

    def _usable(self, asked: Asked, found: Found) -> Usable:
        return found.usable(Copy.RAM, max_hit_tokens=asked.wish.max_blocks * BLOCK_TOKENS)

    def _answer(
        self, asked: Asked, found: Found | InMemory, usable: Usable, reaches: Sequence[Reach], *, used: Level
    ) -> pb.AcquireResponse:
        """Pins and offers what is in memory now. No await from `find` to here."""
        wish = asked.wish
        snapshot = None if wish.blocks_only else usable.snapshot
        bound = max(usable.hit_tokens, usable.replay_tokens)
        hit = bound if wish.blocks_only else usable.hit_tokens
        replay = usable.replay_tokens if wish.want_replay and usable.replay_tokens > hit else 0
        answer = pb.AcquireResponse(
            hit_tokens=hit,
            replay_tokens=replay,
            present_tokens=max(one.present_blocks for one in reaches) * BLOCK_TOKENS,
            replay_cost_tokens=min(replay, wish.replay_reach_tokens),
            tier_hits=[tier_hit(one, used) for one in reaches],
        )
        count = max(0, max(hit, replay) // BLOCK_TOKENS - found.first_index)
        if count or snapshot is not None:
            self._offer(asked, found, count, snapshot, answer)
        return answer

    def _offer(
        self,
        asked: Asked,
        found: Found | InMemory,
        count: int,
        snapshot: FoundSnapshot | None,
        answer: pb.AcquireResponse,
    ) -> None:
        ends_at_s = self._clock() + asked.lease_s
        self._store.pin(asked.lease_id, asked.owner_id, ends_at_s, found, count, snapshot)
        try:
            offered = self._store.offer(asked.lease_id, found, count, snapshot, asked.offer)
        except ResourceExhausted:
            self._store.release(asked.lease_id)
            raise
        answer.grant.CopyFrom(offered.grant)
        answer.runs.extend(offered.runs)

    def _first_missing(self, asked: Asked, where: Whereabouts) -> bytes:
        for index in range(asked.first_index, len(where.levels)):
            if where.levels[index] != Level.RAM:
                return asked.hashes[index - asked.first_index]
        return asked.hashes[-1]

    def _count(self, asked: Asked, answer: pb.AcquireResponse) -> None:
        if asked.is_from_peer:
            return
        counts = self._store.counts
        counts.acquire_count += 1
        counts.hit_count += answer.hit_tokens > 0
        counts.queried_tokens += len(asked.hashes) * BLOCK_TOKENS
        counts.hit_tokens += answer.hit_tokens
