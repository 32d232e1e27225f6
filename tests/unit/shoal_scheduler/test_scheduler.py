"""The scheduler by example."""

from __future__ import annotations

from array import array

import pytest
from shoal_common.load import LoadReport
from shoal_scheduler.core.messages import DenialReason, Denied, LossCause, Placement
from support.scheduler_world import EMPTY, World, books, spec


def test_a_request_goes_to_the_worker_with_less_load() -> None:
    world = World()
    world.up("a")
    world.up("b")
    world.report("a", running=3, free_slots=1)
    world.report("b", running=1, free_slots=3)
    world.submit("r")
    assert world.worker_of("r") == "b"


def test_equal_workers_take_turns() -> None:
    world = World()
    for name in "abc":
        world.up(name)
    for index in range(6):
        world.submit(f"r{index}")
    assert [world.worker_of(f"r{index}") for index in range(6)] == ["a", "b", "c", "a", "b", "c"]


def test_placements_not_yet_reported_count_on_top_of_a_report() -> None:
    world = World()
    world.up("a")
    world.report("a", free_slots=2)
    for index in range(3):
        world.submit(f"r{index}")
    assert [world.worker_of(f"r{index}") for index in range(3)] == ["a", "a", None]
    assert world.position_of("r2") == 0


def test_an_admitted_request_counts_once_the_next_report_contains_it() -> None:
    world = World()
    worker = world.up("a")
    world.submit("r")
    world.admitted("r")
    world.now_s += 1
    world.report("a", running=1, free_slots=3)
    assert worker.free_slots(world.now_s) == 3


def test_what_has_finished_makes_room_before_the_next_report_says_so() -> None:
    world = World()
    worker = world.up("a", capacity={"blocks": 100, "slots": 1, "max_context": 8192})
    world.submit("first")
    world.admitted("first")
    world.submit("second")
    world.now_s += 1
    world.report("a", running=1, free_slots=0)
    assert (world.worker_of("second"), worker.busy(world.now_s)) == (None, 1)
    world.now_s += 0.2
    world.finished("first")
    assert world.worker_of("second") == "a"
    assert (worker.free_slots(world.now_s), worker.busy(world.now_s)) == (0, 1)
    # The next report has it all.
    world.admitted("second")
    world.now_s += 1
    world.report("a", running=1, free_slots=0)
    assert (worker.free_slots(world.now_s), worker.busy(world.now_s)) == (0, 1)


def test_an_end_right_after_a_report_may_be_in_it_and_makes_no_room_twice() -> None:
    world = World()
    worker = world.up("a", capacity={"blocks": 100, "slots": 2, "max_context": 8192})
    world.submit("r")
    world.admitted("r")
    world.now_s += 1
    world.report("a", running=1, free_slots=1)
    world.now_s += 1
    world.report("a", running=0, free_slots=2)
    world.now_s += 0.01
    world.finished("r")
    assert worker.free_slots(world.now_s) == 2


def test_a_refused_request_goes_to_another_worker_and_the_full_one_rests() -> None:
    world = World()
    world.up("a")
    world.up("b")
    world.submit("r")
    world.refused("r")
    assert world.worker_of("r") == "b"
    world.submit("next")
    assert world.worker_of("next") == "b"
    world.report("a")
    world.submit("after")
    assert world.worker_of("after") == "a"


def test_the_sixth_refusal_is_a_denial_with_a_time_to_retry() -> None:
    world = World()
    world.up("a")
    world.submit("r")
    for attempt in range(1, 7):
        while world.worker_of("r") is None:
            world.wait(0.5)
        assert world.denial_of("r") is None
        world.refused("r", attempt)
    answer = world.last("r")
    assert isinstance(answer, Denied)
    assert answer.reason.value == "NO_CAPACITY"
    assert answer.retry_after_s is not None
    assert answer.retry_after_s >= 1


