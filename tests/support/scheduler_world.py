"""A scheduler's core with a hand-driven clock, and what its gateways were told."""

from __future__ import annotations

from typing import Any

from shoal_common.load import LoadReport
from shoal_common.presence import Presence
from shoal_scheduler.core.bookings import Sums
from shoal_scheduler.core.cost import CostModel
from shoal_scheduler.core.fleet import DECODE, PREFILL, Fleet
from shoal_scheduler.core.instance import Instance
from shoal_scheduler.core.kv_view import KvView
from shoal_scheduler.core.limits import Limits
from shoal_scheduler.core.messages import Answer, Denied, LossCause, Placement, Queued
from shoal_scheduler.core.placement import Placer
from shoal_scheduler.core.requests import RequestSpec
from shoal_scheduler.core.scheduler import Scheduler

MODEL = "tiny"
EMPTY = (Sums(), Sums())


def presence(instance_id: str, role: str = DECODE, **fields: Any) -> Presence:
    """A worker of the pair n1 with 1,000 blocks, 4 slots and a context of 8,192; `fields` replace what is named."""
    values: dict[str, Any] = {
        "model": MODEL,
        "kv_id": "kv",
        "numerics_id": "n1",
        "capacity": {"blocks": 1000, "slots": 4, "max_context": 8192},
    }
    return Presence(instance_id=instance_id, role=role, address=f"{instance_id}:1", **{**values, **fields})


def spec(prompt_tokens: int = 100, max_tokens: int = 50, **fields: Any) -> RequestSpec:
    """A request for the tiny model."""
    return RequestSpec(prompt_tokens=prompt_tokens, max_tokens=max_tokens, **{"model": MODEL, **fields})


def report(free_slots: int = 4, free_blocks: int = 1000, **fields: Any) -> LoadReport:
    """A load report of such a worker."""
    return LoadReport(free_blocks=free_blocks, total_blocks=1000, free_slots=free_slots, total_slots=4, **fields)


def books(instance: Instance) -> tuple[Sums, Sums]:
    """Sums of all that is booked on an instance, and of what it did not report yet."""
    return instance.bookings.held, instance.bookings.unreported


class World:
    """One scheduler replica at `now_s`, with a settled view of an empty fleet and one open stream "g"."""

    def __init__(self, *, remote_prefill_tokens: int = 512, replay_tokens: int = 140, **limits: Any) -> None:
        self.limits = Limits(**limits)
        self.now_s = 100.0
        self.fleet = Fleet(stale_s=self.limits.stale_s)
        self.fleet.first_up_at_s = 0.0
        self.kv = KvView(max_entries=10_000, max_waiting_events=64, replay_tokens=replay_tokens)
        placer = Placer(self.fleet, self.kv, CostModel(), remote_prefill_tokens=remote_prefill_tokens)
        self.core = Scheduler(fleet=self.fleet, kv=self.kv, placer=placer, limits=self.limits, replica_id="s")
        self.core.open_stream("g")
        self.answers: dict[str, list[Answer]] = {}

    def up(self, instance_id: str, role: str = DECODE, **fields: Any) -> Instance:
        """A worker comes, or says something new."""
        self.core.instance_up(presence(instance_id, role, **fields), self.now_s)
        self.settle()
        found = self.fleet.get(instance_id)
        assert found is not None
        return found

    def prefill_up(self, instance_id: str, **fields: Any) -> Instance:
        """A prefill worker comes."""
        return self.up(instance_id, PREFILL, **fields)

    def down(self, instance_id: str) -> None:
        """A worker vanishes."""
        self.core.instance_down(instance_id)
        self.settle()

    def report(self, instance_id: str, **fields: Any) -> None:
        """A worker reports its load."""
        self.fleet.report(instance_id, report(**fields), self.now_s)
        self.settle()

    def submit(self, request_id: str, wanted: RequestSpec | None = None, *, stream: str = "g", **times: float) -> None:
        """A gateway submits; waited_s and remaining_s may be given."""
        self.core.submit(
            stream,
            request_id,
            wanted or spec(),
            waited_s=times.get("waited_s", 0.0),
            remaining_s=times.get("remaining_s", 600.0),
            now_s=self.now_s,
        )
        self.settle()

    def admitted(self, request_id: str, attempt: int = 1) -> None:
        """The worker admits."""
        self.core.admitted(request_id, attempt, self.now_s)
        self.settle()

    def refused(self, request_id: str, attempt: int = 1, reason: str = "OUT_OF_BLOCKS") -> None:
        """The worker refuses."""
        self.core.refused(request_id, attempt, reason, self.now_s)
        self.settle()

    def lost(self, request_id: str, cause: LossCause, *counts: int, attempt: int = 1) -> None:
        """The attempt is gone."""
        self.core.lost(request_id, attempt, cause, counts, self.now_s)
        self.settle()

    def ended(self, request_id: str) -> None:
        """Cancelled."""
        self.core.ended(request_id)
        self.settle()

    def finished(self, request_id: str) -> None:
        """Finished."""
        self.core.finished(request_id, self.now_s)
        self.settle()

    def wait(self, seconds: float) -> None:
        """Time passes, in ticks of half a second."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s = min(self.now_s + 0.5, until_s)
            self.core.tick(self.now_s)
            self.settle()

    def settle(self) -> None:
        """Collect what the scheduler says."""
        for one in self.core.settle(self.now_s):
            self.answers.setdefault(one.request_id, []).append(one.answer)

    def last(self, request_id: str) -> Answer | None:
        """The last answer about a request."""
        return self.answers.get(request_id, [None])[-1]

    def worker_of(self, request_id: str) -> str | None:
        """Where the last answer sent it; None if that was no placement."""
        answer = self.last(request_id)
        return answer.decode.instance_id if isinstance(answer, Placement) else None

    def position_of(self, request_id: str) -> int | None:
        """The place in the queue last told."""
        answer = self.last(request_id)
        return answer.position if isinstance(answer, Queued) else None

    def denial_of(self, request_id: str) -> str | None:
        """Why it was denied."""
        answer = self.last(request_id)
        return answer.reason.value if isinstance(answer, Denied) else None
