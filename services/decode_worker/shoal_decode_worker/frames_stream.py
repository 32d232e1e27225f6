"""One open Frames call: reads what the gateway says, writes what the worker has."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from shoal.decode.v1 import decode_service_pb2 as pb
from shoal_common.errors import DeadlineExceeded, MeshError
from shoal_common.rhythm import until_next

from shoal_decode_worker.frame_messages import frame_messages
from shoal_decode_worker.frames import Frames
from shoal_decode_worker.sessions import Sessions, Stream
from shoal_decode_worker.wire import next_indices_from
from shoal_decode_worker.wrong_field import wrong_field

logger = logging.getLogger(__name__)

MAX_FRAME_TOKENS = 8192
"""Of one message: some 200 KB without log-probabilities, 5 MB with 20 of them per token."""
FRAME_GAP_S = 0.001
"""From one frame to the next, where steps are shorter than that."""
_HELLO_TIMEOUT_S = 5.0

Write = Callable[[pb.FramesResponse], Awaitable[None]]


async def serve_frames(
    requests: AsyncIterator[pb.FramesRequest], write: Write, *, sessions: Sessions, frames: Frames, beat_s: float
) -> None:
    """Serve one stream until the gateway ends it. Raises Replaced, FramesLost, or InvalidArgument for a bad start."""
    hello = await _first(requests)
    stream = sessions.open_stream(hello.gateway_id, next_indices_from(hello.next_indices))
    due = asyncio.Event()
    jobs = {
        asyncio.create_task(_read(requests, stream, sessions)),
        asyncio.create_task(_write(write, stream, sessions, frames, due)),
        asyncio.create_task(_beat(stream, due, beat_s)),
        asyncio.create_task(stream.ended.wait()),
    }
    try:
        done, _ = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
        if stream.failure is not None:
            raise stream.failure
        for job in done:
            job.result()
    finally:
        sessions.close_stream(stream)
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)


async def _first(requests: AsyncIterator[pb.FramesRequest]) -> pb.Hello:
    try:
        async with asyncio.timeout(_HELLO_TIMEOUT_S):
            message = await anext(requests, None)
    except TimeoutError as error:
        raise DeadlineExceeded(f"no Hello in {_HELLO_TIMEOUT_S} s", timeout_s=_HELLO_TIMEOUT_S) from error
    if message is None or message.WhichOneof("message") != "hello":
        raise wrong_field("message", "the first one must be hello", reason="HELLO_EXPECTED")
    if not message.hello.gateway_id:
        raise wrong_field("hello.gateway_id", "must not be empty")
    return message.hello


async def _read(requests: AsyncIterator[pb.FramesRequest], stream: Stream, sessions: Sessions) -> None:
    async for message in requests:
        sessions.heard(stream.gateway_id)
        kind = message.WhichOneof("message")
        if kind == "acks":
            sessions.acknowledge(stream.gateway_id, next_indices_from(message.acks.next_indices))
        elif kind == "finish":
            _finish(message.finish, sessions)


def _finish(finish: pb.Finish, sessions: Sessions) -> None:
    try:
        sessions.finish(finish.request_id, finish.attempt, finish.choice_index, finish.end_index)
    except MeshError as error:
        # It crossed the end of the request, or is wrong: no reason to end the stream of all the others.
        logger.debug("finish ignored", extra={"request_id": finish.request_id, "reason": error.reason})


async def _beat(stream: Stream, due: asyncio.Event, beat_s: float) -> None:
    while True:
        due.set()
        stream.changed.set()
        await asyncio.sleep(until_next(beat_s))


async def _write(write: Write, stream: Stream, sessions: Sessions, frames: Frames, due: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    written_s = -FRAME_GAP_S
    while True:
        await stream.changed.wait()
        # A message costs as much as the tokens of many streams: short steps share one.
        if (early_s := written_s + FRAME_GAP_S - loop.time()) > 0:
            await asyncio.sleep(early_s)
        stream.changed.clear()
        if due.is_set():
            due.clear()
            runnable = frames.runnable_count(stream.gateway_id)
            await write(pb.FramesResponse(beat=pb.WorkerBeat(step=sessions.step_count, runnable_count=runnable)))
        while taken := frames.take(stream.gateway_id, stream.stream_id, MAX_FRAME_TOKENS):
            for message in frame_messages(sessions.step, taken):
                written_s = loop.time()
                await write(message)