def test_a_refusal_of_a_past_attempt_changes_nothing() -> None:
    world = World()
    world.up("a")
    world.up("b")
    world.submit("r")
    world.refused("r", 1)
    world.refused("r", 1)
    assert world.core.totals.refusals == 1
    assert world.worker_of("r") == "b"


def test_a_worker_that_the_gateway_cannot_reach_is_not_asked_until_it_reports() -> None:
    world = World()
    world.up("a")
    world.submit("r")
    world.refused("r", 1, "UNAVAILABLE")
    world.wait(2)
    assert world.worker_of("r") is None
    world.report("a")
    assert world.worker_of("r") == "a"


def test_a_request_too_large_for_every_worker_is_denied_for_good() -> None:
    world = World()
    world.up("a", capacity={"blocks": 10, "slots": 4, "max_context": 8192})
    world.submit("r", spec(1000, 400))
    assert world.last("r") == Denied(DenialReason.EXCEEDS_CAPACITY, None)


def test_all_choices_together_decide_about_capacity() -> None:
    world = World()
    world.up("a", capacity={"blocks": 10, "slots": 4, "max_context": 8192})
    world.submit("fits", spec(128 * 2, 129, choice_count=4))
    assert world.worker_of("fits") == "a"
    world.submit("not", spec(128 * 2, 2 * 128 + 2, choice_count=4))
    assert world.denial_of("not") == "EXCEEDS_CAPACITY"


def test_a_model_that_nobody_serves_is_unknown() -> None:
    world = World()
    world.up("a")
    world.submit("r", spec(model="other"))
    assert world.denial_of("r") == "UNKNOWN_MODEL"


def test_no_verdict_falls_before_the_view_has_settled() -> None:
    world = World()
    world.fleet.first_up_at_s = None
    world.up("a", capacity={"blocks": 10, "slots": 4, "max_context": 8192})
    world.submit("big", spec(2000, 100))
    world.submit("other", spec(model="other"))
    assert world.denial_of("big") is None
    world.up("b")
    assert world.worker_of("big") == "b"
    world.wait(2)
    assert world.denial_of("other") == "UNKNOWN_MODEL"


def test_without_workers_a_request_waits_and_is_placed_when_one_comes() -> None:
    world = World()
    world.submit("r")
    world.wait(5)
    assert world.position_of("r") == 0
    world.up("a")
    assert world.worker_of("r") == "a"


def test_without_workers_for_too_long_a_request_is_denied() -> None:
    world = World()
    world.up("a")
    world.down("a")
    world.submit("r")
    world.wait(11)
    assert world.denial_of("r") == "NO_WORKERS"


def test_a_draining_worker_gets_nothing() -> None:
    world = World()
    world.up("a", is_draining=True)
    world.submit("r")
    assert world.worker_of("r") is None
    world.up("b")
    assert world.worker_of("r") == "b"


def test_a_request_that_ran_too_long_in_the_queue_misses_its_deadline() -> None:
    world = World()
    world.up("a", capacity={"blocks": 1000, "slots": 1, "max_context": 8192})
    world.submit("first")
    world.submit("r", remaining_s=3)
    world.wait(4)
    assert world.denial_of("r") == "DEADLINE"


def test_a_small_request_does_not_overtake_a_large_one_that_waits_for_the_same_worker() -> None:
    world = World()
    world.up("a")
    world.report("a", free_blocks=20)
    world.submit("large", spec(4000, 100))
    world.submit("small")
    assert world.worker_of("small") is None
    assert world.position_of("small") == 1
    world.report("a")
    assert (world.worker_of("large"), world.worker_of("small")) == ("a", "a")


def test_a_request_for_another_pair_passes_one_that_waits() -> None:
    world = World()
    world.up("a", capacity={"blocks": 1000, "slots": 1, "max_context": 8192})
    world.up("b", numerics_id="n2")
    world.submit("r1", spec(numerics_id="n1"))
    world.submit("r2", spec(numerics_id="n1"))
    world.submit("r3", spec(numerics_id="n2"))
    assert [world.worker_of(name) for name in ("r1", "r2", "r3")] == ["a", None, "b"]


