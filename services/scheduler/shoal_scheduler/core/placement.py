"""Which worker a request runs on, and who prefills."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shoal_scheduler.core.cost import CostModel, cheapest
from shoal_scheduler.core.fleet import Fleet
from shoal_scheduler.core.instance import Instance
from shoal_scheduler.core.kv_view import KvView
from shoal_scheduler.core.leases import Lease
from shoal_scheduler.core.messages import Placement, Target

MAX_PREFILL_WORKERS = 2


@dataclass(frozen=True, slots=True)
class Chosen:
    """A place: the decode worker, prefill workers to try in order, and the hit to expect."""

    decode: Instance
    prefill: Sequence[Instance]
    hit_tokens: int
    uncached_tokens: int

    def answer(self, placement_id: str) -> Placement:
        """The same as the gateway hears it."""
        return Placement(
            placement_id=placement_id,
            decode=_target(self.decode),
            prefill=tuple(map(_target, self.prefill)),
            kv_id=self.decode.presence.kv_id,
            numerics_id=self.decode.presence.numerics_id,
            constraint_id=self.decode.presence.constraint_id,
            expected_hit_tokens=self.hit_tokens,
        )


@dataclass(frozen=True, slots=True)
class Blocked:
    """No room now.

    waits_for       the workers that may take it later; nobody behind it should take these first
    is_whole_pool   these are all workers that a request of its pool could wait for
    """

    waits_for: Collection[str]
    is_whole_pool: bool


class Placer:
    """Chooses. Deterministic: ties go round by instance id, from the one chosen last."""

    def __init__(self, fleet: Fleet, kv: KvView, cost: CostModel, *, remote_prefill_tokens: int) -> None:
        self._fleet, self._kv, self._cost = fleet, kv, cost
        self._remote_prefill_tokens = remote_prefill_tokens
        self._last_decode = self._last_prefill = ""

    def choose(self, lease: Lease, now_s: float, taken: Collection[str]) -> Chosen | Blocked:
        """A place for a request, with `taken` left to those before it. Changes nothing but whose turn it is next."""
        eligible = self._eligible(lease, now_s)
        need = lease.need
        able = [
            one
            for one in eligible
            if one.instance_id not in taken
            and one.is_open(now_s)
            and one.free_slots(now_s) >= need.slots
            and one.free_blocks(now_s) >= need.blocks
        ]
        # Silent ones last: they may be gone, but if nobody reports they are all there is.
        able = [one for one in able if not one.is_stale(now_s)] or able
        if not able:
            is_whole_pool = len(eligible) == len(self._fleet.eligible(lease.spec))
            return Blocked({one.instance_id for one in eligible}, is_whole_pool)
        spec = lease.spec
        hits = self._kv.hits(spec.chains, spec.prompt_tokens)
        costs = [
            (self._cost.of(one, need, spec.prompt_tokens - hits.on(one.presence), now_s), one.instance_id)
            for one in able
        ]
        self._last_decode = cheapest(costs, self._last_decode)
        decode = next(one for one in able if one.instance_id == self._last_decode)
        hit = hits.on(decode.presence)
        prefill = self._prefill(decode, spec.prompt_tokens - hit, now_s)
        if prefill:
            hit = hits.on(prefill[0].presence)
        return Chosen(decode, prefill, hit, spec.prompt_tokens - hit)

    def _eligible(self, lease: Lease, now_s: float) -> Sequence[Instance]:
        """Workers that could run the request to its end and may be asked now, whether they have room or not."""
        size, never = lease.spec.size(), lease.never
        fits = [
            one
            for one in self._fleet.eligible(lease.spec)
            if not one.is_draining and one.could_hold(size) and one.instance_id not in never
        ]
        if lease.began_with is not None:
            # Bit for bit the answer goes on only with its pair; with another one only if that is gone.
            fits = [one for one in fits if one.numerics_id == lease.began_with] or fits
        sound = [one for one in fits if now_s >= one.suspect_until_s] or fits
        return [
            one
            for one in sound
            if (not lease.not_before_s or now_s >= lease.not_before_s.get(one.instance_id, -math.inf))
            and (not one.cut_from_until_s or now_s >= one.cut_from_until_s.get(lease.stream_id, -math.inf))
        ]

    def _prefill(self, decode: Instance, uncached_tokens: int, now_s: float) -> Sequence[Instance]:
        if uncached_tokens < self._remote_prefill_tokens:
            return ()
        candidates = {one.instance_id: one for one in self._fleet.prefill_for(decode, now_s)}
        fresh = {key: one for key, one in candidates.items() if not one.is_stale(now_s)}
        left = fresh or candidates
        chosen: list[Instance] = []
        while left and len(chosen) < MAX_PREFILL_WORKERS:
            costs = [(float(one.waiting_prefill_tokens(now_s)), key) for key, one in left.items()]
            first = cheapest(costs, self._last_prefill)
            chosen.append(left.pop(first))
        if chosen:
            self._last_prefill = chosen[0].instance_id
        return chosen


def _target(instance: Instance) -> Target:
    return Target(instance.instance_id, instance.presence.address)
