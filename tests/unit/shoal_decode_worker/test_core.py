"""Attempts, admission, finishing and drain."""

from __future__ import annotations

import pytest
from shoal_common.errors import Draining, InvalidArgument, Superseded
from shoal_decode_worker.core import AttemptNotNewer, ChoiceStart, DecodeCore, QueueFull, UnknownRequest
from shoal_decode_worker.entries import FinishReason, TokenEntry
from shoal_decode_worker.frames import Frames, FramesNotOpen
from shoal_decode_worker.ledger import RequestLedger


def make(max_requests: int = 4) -> DecodeCore:
    frames = Frames(expiry_s=30.0, max_gateways=4, step_tokens=6)
    frames.open_stream("gateway", 1, [], 0.0)
    return DecodeCore(frames=frames, max_requests=max_requests)


def take_in(core: DecodeCore, request_id: str = "r", attempt: int = 1, gateway_id: str = "gateway") -> RequestLedger:
    request, _ = core.open(
        request_id=request_id, attempt=attempt, gateway_id=gateway_id, choices=[ChoiceStart(), ChoiceStart()]
    )
    return request


def five_tokens(choice_index: int = 0) -> TokenEntry:
    return TokenEntry(choice_index=choice_index, output_index=0, token_ids=(1, 2, 3, 4, 5))


def test_a_higher_attempt_aborts_the_older_one_and_says_where_it_stood() -> None:
    core = make()
    older = take_in(core, attempt=1)
    core.emit("r", 1, five_tokens())
    newer, superseded = core.open(request_id="r", attempt=3, gateway_id="gateway", choices=[ChoiceStart()])
    assert superseded is not None
    assert superseded.request is older
    assert isinstance(superseded.error, Superseded)
    assert superseded.error.metadata["next_index.0"] == "5"
    assert core.find("r", 1) is None
    assert core.find("r", 3) is newer


@pytest.mark.parametrize("attempt", [1, 2])
def test_an_equal_or_lower_attempt_is_refused(attempt: int) -> None:
    core = make()
    take_in(core, attempt=2)
    with pytest.raises(AttemptNotNewer):
        take_in(core, attempt=attempt)


def test_closing_an_aborted_attempt_leaves_the_newer_one() -> None:
    core = make()
    older = take_in(core, attempt=1)
    newer = take_in(core, attempt=2)
    core.close(older)
    assert core.find("r", 2) is newer


def test_entries_of_a_request_that_is_gone_are_dropped() -> None:
    core = make()
    core.close(take_in(core))
    assert core.emit("r", 1, five_tokens()) is None


def test_a_full_worker_refuses_but_lets_a_newer_attempt_in() -> None:
    core = make(max_requests=1)
    take_in(core)
    with pytest.raises(QueueFull):
        take_in(core, "other")
    take_in(core, attempt=2)
    assert core.live_count == 1


def test_a_draining_worker_refuses_and_moves_with_the_next_index_of_each_choice() -> None:
    core = make()
    take_in(core)
    core.emit("r", 1, five_tokens(choice_index=1))
    core.is_draining = True
    with pytest.raises(Draining):
        take_in(core, "other")
    (failure,) = core.move_all()
    assert (failure.error.code, failure.error.reason) == ("ABORTED", "MOVED")
    assert failure.error.metadata == {"next_index.0": "0", "next_index.1": "5"}


def test_a_refused_request_leaves_nothing_behind() -> None:
    core = make()
    with pytest.raises(FramesNotOpen):
        take_in(core, gateway_id="unknown")
    assert core.live_count == 0


def test_finish_drops_tokens_past_the_index_and_what_the_engine_still_brings() -> None:
    core = make()
    request = take_in(core)
    core.emit("r", 1, five_tokens())
    core.finish("r", 1, 0, 2)
    core.emit("r", 1, TokenEntry(choice_index=0, output_index=5, token_ids=(6,)))
    end = request.choices[0].end
    assert end is not None
    assert (end.finish_reason, end.token_count) == (FinishReason.STOP, 2)
    assert request.take(100) == []


def test_finish_is_idempotent_and_never_lengthens() -> None:
    core = make()
    request = take_in(core)
    core.emit("r", 1, five_tokens())
    core.finish("r", 1, 0, 3)
    core.finish("r", 1, 0, 3)
    with pytest.raises(InvalidArgument) as refused:
        core.finish("r", 1, 0, 4)
    assert refused.value.reason == "END_INDEX_AHEAD"
    assert request.choices[0].emitted == 3


def test_finish_of_a_choice_or_request_that_is_not_there_is_an_error() -> None:
    core = make()
    with pytest.raises(UnknownRequest):
        core.finish("r", 1, 0, 0)
    take_in(core)
    with pytest.raises(InvalidArgument):
        core.finish("r", 1, 2, 0)


def test_a_finished_choice_that_comes_along_keeps_its_count() -> None:
    core = make()
    request, _ = core.open(
        request_id="r",
        attempt=2,
        gateway_id="gateway",
        choices=[ChoiceStart(output_ids=(7, 8), is_finished=True), ChoiceStart(output_ids=(9,))],
    )
    assert request.next_indices() == [2, 1]
    end = request.choices[0].end
    assert end is not None
    assert end.token_count == 2
    assert request.choices[1].limit == 257