def test_prefill_is_remote_only_for_long_uncached_prompts_and_within_one_pair() -> None:
    world = World()
    world.up("a")
    world.prefill_up("p-other", numerics_id="n2")
    world.submit("none", spec(2000))
    for name in ("p1", "p2", "p3"):
        world.prefill_up(name)
    world.submit("short", spec(511))
    world.submit("long", spec(512))
    prefills = {name: [one.instance_id for one in _placement(world, name).prefill] for name in world.answers}
    assert prefills == {"none": [], "short": [], "long": ["p1", "p2"]}


def test_the_prefill_worker_with_the_shorter_queue_is_named_first() -> None:
    world = World()
    world.up("a")
    world.prefill_up("p1")
    world.prefill_up("p2")
    world.submit("r1", spec(2000))
    world.submit("r2", spec(600))
    assert [_placement(world, name).prefill[0].instance_id for name in ("r1", "r2")] == ["p1", "p2"]


@pytest.mark.parametrize(
    ("cause", "is_avoided"),
    [
        (LossCause.BROKEN, True),
        (LossCause.NO_PROGRESS, True),
        (LossCause.MOVED, False),
    ],
)
def test_only_a_broken_or_stuck_worker_is_avoided_by_others(cause: LossCause, is_avoided: bool) -> None:
    world = World()
    world.up("a")
    world.submit("r")
    world.admitted("r")
    world.up("b")
    world.report("b", running=3, free_slots=1)
    world.lost("r", cause, 5)
    world.ended("r")
    world.report("a")
    world.submit("next")
    assert (world.worker_of("next") != "a") == is_avoided


def test_suspicion_ends_after_a_while() -> None:
    world = World()
    world.up("a")
    world.submit("r")
    world.up("b")
    world.report("b", running=3, free_slots=1)
    world.lost("r", LossCause.BROKEN)
    world.wait(6)
    world.submit("next")
    assert world.worker_of("next") == "a"


def test_a_suspect_worker_is_used_when_there_is_no_other() -> None:
    world = World()
    world.up("a")
    world.submit("r")
    world.lost("r", LossCause.BROKEN)
    assert len([one for one in world.answers["r"] if isinstance(one, Placement)]) == 2


def test_a_lost_answer_goes_on_within_its_pair_even_if_it_must_wait() -> None:
    world = World()
    world.up("a", capacity={"blocks": 1000, "slots": 1, "max_context": 8192})
    world.submit("r")
    world.submit("filler")
    world.ended("filler")
    world.up("b", numerics_id="n2")
    world.lost("r", LossCause.MOVED, 7)
    assert world.worker_of("r") is None
    world.report("a")
    assert world.worker_of("r") == "a"


def test_a_lost_answer_goes_on_with_another_pair_when_its_own_is_gone() -> None:
    world = World()
    world.up("a")
    world.submit("r")
    world.up("b", numerics_id="n2")
    world.down("a")
    world.lost("r", LossCause.BROKEN, 7)
    assert world.worker_of("r") == "b"


def test_a_constrained_request_goes_where_constraints_are_compiled_and_goes_on_where_alike() -> None:
    world = World()
    world.up("none")
    world.submit("r", spec(constraint_id=""))
    assert world.worker_of("r") is None
    world.up("a", constraint_id="c1")
    assert world.worker_of("r") == "a"
    world.up("b", constraint_id="c2")
    world.down("a")
    world.lost("r", LossCause.BROKEN, 7)
    assert world.worker_of("r") is None
    world.up("c", constraint_id="c1")
    assert world.worker_of("r") == "c"
    # Nothing was said yet: any engine will do.
    world.submit("s", spec(constraint_id=""))
    world.down(world.worker_of("s") or "")
    world.lost("s", LossCause.BROKEN, 0)
    assert world.worker_of("s") is not None


