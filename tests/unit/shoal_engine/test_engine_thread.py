"""The step thread: commands from outside, events in order, one way to stop."""

import queue
import threading
from collections.abc import Sequence

import pytest
from shoal_common.errors import MeshError, Unavailable
from shoal_engine.commands import CommandQueue
from shoal_engine.core import EngineConfig
from shoal_engine.engine import Engine
from shoal_engine.errors import CommandQueueFull, PromptTooLong
from shoal_engine.events import ChoiceEnd, EngineUsage
from shoal_engine.planner import FixedWidth
from shoal_model.rows import Segment
from support.engine_driver import RecordingSink, request
from support.toy_model import REPLAY, ToyModel, toy_output

WAIT_S = 20


class NotifyingSink(RecordingSink):
    """Says when a request has had its last event."""

    def __init__(self) -> None:
        super().__init__()
        self.done: queue.SimpleQueue[str] = queue.SimpleQueue()

    def on_ended(self, request_id: str, attempt: int, ends: Sequence[ChoiceEnd], usage: EngineUsage) -> None:
        super().on_ended(request_id, attempt, ends, usage)
        self.done.put(request_id)

    def on_failed(self, request_id: str, attempt: int, error: MeshError, next_indices: Sequence[int]) -> None:
        super().on_failed(request_id, attempt, error, next_indices)
        self.done.put(request_id)


class SlowModel(ToyModel):
    """Waits in every forward until it is let through."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.gate = threading.Semaphore(0), threading.Semaphore(0)

    def forward(self, segments: Sequence[Segment]) -> list[int]:
        self.entered.release()
        assert self.gate.acquire(timeout=WAIT_S)
        return super().forward(segments)


def engine(model: ToyModel, sink: NotifyingSink) -> Engine[list[int]]:
    return Engine(model, EngineConfig(replay_length=REPLAY), sink, FixedWidth(5))


def test_a_request_runs_from_another_thread() -> None:
    sink = NotifyingSink()
    e = engine(ToyModel(), sink)
    e.open()
    wanted = request([5, 6, 7], max_tokens=50, ignore_eos=True)
    sink.begin(wanted)
    assert e.admit(wanted).result(WAIT_S).slots == 1
    e.start("r").result(WAIT_S)
    assert sink.done.get(timeout=WAIT_S) == "r"
    assert sink.tokens["r", 0] == toy_output([5, 6, 7], 7, 50, frozenset())
    assert e.close()
    assert e.stats().free_blocks == e.stats().block_count
    assert e.stats().step_count > 0


def test_errors_come_back_through_the_future() -> None:
    e = engine(ToyModel(), NotifyingSink())
    e.open()
    future = e.admit(request([5] * 200_000))
    assert isinstance(future.exception(WAIT_S), PromptTooLong)
    e.close()


def test_closing_fails_what_runs_and_what_waits() -> None:
    sink, model = NotifyingSink(), SlowModel()
    e = engine(model, sink)
    e.open()
    wanted = request([5, 6, 7], max_tokens=50, ignore_eos=True)
    sink.begin(wanted)
    e.admit(wanted).result(WAIT_S)
    e.start("r")
    assert model.entered.acquire(timeout=WAIT_S)
    waiting = e.start("other")
    assert not e.close(timeout_s=0.0)
    model.gate.release(100)
    assert e.close(timeout_s=WAIT_S)
    assert isinstance(sink.failed["r"][0], Unavailable)
    assert isinstance(waiting.exception(WAIT_S), Unavailable)
    with pytest.raises(Unavailable):
        e.admit(wanted)
    assert e.stats().free_slots == e.stats().slot_count


def test_a_cancel_takes_effect_before_the_next_step() -> None:
    sink, model = NotifyingSink(), SlowModel()
    e = engine(model, sink)
    e.open()
    wanted = request([5, 6, 7], max_tokens=50, ignore_eos=True)
    sink.begin(wanted)
    e.admit(wanted).result(WAIT_S)
    e.start("r")
    assert model.entered.acquire(timeout=WAIT_S)
    cancelled = e.cancel("r")
    model.gate.release()
    assert cancelled.result(WAIT_S)
    assert not model.entered.acquire(blocking=False)
    assert e.close(WAIT_S)


def test_an_engine_that_was_never_opened_can_be_closed() -> None:
    e = engine(ToyModel(), NotifyingSink())
    waiting = e.drain()
    assert e.close()
    assert isinstance(waiting.exception(WAIT_S), Unavailable)


def test_a_full_queue_refuses_all_but_what_lets_go() -> None:
    commands = CommandQueue(limit=2)
    commands.put(lambda: 1)
    last = commands.put(lambda: 2)
    with pytest.raises(CommandQueueFull):
        commands.put(lambda: 3)
    urgent = commands.put(lambda: 4, urgent=True)
    commands.run_waiting()
    assert (last.result(0), urgent.result(0)) == (2, 4)
    commands.put(lambda: 5)


def test_a_bug_outside_a_step_ends_every_request_and_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = NotifyingSink()
    e = engine(ToyModel(), sink)
    wanted = request([5, 6, 7], max_tokens=50, ignore_eos=True)
    sink.begin(wanted)
    e.open()
    e.admit(wanted).result(WAIT_S)

    def broken(*_: object) -> list[int]:
        raise RuntimeError("a planner's bug")

    monkeypatch.setattr(e._core._planner, "widths", broken)
    e.start("r").result(WAIT_S)
    assert sink.done.get(timeout=WAIT_S) == "r"
    assert sink.failed["r"][0].code == "INTERNAL"
    assert e.close(WAIT_S)
    with pytest.raises(Unavailable):
        e.admit(wanted)
