"""The instances this replica knows, and which of them a request may run on."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from shoal_common.load import LoadReport
from shoal_common.presence import Presence

from shoal_scheduler.core.instance import Instance
from shoal_scheduler.core.requests import Pool, RequestSpec

DECODE = "decode_worker"
PREFILL = "prefill_worker"
SCHEDULER = "scheduler"
_MAX_REMEMBERED_MODELS = 256
_MAX_REMEMBERED_POOLS = 256


class Fleet:
    """Instances by id and role, and the in-flight placements of other scheduler replicas.

    What is booked on an instance goes with it when it vanishes: a process that starts anew has a new id.
    """

    def __init__(self, *, stale_s: float) -> None:
        self._stale_s = stale_s
        self.first_up_at_s: float | None = None
        """When the first decode worker was seen; None before."""
        self._instances: dict[str, Instance] = {}
        self._ids_of_role: dict[str, list[str]] = {}
        self._in_flight: dict[str, Mapping[str, int]] = {}
        self._eligible: dict[Pool, Sequence[Instance]] = {}
        self._models: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._instances)

    def get(self, instance_id: str) -> Instance | None:
        """One instance."""
        return self._instances.get(instance_id)

    def address_of(self, instance_id: str) -> str | None:
        """Where an instance listens; None if it is gone."""
        found = self._instances.get(instance_id)
        return found.presence.address if found is not None else None

    def all(self) -> Sequence[Instance]:
        """Every instance, by id."""
        return [self._instances[key] for key in sorted(self._instances)]

    def of_role(self, role: str) -> Sequence[Instance]:
        """The instances of one role, by id."""
        return [self._instances[key] for key in self._ids_of_role.get(role, ())]

    def up(self, presence: Presence, now_s: float) -> None:
        """An instance is new or says something new."""
        self._eligible.clear()
        known = self._instances.get(presence.instance_id)
        if known is not None:
            known.announce(presence)
        else:
            instance = self._instances[presence.instance_id] = Instance(presence, stale_s=self._stale_s)
            insort(self._ids_of_role.setdefault(presence.role, []), presence.instance_id)
            instance.others_in_flight = self._others_in_flight(presence.instance_id)
        self._instances[presence.instance_id].heard_at_s = now_s
        if presence.role == DECODE and self.first_up_at_s is None:
            self.first_up_at_s = now_s
        if presence.role == DECODE and presence.model:
            self._models[presence.model] = None
            self._models.move_to_end(presence.model)
            if len(self._models) > _MAX_REMEMBERED_MODELS:
                self._models.popitem(last=False)

    def down(self, instance_id: str) -> None:
        """An instance is gone. Safe to repeat."""
        self._eligible.clear()
        gone = self._instances.pop(instance_id, None)
        if gone is None:
            return
        ids = self._ids_of_role[gone.presence.role]
        del ids[bisect_left(ids, instance_id)]
        if self._in_flight.pop(instance_id, None) is not None:
            self._count_others()

    def report(self, instance_id: str, load: LoadReport, now_s: float, *, is_own: bool = False) -> None:
        """Take a load report; those of unknown instances are dropped. Other schedulers' placements in flight count."""
        instance = self._instances.get(instance_id)
        if instance is None:
            return
        instance.report(load, now_s)
        if instance.presence.role == SCHEDULER and not is_own:
            self._in_flight[instance_id] = dict(load.in_flight)
            self._count_others()

    def knows_model(self, model: str) -> bool:
        """Some decode worker serves it, or did: then one may come back. Any model is known by the empty name."""
        return not model or model in self._models

    def eligible(self, spec: RequestSpec) -> Sequence[Instance]:
        """Decode workers of the right model, pair and constraint engines, whatever their state and size; by id."""
        known = self._eligible.get(spec.pool)
        if known is None:
            if len(self._eligible) >= _MAX_REMEMBERED_POOLS:
                self._eligible.clear()
            known = self._eligible[spec.pool] = [one for one in self.of_role(DECODE) if _fits(one.presence, spec)]
        return known

    def prefill_for(self, decode: Instance, now_s: float) -> Sequence[Instance]:
        """Prefill workers that compute what the decode worker computes, and are sound; by id."""
        wanted = decode.presence
        return [
            one
            for one in self.of_role(PREFILL)
            if one.presence.numerics_id == wanted.numerics_id
            and one.presence.kv_id == wanted.kv_id
            and not one.is_draining
            and not one.is_suspect(now_s)
        ]

    def in_flight(self) -> dict[str, int]:
        """Our placements that were not admitted yet, by decode worker: what other replicas should know."""
        counts = {one.instance_id: one.bookings.unadmitted_count for one in self.of_role(DECODE)}
        return {key: count for key, count in counts.items() if count}

    def _count_others(self) -> None:
        for instance in self.of_role(DECODE):
            instance.others_in_flight = self._others_in_flight(instance.instance_id)

    def _others_in_flight(self, instance_id: str) -> int:
        return sum(counts.get(instance_id, 0) for counts in self._in_flight.values())


def _compiles(announced: str, wanted: str) -> bool:
    return announced == wanted if wanted else bool(announced)


def _fits(presence: Presence, spec: RequestSpec) -> bool:
    return (
        (not spec.model or presence.model == spec.model)
        and (spec.numerics_id is None or presence.numerics_id == spec.numerics_id)
        and (spec.constraint_id is None or _compiles(presence.constraint_id, spec.constraint_id))
    )