def test_a_moved_request_goes_before_those_that_never_ran() -> None:
    world = World()
    world.up("a", capacity={"blocks": 1000, "slots": 1, "max_context": 8192})
    world.submit("r")
    world.submit("other")
    world.lost("r", LossCause.MOVED, 3)
    world.report("a", free_slots=1)
    assert world.worker_of("r") == "a"
    assert world.worker_of("other") is None


def test_a_request_that_breaks_worker_after_worker_is_given_up() -> None:
    world = World(max_losses=2)
    world.up("a")
    world.submit("r")
    for attempt in (1, 2, 3):
        world.lost("r", LossCause.BROKEN, attempt=attempt)
    assert world.denial_of("r") == "TOO_MANY_ATTEMPTS"


def test_a_silent_worker_is_avoided_but_does_not_read_as_full() -> None:
    world = World()
    world.up("a")
    world.up("b")
    world.report("a", free_slots=0, free_blocks=0, running=4)
    world.now_s += 6
    world.report("b", running=2, free_slots=2)
    world.submit("r1")
    world.submit("r2")
    assert [world.worker_of("r1"), world.worker_of("r2")] == ["b", "b"]
    world.submit("r3")
    assert world.worker_of("r3") == "a"


def test_what_other_replicas_placed_counts() -> None:
    world = World()
    world.up("a")
    world.up("s2", "scheduler")
    world.fleet.report("s2", LoadReport(in_flight={"a": 4}), world.now_s)
    world.submit("r")
    assert world.worker_of("r") is None
    world.down("s2")
    assert world.worker_of("r") == "a"


def test_our_own_load_report_does_not_count_twice() -> None:
    world = World()
    worker = world.up("a")
    world.up("s", "scheduler")
    world.submit("r")
    world.fleet.report("s", LoadReport(in_flight=world.fleet.in_flight()), world.now_s, is_own=True)
    assert worker.others_in_flight == 0
    assert world.fleet.in_flight() == {"a": 1}


def test_a_broken_stream_is_forgotten_after_five_seconds() -> None:
    world = World()
    worker = world.up("a")
    world.submit("r")
    world.core.break_stream("g", world.now_s)
    world.wait(4.5)
    assert len(worker.bookings) == 1
    world.wait(1)
    assert (len(worker.bookings), len(world.core.leases)) == (0, 0)


def test_an_adopted_request_survives_the_end_of_its_old_stream() -> None:
    world = World()
    worker = world.up("a")
    world.submit("r")
    world.core.break_stream("g", world.now_s)
    world.core.open_stream("g2")
    _adopt(world, "r", "g2")
    world.wait(10)
    assert len(worker.bookings) == 1
    world.ended("r")
    assert books(worker) == EMPTY


def test_an_adopted_request_is_placed_again_when_it_is_lost() -> None:
    world = World()
    world.up("a")
    world.up("b")
    _adopt(world, "r", "g", attempt=3)
    world.lost("r", LossCause.BROKEN, 10, attempt=3)
    assert world.worker_of("r") == "b"


def test_a_request_submitted_anew_keeps_the_time_it_waited() -> None:
    world = World()
    world.up("a", capacity={"blocks": 1000, "slots": 1, "max_context": 8192})
    world.submit("first")
    world.submit("early")
    world.submit("earliest", waited_s=20)
    world.ended("first")
    assert (world.worker_of("earliest"), world.worker_of("early")) == ("a", None)


def test_a_repeated_submit_repeats_the_answer_and_places_nothing() -> None:
    world = World()
    worker = world.up("a")
    world.submit("r")
    world.submit("r")
    assert world.answers["r"][0] == world.answers["r"][1]
    assert len(worker.bookings) == 1


def test_after_cancelled_what_crosses_it_is_ignored() -> None:
    world = World()
    worker = world.up("a")
    world.submit("r")
    world.ended("r")
    world.admitted("r")
    world.refused("r")
    world.lost("r", LossCause.BROKEN)
    assert (len(worker.bookings), len(world.core.queue), worker.is_suspect(world.now_s)) == (0, 0, False)


