"""When frames leave, on a clock that moves only while everybody waits."""

from __future__ import annotations

import asyncio
import itertools
import selectors
from array import array
from collections.abc import AsyncIterator
from typing import Any

import pytest
from shoal.decode.v1 import decode_service_pb2 as pb
from shoal_decode_worker.core import ChoiceStart, DecodeCore
from shoal_decode_worker.engine_like import EngineEvents, EngineStats, StepEntry
from shoal_decode_worker.entries import TokenEntry
from shoal_decode_worker.frames import Frames
from shoal_decode_worker.frames_stream import FRAME_GAP_S, serve_frames
from shoal_decode_worker.generation import GenerationStart, SamplingSpec
from shoal_decode_worker.sessions import Sessions


class JumpingSelector(selectors.SelectSelector):
    """Instead of waiting for `timeout` it moves the clock by as much."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout is not None:
            self.now_s += max(0.0, timeout)
        return ready


class JumpingLoop(asyncio.SelectorEventLoop):
    """Its time is the selector's."""

    def __init__(self) -> None:
        self.clock = JumpingSelector()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now_s


class Engine:
    """Emits what the test says."""

    def attach(self, events: EngineEvents) -> None:
        self.events = events

    def grant(self, *_: object) -> None:
        """There is room in any case."""

    def stats(self) -> EngineStats:
        return EngineStats()


async def hello_and_nothing_more() -> AsyncIterator[pb.FramesRequest]:
    yield pb.FramesRequest(hello=pb.Hello(gateway_id="gateway"))
    await asyncio.Event().wait()


async def frames_of(step_s: float, step_count: int) -> list[tuple[float, list[int]]]:
    """Steps of one token each, `step_s` apart: when each frame left, and the tokens in it."""
    loop = asyncio.get_running_loop()
    engine: Any = Engine()
    frames = Frames(expiry_s=30.0, max_gateways=4, step_tokens=6)
    sessions = Sessions(
        core=DecodeCore(frames=frames, max_requests=4), frames=frames, engine=engine, clock=lambda: loop.time()
    )
    left: list[tuple[float, list[int]]] = []

    async def write(message: pb.FramesResponse) -> None:
        if message.HasField("frame"):
            left.append((loop.time(), [one for entry in message.frame.entries for one in entry.token_ids]))

    stream = asyncio.create_task(
        serve_frames(hello_and_nothing_more(), write, sessions=sessions, frames=frames, beat_s=1000.0)
    )
    await asyncio.sleep(0.5)
    sessions.open(
        GenerationStart(
            request_id="r",
            attempt=1,
            gateway_id="gateway",
            numerics_id=None,
            cache_root=None,
            tenant_tag=b"",
            prompt_ids=array("I", [1]),
            sampling=SamplingSpec(seed=1),
            choices=(ChoiceStart(),),
        )
    )
    began_s = loop.time()
    for index in range(step_count):
        entry = TokenEntry(choice_index=0, output_index=index, token_ids=(index,), finish_reason=None)
        engine.events.on_step(index + 1, [StepEntry("r", 1, entry)])
        await asyncio.sleep(step_s)
    await asyncio.sleep(0.5)
    stream.cancel()
    await asyncio.gather(stream, return_exceptions=True)
    return [(at_s - began_s, tokens) for at_s, tokens in left]


@pytest.mark.parametrize("step_s", [0.0, FRAME_GAP_S / 10, FRAME_GAP_S / 3])
def test_frames_of_short_steps_leave_a_millisecond_apart_and_the_first_at_once(step_s: float) -> None:
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        left = runner.run(frames_of(step_s, 100))
    times = [at_s for at_s, _ in left]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert times[0] == 0.0
    assert min(gaps) >= FRAME_GAP_S - 1e-9
    # No later than the gap asks for: the last token waits at most as long.
    assert max(gaps) <= FRAME_GAP_S + step_s + 1e-9
    assert [one for _, tokens in left for one in tokens] == list(range(100))


def test_frames_of_longer_steps_leave_at_once() -> None:
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        left = runner.run(frames_of(3 * FRAME_GAP_S, 20))
    assert [tokens for _, tokens in left] == [[index] for index in range(20)]
    assert [at_s for at_s, _ in left] == pytest.approx([3 * FRAME_GAP_S * index for index in range(20)], abs=1e-9)
