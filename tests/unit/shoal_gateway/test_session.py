"""What the failure of an attempt means, and that a request ends once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal.common.v1 import sampling_pb2
from shoal.scheduler.v1 import scheduler_service_pb2 as pb
from shoal_common.errors import (
    DeadlineExceeded,
    Draining,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    MeshError,
    Moved,
    OutOfCapacity,
    Unavailable,
)
from shoal_gateway.journal import EntriesMissing, Journal
from shoal_gateway.session import MAX_LOSSES, MAX_REFUSALS, Failed, Lost, Phase, Refused, Session

GOING, STOP = sampling_pb2.FINISH_REASON_UNSPECIFIED, sampling_pb2.FINISH_REASON_STOP


def running(choice_count: int = 1) -> Session:
    session = Session(choice_count)
    assert session.place("n") == 1
    assert session.admitted(1)
    return session


def test_what_fails_before_the_admission_is_a_refusal() -> None:
    session = Session(1)
    session.place("n")
    assert session.failed(1, OutOfCapacity("full", reason="OUT_OF_BLOCKS")) == Refused(
        attempt=1, reason="OUT_OF_BLOCKS"
    )
    assert session.phase is Phase.WAITING
    assert session.place("n") == 2


def test_the_sixth_refusal_is_the_clients() -> None:
    session = Session(1)
    for attempt in range(1, MAX_REFUSALS + 1):
        session.place("n")
        assert isinstance(session.failed(attempt, Draining("bye")), Refused)
    session.place("n")
    verdict = session.failed(MAX_REFUSALS + 1, Draining("bye"))
    assert isinstance(verdict, Failed)
    assert (verdict.error.code, verdict.error.reason) == ("UNAVAILABLE", "TOO_MANY_ATTEMPTS")
    assert verdict.error.retry_after_s
    assert session.place("n") is None


def test_where_no_worker_can_be_exact_the_client_hears_just_that() -> None:
    session, error = Session(1), FailedPrecondition("no", reason="NOT_DETERMINISTIC")
    for attempt in range(1, MAX_REFUSALS + 1):
        session.place("n")
        assert isinstance(session.failed(attempt, error), Refused)
    session.place("n")
    assert session.failed(MAX_REFUSALS + 1, error) == Failed(error=error)


@pytest.mark.parametrize("error", [InvalidArgument("bad"), DeadlineExceeded("late")])
def test_the_callers_fault_is_never_tried_again(error: MeshError) -> None:
    session = Session(1)
    session.place("n")
    assert session.failed(1, error) == Failed(error=error)


def test_a_worker_that_can_never_serve_it_is_passed_over() -> None:
    session = Session(1)
    session.place("n")
    assert isinstance(session.failed(1, FailedPrecondition("no", reason="NUMERICS_MISMATCH")), Refused)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (Unavailable("gone", reason="BROKEN"), pb.LOST_CAUSE_BROKEN),
        (Unavailable("still", reason="NO_PROGRESS"), pb.LOST_CAUSE_NO_PROGRESS),
        (Moved("away"), pb.LOST_CAUSE_MOVED),
        (Draining("bye"), pb.LOST_CAUSE_DRAINED),
        (Internal("bug"), pb.LOST_CAUSE_BROKEN),
    ],
)
def test_a_running_attempt_that_fails_is_lost_with_its_cause_and_counts(error: MeshError, cause: object) -> None:
    session = running(2)
    session.journal.take(1, 0, [5, 6, 7], GOING)
    assert session.failed(1, error) == Lost(attempt=1, cause=cause, output_counts=(0, 3))  # type: ignore[arg-type]


def test_losses_have_an_end() -> None:
    session = Session(1)
    for attempt in range(1, MAX_LOSSES + 1):
        session.place("n")
        session.admitted(attempt)
        assert isinstance(session.failed(attempt, Moved("away")), Lost)
    session.place("n")
    session.admitted(MAX_LOSSES + 1)
    assert isinstance(session.failed(MAX_LOSSES + 1, Moved("away")), Failed)


def test_bugs_of_workers_reach_the_client_after_two_moves() -> None:
    session = Session(1)
    for attempt, kind in ((1, Lost), (2, Lost), (3, Failed)):
        session.place("n")
        session.admitted(attempt)
        assert isinstance(session.failed(attempt, Internal("bug")), kind)


def test_a_failure_after_the_last_token_is_none() -> None:
    session = running()
    session.journal.take(0, 0, [5], STOP)
    assert session.failed(1, Unavailable("gone")) is None
    assert session.phase is Phase.ENDED


def test_older_attempts_change_nothing() -> None:
    session = running()
    session.failed(1, Moved("away"))
    session.place("n")
    assert not session.admitted(1)
    assert session.failed(1, Internal("late")) is None
    assert not session.is_current(1)
    assert session.is_current(2)


def test_a_move_to_other_numerics_is_told() -> None:
    session = running()
    session.failed(1, Moved("away"))
    session.place("other")
    assert session.is_exact, "nothing had been emitted"
    session.admitted(2)
    session.journal.take(0, 0, [5], GOING)
    session.failed(2, Moved("away"))
    session.place("third")
    assert not session.is_exact


@given(st.lists(st.sampled_from(["place", "admit", "refuse", "lose", "finish", "end", "late"]), max_size=40))
def test_attempts_only_grow_and_the_end_is_for_ever(events: list[str]) -> None:
    session = Session(1)
    attempts = [0]
    has_ended = False
    for event in events:
        if event == "place":
            attempt = session.place("n")
            if attempt is not None:
                attempts.append(attempt)
        elif event == "admit":
            session.admitted(session.attempt)
        elif event == "refuse":
            session.failed(session.attempt, OutOfCapacity("full"))
        elif event == "lose":
            session.failed(session.attempt, Moved("away"))
        elif event == "late":
            session.failed(session.attempt - 1, Moved("away"))
        elif event == "finish" and session.is_running:
            session.journal.take(0, len(session.journal.choices[0].output_ids), [1], STOP)
        elif event == "end":
            session.end()
        assert not (has_ended and session.phase is not Phase.ENDED)
        has_ended = session.phase is Phase.ENDED
    assert attempts == list(range(len(attempts)))
    assert session.attempt == attempts[-1]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30))
def test_a_journal_holds_each_token_once_in_order(entries: list[tuple[int, int]]) -> None:
    tokens = list(range(1000, 1300))
    journal = Journal(1)
    new: list[int] = []
    for back, length in entries:
        begin = max(0, len(new) - back)
        entry = tokens[begin : begin + length]
        new += entry[journal.take(0, begin, entry, GOING) :]
    assert new == tokens[: len(new)] == list(journal.choices[0].output_ids)


def test_a_gap_is_an_error_and_changes_nothing() -> None:
    journal = Journal(1)
    journal.take(0, 0, [1, 2], GOING)
    with pytest.raises(EntriesMissing):
        journal.take(0, 3, [4], GOING)
    with pytest.raises(EntriesMissing):
        journal.take(1, 0, [4], GOING)
    assert journal.counts() == [2]


def test_tokens_past_the_end_that_the_gateway_set_are_dropped() -> None:
    journal = Journal(2)
    journal.take(0, 0, [1, 2, 3, 4], GOING)
    journal.finish(0, 2, STOP)
    assert journal.take(0, 4, [5, 6], GOING) == 2
    assert list(journal.choices[0].output_ids) == [1, 2]
    assert not journal.is_finished
    journal.take(1, 0, [9], STOP)
    assert journal.is_finished