def test_a_full_queue_denies_the_tenant_with_the_most_waiting() -> None:
    world = World(max_queued=3)
    world.up("a", capacity={"blocks": 1000, "slots": 1, "max_context": 8192})
    world.submit("running")
    for index in range(4):
        world.submit(f"greedy{index}", spec(tenant="greedy"))
    assert world.denial_of("greedy3") == "QUEUE_FULL"
    world.submit("modest", spec(tenant="modest"))
    assert world.denial_of("greedy2") == "QUEUE_FULL"
    assert world.position_of("modest") is not None


def test_a_full_queue_denies_the_user_of_the_tenant_with_the_most_waiting() -> None:
    world = World(max_queued=4)
    world.up("a", capacity={"blocks": 1000, "slots": 1, "max_context": 8192})
    world.submit("running")
    for index in range(4):
        world.submit(f"greedy{index}", spec(tenant="a", user="greedy"))
    world.submit("modest", spec(tenant="a", user="modest"))
    assert world.denial_of("greedy3") == "QUEUE_FULL"
    world.submit("other", spec(tenant="b", user="greedy"))
    assert world.denial_of("greedy2") == "QUEUE_FULL"
    assert None not in [world.position_of(name) for name in ("greedy0", "greedy1", "modest", "other")]
    world.submit("greedy4", spec(tenant="a", user="greedy"))
    assert world.denial_of("greedy4") == "QUEUE_FULL"


def test_a_full_queue_lets_a_higher_priority_in() -> None:
    world = World(max_queued=1)
    world.up("a", capacity={"blocks": 1000, "slots": 1, "max_context": 8192})
    world.submit("running")
    world.submit("low")
    world.submit("high", spec(priority=1))
    assert world.denial_of("low") == "QUEUE_FULL"
    assert world.position_of("high") == 0


def test_the_time_to_retry_follows_the_rate_of_placements() -> None:
    world = World(max_queued=20)
    world.up("a", capacity={"blocks": 1000, "slots": 1, "max_context": 8192})
    world.submit("r0")
    for index in range(1, 21):
        world.submit(f"r{index}")
    for index in range(10):
        world.now_s += 1
        world.ended(f"r{index}")
        world.submit(f"more{index}")
    world.submit("denied")
    answer = world.last("denied")
    assert isinstance(answer, Denied)
    assert answer.retry_after_s == pytest.approx(20, rel=0.2)


def test_positions_are_told_anew_as_the_queue_moves() -> None:
    world = World()
    world.up("a", capacity={"blocks": 1000, "slots": 1, "max_context": 8192})
    for name in ("running", "r1", "r2"):
        world.submit(name)
    assert world.position_of("r2") == 1
    world.ended("running")
    world.wait(0.5)
    assert world.position_of("r2") == 0


def test_a_worker_that_comes_back_from_a_lapse_has_its_bookings_again() -> None:
    world = World()
    world.up("a")
    world.submit("r")
    world.submit("running")
    world.admitted("running")
    world.down("a")
    worker = world.up("a")
    assert (len(worker.bookings), worker.bookings.unadmitted_count) == (2, 1)


def test_hashes_kept_are_bounded() -> None:
    world = World(max_chain_length=10)
    world.submit("r1", spec(chains={"n1": array("Q", range(8))}))
    world.submit("r2", spec(chains={"n1": array("Q", range(8))}))
    assert world.core.leases.chain_length == 8
    world.ended("r1")
    world.ended("r2")
    assert world.core.leases.chain_length == 0


def _placement(world: World, request_id: str) -> Placement:
    answer = world.last(request_id)
    assert isinstance(answer, Placement)
    return answer


def _adopt(world: World, request_id: str, stream: str, attempt: int = 1) -> None:
    world.core.adopt(
        stream,
        request_id,
        spec(),
        attempt=attempt,
        worker_id="a",
        output_counts=(5,),
        waited_s=0,
        remaining_s=600,
        now_s=world.now_s,
    )
    world.settle()
