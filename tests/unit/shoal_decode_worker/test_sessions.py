"""What events of an engine do to the open calls, with an engine in the test's hands."""

from __future__ import annotations

import asyncio
from array import array
from concurrent.futures import Future

from shoal_common.errors import Internal, Moved
from shoal_decode_worker.core import ChoiceStart, DecodeCore
from shoal_decode_worker.engine_like import EngineEvents, EngineStats, StepEntry
from shoal_decode_worker.entries import FinishReason, RequestUsage, TokenEntry
from shoal_decode_worker.frames import Frames, NextIndex
from shoal_decode_worker.generation import EngineFacts, GenerationStart, SamplingSpec
from shoal_decode_worker.sessions import Sessions


class HandDriven:
    """Notes what it is told, does nothing by itself."""

    def __init__(self) -> None:
        self.cancelled: list[tuple[str, int]] = []
        self.granted: list[tuple[str, int, int, int]] = []
        self.finished: list[tuple[str, int, int, int]] = []

    @property
    def facts(self) -> EngineFacts:
        raise NotImplementedError

    @property
    def is_running(self) -> bool:
        return True

    def attach(self, events: EngineEvents) -> None:
        self.events = events

    def admit(self, start: GenerationStart) -> Future[None]:
        raise NotImplementedError

    def begin(self, request_id: str, attempt: int) -> Future[None]:
        raise NotImplementedError

    def grant(self, request_id: str, attempt: int, choice_index: int, limit: int) -> None:
        self.granted.append((request_id, attempt, choice_index, limit))

    def finish(self, request_id: str, attempt: int, choice_index: int, end_index: int) -> None:
        self.finished.append((request_id, attempt, choice_index, end_index))

    def cancel(self, request_id: str, attempt: int) -> None:
        self.cancelled.append((request_id, attempt))

    def stats(self) -> EngineStats:
        return EngineStats()


class Bench:
    """Sessions over a hand-driven engine and a clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.engine = HandDriven()
        frames = Frames(expiry_s=30.0, max_gateways=4, step_tokens=6)
        core = DecodeCore(frames=frames, max_requests=4)
        self.sessions = Sessions(core=core, frames=frames, engine=self.engine, clock=lambda: self.now_s)

    async def step(self, count: int, *, at: int = 0, reason: FinishReason | None = None, attempt: int = 1) -> None:
        entry = TokenEntry(choice_index=0, output_index=at, token_ids=tuple(range(count)), finish_reason=reason)
        self.engine.events.on_step(1, [StepEntry("r", attempt, entry)])
        await asyncio.sleep(0)


def start(attempt: int = 1, gateway_id: str = "gateway") -> GenerationStart:
    return GenerationStart(
        request_id="r",
        attempt=attempt,
        gateway_id=gateway_id,
        numerics_id=None,
        cache_root=None,
        tenant_tag=b"",
        prompt_ids=array("I", [1]),
        sampling=SamplingSpec(seed=1),
        choices=(ChoiceStart(),),
    )


def wants(index: int) -> list[NextIndex]:
    return [NextIndex(request_id="r", attempt=1, choice_index=0, next_index=index)]


async def test_a_moved_request_tells_the_index_up_to_which_entries_came() -> None:
    bench = Bench()
    bench.sessions.open_stream("gateway", [])
    session = bench.sessions.open(start())
    await bench.step(5)
    bench.engine.events.on_failed("r", 1, Moved("no blocks"))
    await asyncio.sleep(0)
    assert session.failure is not None
    assert session.failure.reason == "MOVED"
    assert session.failure.metadata["next_index.0"] == "5"


async def test_the_first_failure_of_a_request_is_the_one_that_is_told() -> None:
    bench = Bench()
    bench.sessions.open_stream("gateway", [])
    session = bench.sessions.open(start())
    bench.engine.events.on_failed("r", 1, Internal("first"))
    bench.engine.events.on_failed("r", 1, Moved("second"))
    await asyncio.sleep(0)
    assert session.failure is not None
    assert session.failure.reason == "INTERNAL"


async def test_closing_an_unfinished_call_cancels_in_the_engine_and_a_finished_one_does_not() -> None:
    bench = Bench()
    bench.sessions.open_stream("gateway", [])
    session = bench.sessions.open(start())
    await bench.step(2, reason=FinishReason.STOP)
    bench.engine.events.on_ended("r", 1, RequestUsage(prompt_tokens=1))
    await asyncio.sleep(0)
    bench.sessions.acknowledge("gateway", wants(2))
    assert session.request.is_settled
    bench.sessions.close(session)
    assert bench.engine.cancelled == []
    bench.sessions.close(bench.sessions.open(start(attempt=2)))
    assert bench.engine.cancelled == [("r", 2)]


async def test_the_late_close_of_an_older_attempt_does_not_touch_the_newer() -> None:
    bench = Bench()
    bench.sessions.open_stream("gateway", [])
    older = bench.sessions.open(start(attempt=1))
    newer = bench.sessions.open(start(attempt=2))
    assert older.failure is not None
    bench.sessions.close(older)
    await bench.step(3, attempt=2)
    assert newer.request.choices[0].emitted == 3
    assert set(bench.engine.cancelled) == {("r", 1)}


async def test_acknowledging_grants_the_engine_new_room() -> None:
    bench = Bench()
    bench.sessions.open_stream("gateway", [])
    bench.sessions.open(start())
    await bench.step(6)
    bench.sessions.acknowledge("gateway", wants(4))
    assert bench.engine.granted == [("r", 1, 0, 260)]
    bench.sessions.acknowledge("gateway", wants(4))
    assert len(bench.engine.granted) == 1


async def test_a_stream_opened_again_acknowledges_what_its_hello_lists() -> None:
    bench = Bench()
    bench.sessions.open_stream("gateway", [])
    session = bench.sessions.open(start())
    await bench.step(6)
    bench.sessions.open_stream("gateway", wants(6))
    assert bench.engine.granted == [("r", 1, 0, 262)]
    assert session.request.choices[0].acknowledged == 6


async def test_a_gateway_is_lost_after_30_s_of_silence_beats_included() -> None:
    bench = Bench()
    stream = bench.sessions.open_stream("gateway", [])
    session = bench.sessions.open(start())
    bench.now_s += 29
    bench.sessions.heard("gateway")
    bench.now_s += 29
    bench.sessions.expire()
    assert session.failure is None
    bench.now_s += 1
    bench.sessions.expire()
    assert session.failure is not None
    assert session.failure.reason == "FRAMES_LOST"
    assert stream.failure is not None


async def test_drain_waits_then_moves() -> None:
    bench = Bench()
    session = bench.sessions.open(start(gateway_id=""))
    draining = asyncio.create_task(bench.sessions.drain(0.01))
    await asyncio.wait_for(session.changed.wait(), 5)
    assert session.failure is not None
    assert session.failure.reason == "MOVED"
    assert not draining.done()
    bench.sessions.close(session)
    await asyncio.wait_for(draining, 5)
