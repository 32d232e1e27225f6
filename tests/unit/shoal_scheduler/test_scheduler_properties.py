"""The scheduler against a naive simulation of gateways and workers, in random worlds."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from shoal_common.load import LoadReport
from shoal_scheduler.core.fleet import DECODE
from shoal_scheduler.core.leases import State
from shoal_scheduler.core.messages import Denied, LossCause, Placement
from shoal_scheduler.core.requests import RequestSpec
from support.scheduler_world import EMPTY, World, books, spec

GATEWAYS = ("g", "h")


@dataclass
class Request:
    """A request as its gateway sees it."""

    name: str
    gateway: str
    wanted: RequestSpec
    number: int
    attempt: int = 0
    worker: str | None = None
    is_admitted: bool = False
    was_placed: bool = False
    seen: int = 0


@dataclass
class Rank:
    """A worker as it is: slots, and who holds them."""

    slots: int
    is_draining: bool = False
    holds: set[str] = field(default_factory=set)


class Mesh(RuleBasedStateMachine):
    """Rules are what gateways, workers and time do; invariants are what the scheduler promises."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(homeless_wait_s=1e6, max_losses=10**6, max_refusals=10**6)
        self.world.core.open_stream("h")
        self.live: dict[str, Request] = {}
        self.ranks: dict[str, Rank] = {}
        self.streams = {"g": "g", "h": "h"}
        self.counter = 0

    def hear(self) -> None:
        """Gateways read their answers."""
        for name, answers in self.world.answers.items():
            request = self.live.get(name)
            if request is None:
                continue
            for answer in answers[request.seen :]:
                if isinstance(answer, Placement):
                    self.check_placement(request, answer)
                elif isinstance(answer, Denied):
                    raise AssertionError(f"{name} was denied for {answer.reason}")
            request.seen = len(answers)

    def check_placement(self, request: Request, placement: Placement) -> None:
        worker = placement.decode.instance_id
        assert request.worker is None, "placed twice"
        assert not self.ranks[worker].is_draining, "placed on a draining worker"
        assert request.wanted.numerics_id in (None, placement.numerics_id), "placed with another pair"
        if not request.was_placed:
            earlier = [
                other.name
                for other in self.live.values()
                if other.number < request.number
                and not other.was_placed
                and other.wanted.pool == request.wanted.pool
                and (other.wanted.tenant, other.wanted.user) == (request.wanted.tenant, request.wanted.user)
                and other.wanted.priority == request.wanted.priority
            ]
            assert not earlier, f"{request.name} overtook {earlier}"
        request.worker, request.was_placed = worker, True
        request.attempt += 1

    def placed(self) -> list[Request]:
        return [one for one in self.live.values() if one.worker is not None]

    @rule(
        gateway=st.sampled_from(GATEWAYS),
        tenant=st.sampled_from("xy"),
        user=st.sampled_from(["", "ann"]),
        priority=st.integers(0, 1),
        choice_count=st.integers(1, 2),
        pair=st.sampled_from([None, "n1", "n2"]),
    )
    def submit(self, gateway: str, tenant: str, user: str, priority: int, choice_count: int, pair: str | None) -> None:
        if len(self.live) > 40:
            return
        self.counter += 1
        # Arrival times differ, so that "first" means something.
        self.world.now_s += 0.001
        wanted = spec(tenant=tenant, user=user, priority=priority, choice_count=choice_count, numerics_id=pair)
        request = Request(f"r{self.counter}", gateway, wanted, self.counter)
        self.live[request.name] = request
        self.world.submit(request.name, wanted, stream=self.streams[gateway])

    @rule(slots=st.integers(2, 4), pair=st.sampled_from(["n1", "n2"]))
    def worker_up(self, slots: int, pair: str) -> None:
        if len(self.ranks) > 5:
            return
        self.counter += 1
        name = f"w{self.counter}"
        self.ranks[name] = Rank(slots)
        capacity = {"blocks": 1000, "slots": slots, "max_context": 8192}
        self.world.up(name, numerics_id=pair, capacity=capacity)

    @precondition(lambda self: self.ranks)
    @rule(data=st.data())
    def worker_drains(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.ranks)))
        self.ranks[name].is_draining = True
        known = self.world.fleet.get(name)
        assert known is not None
        self.world.up(
            name, numerics_id=known.presence.numerics_id, capacity=dict(known.presence.capacity), is_draining=True
        )

    @precondition(lambda self: self.ranks)
    @rule(data=st.data())
    def worker_dies(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.ranks)))
        del self.ranks[name]
        self.world.down(name)
        self.hear()
        for request in self.placed():
            if request.worker == name:
                self.lose(request, LossCause.BROKEN)

    def lose(self, request: Request, cause: LossCause) -> None:
        """The gateway reports a loss, or a refusal if it was not admitted."""
        rank = self.ranks.get(request.worker or "")
        if rank is not None:
            rank.holds.discard(request.name)
        was_admitted, request.worker, request.is_admitted = request.is_admitted, None, False
        if was_admitted:
            self.world.lost(request.name, cause, attempt=request.attempt)
        else:
            self.world.refused(request.name, request.attempt, "UNAVAILABLE")
        self.hear()

    @rule(data=st.data())
    def worker_answers(self, data: st.DataObject) -> None:
        """The worker judges its own capacity."""
        waiting = [one for one in self.placed() if not one.is_admitted and one.worker in self.ranks]
        if not waiting:
            return
        request = data.draw(st.sampled_from(waiting))
        assert request.worker is not None
        rank = self.ranks[request.worker]
        held = sum(self.live[name].wanted.choice_count for name in rank.holds)
        if not rank.is_draining and held + request.wanted.choice_count <= rank.slots:
            rank.holds.add(request.name)
            request.is_admitted = True
            self.world.admitted(request.name, request.attempt)
        else:
            reason = "DRAINING" if rank.is_draining else "OUT_OF_SLOTS"
            request.worker = None
            self.world.refused(request.name, request.attempt, reason)

    @rule(data=st.data(), cause=st.sampled_from(LossCause))
    def attempt_is_lost(self, data: st.DataObject, cause: LossCause) -> None:
        running = [one for one in self.placed() if one.is_admitted]
        if running:
            self.lose(data.draw(st.sampled_from(running)), cause)

    @rule(data=st.data())
    def request_ends(self, data: st.DataObject) -> None:
        if self.live:
            self.end(data.draw(st.sampled_from(sorted(self.live))), is_finished=data.draw(st.booleans()))

    def end(self, name: str, *, is_finished: bool = False) -> None:
        request = self.live.pop(name)
        if request.worker in self.ranks:
            self.ranks[request.worker].holds.discard(name)
        if is_finished:
            self.world.finished(name)
        else:
            self.world.ended(name)

    @precondition(lambda self: self.ranks)
    @rule(data=st.data())
    def worker_reports(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.ranks)))
        self.report(name)

    def report(self, name: str) -> None:
        rank = self.ranks[name]
        self.world.now_s += 0.001
        held = sum(self.live[one].wanted.choice_count for one in rank.holds)
        load = LoadReport(
            running=len(rank.holds),
            free_slots=rank.slots - held,
            total_slots=rank.slots,
            free_blocks=900,
            total_blocks=1000,
        )
        self.world.fleet.report(name, load, self.world.now_s)
        self.world.settle()

    @rule(seconds=st.sampled_from([0.1, 1.0, 7.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.wait(seconds)

    @rule(gateway=st.sampled_from(GATEWAYS))
    def stream_breaks_and_comes_back(self, gateway: str) -> None:
        """The gateway takes everything to a new stream: Submit for what waits, Adopt for what runs."""
        core, now_s = self.world.core, self.world.now_s
        core.break_stream(self.streams[gateway], now_s)
        self.counter += 1
        fresh = self.streams[gateway] = f"{gateway}/{self.counter}"
        core.open_stream(fresh)
        for request in [one for one in self.live.values() if one.gateway == gateway]:
            if request.worker is None:
                core.submit(fresh, request.name, request.wanted, waited_s=0.0, remaining_s=600.0, now_s=now_s)
                # It waits anew: there is no promise who comes first among those.
                request.was_placed = True
                continue
            core.adopt(
                fresh,
                request.name,
                request.wanted,
                attempt=request.attempt,
                worker_id=request.worker,
                output_counts=(),
                waited_s=0.0,
                remaining_s=600.0,
                now_s=now_s,
            )
            request.is_admitted = True
            if request.worker in self.ranks:
                self.ranks[request.worker].holds.add(request.name)
        self.world.settle()

    @invariant()
    def every_request_waits_or_is_on_one_worker(self) -> None:
        self.hear()
        queued = {one.request_id for one in self.world.core.queue.in_order()}
        waiting = {one.name for one in self.live.values() if one.worker is None}
        assert waiting == queued
        leased = {one.request_id: one.worker_id for one in self.world.core.leases if one.state is not State.QUEUED}
        assert leased == {one.name: one.worker for one in self.placed()}

    @invariant()
    def books_of_workers_are_what_the_leases_say(self) -> None:
        self.hear()
        for worker in self.world.fleet.of_role(DECODE):
            mine = [one for one in self.placed() if one.worker == worker.instance_id]
            slots = sum(one.wanted.choice_count for one in mine)
            assert (len(worker.bookings), worker.bookings.held.slots) == (len(mine), slots)

    def teardown(self) -> None:
        """Nobody was forgotten: with room for all, all get a place; when all have ended nothing is left."""
        self.hear()
        for name in list(self.ranks):
            if not self.ranks[name].is_draining:
                self.report(name)
        for pair in ("n1", "n2"):
            self.ranks[f"big-{pair}"] = Rank(1000)
            capacity = {"blocks": 10**6, "slots": 1000, "max_context": 8192}
            self.world.up(f"big-{pair}", numerics_id=pair, capacity=capacity)
        # Backoffs double with each refusal; none of these runs reaches an hour.
        for _ in range(12):
            self.world.now_s += 600
            for request in self.live.values():
                lease = self.world.core.leases.get(request.name)
                assert lease is not None
                lease.deadline_s = self.world.now_s + 600
            self.world.wait(0.5)
            self.hear()
        assert all(one.worker is not None for one in self.live.values())
        for name in list(self.live):
            self.end(name)
        assert len(self.world.core.queue) == len(self.world.core.leases) == 0
        assert all(books(one) == EMPTY for one in self.world.fleet.all())


Mesh.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestMesh = Mesh.TestCase
