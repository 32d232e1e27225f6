"""Joins the engine, the core and the open calls: what an event changes, and which call must look again.

Belongs to one event loop; the engine's thread only hands events over.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable

from shoal_common.errors import Aborted, MeshError, Moved

from shoal_decode_worker.core import DecodeCore, Failure, moved
from shoal_decode_worker.engine_like import EngineLike, StepEntry
from shoal_decode_worker.entries import RequestUsage, TokenEntry
from shoal_decode_worker.frames import Frames, Grant, NextIndex
from shoal_decode_worker.generation import GenerationStart
from shoal_decode_worker.ledger import RequestLedger

logger = logging.getLogger(__name__)


class FramesLost(Aborted):
    """Nothing came from the gateway for too long."""

    reason = "FRAMES_LOST"


class Replaced(Aborted):
    """The gateway opened a newer Frames stream."""

    reason = "REPLACED"


class Session:
    """One open Generate call: wakes when its request has entries, has ended, or has failed."""

    def __init__(self, request: RequestLedger) -> None:
        self.request = request
        self.changed = asyncio.Event()
        self.failure: MeshError | None = None

    def fail(self, error: MeshError) -> None:
        """The call must end with this error; the first one stays."""
        self.failure = self.failure or error
        self.changed.set()


class Stream:
    """One open Frames call: wakes when there are entries or a beat is due, and when it must end."""

    def __init__(self, stream_id: int, gateway_id: str) -> None:
        self.stream_id, self.gateway_id = stream_id, gateway_id
        self.changed = asyncio.Event()
        self.ended = asyncio.Event()
        self.failure: MeshError | None = None

    def fail(self, error: MeshError) -> None:
        """The call must end with this error; the first one stays."""
        self.failure = self.failure or error
        self.ended.set()


class Sessions:
    """All open calls of this worker. Implements EngineEvents.

    Invariant: a session exists exactly while its request is live in the core; the engine holds nothing for a request
    without a session.
    """

    def __init__(
        self,
        *,
        core: DecodeCore,
        frames: Frames,
        engine: EngineLike,
        clock: Callable[[], float] = time.monotonic,
        on_drafted: Callable[[Iterable[TokenEntry]], None] = lambda entries: None,
    ) -> None:
        """`on_drafted` is called with those entries of a step for which drafts were made, if there are any."""
        self._core, self._frames, self._engine, self._clock = core, frames, engine, clock
        self._on_drafted = on_drafted
        self._loop, self._thread_id = asyncio.get_running_loop(), threading.get_ident()
        self._sessions: dict[tuple[str, int], Session] = {}
        self._streams: dict[int, Stream] = {}
        self._stream_ids = itertools.count(1)
        self._idle = asyncio.Event()
        self._idle.set()
        self.step = 0
        """The step that the newest entries came out of."""
        engine.attach(self)

    @property
    def step_count(self) -> int:
        """Steps since the start, those that gave no tokens included."""
        return self._engine.stats().step_count

    # Called by the engine, on its thread.

    def on_step(self, step: int, entries: list[StepEntry]) -> None:
        """Hand over to the loop."""
        self._post(self._stepped, step, entries)

    def on_ended(self, request_id: str, attempt: int, usage: RequestUsage) -> None:
        """Hand over to the loop."""
        self._post(self._ended, request_id, attempt, usage)

    def on_failed(self, request_id: str, attempt: int, error: MeshError) -> None:
        """Hand over to the loop."""
        self._post(self._failed, request_id, attempt, error)

    # Generate.

    def open(self, start: GenerationStart) -> Session:
        """Take a request in; an older attempt of it is aborted. Raises what DecodeCore.open does."""
        request, superseded = self._core.open(
            request_id=start.request_id,
            attempt=start.attempt,
            gateway_id=start.gateway_id,
            choices=start.choices,
            first_number=start.first_number,
        )
        if superseded is not None:
            self._engine.cancel(superseded.request.request_id, superseded.request.attempt)
            self._fail(superseded)
        session = self._sessions[(request.request_id, request.attempt)] = Session(request)
        self._idle.clear()
        return session

    def close(self, session: Session) -> None:
        """The call is over, however it ended: what the engine may still hold is let go of."""
        request = session.request
        if request.usage is None:
            self._engine.cancel(request.request_id, request.attempt)
        self._core.close(request)
        self._sessions.pop((request.request_id, request.attempt), None)
        if not self._sessions:
            self._idle.set()

    def delivered(self, session: Session, entries: Iterable[TokenEntry]) -> None:
        """Entries were written to the request's own stream: their reader has them as far as flow control can tell."""
        request = session.request
        for entry in entries:
            choice = request.choices[entry.choice_index]
            if choice.acknowledge(entry.next_index):
                self._engine.grant(request.request_id, request.attempt, entry.choice_index, choice.limit)

    def finish(self, request_id: str, attempt: int, choice_index: int, end_index: int) -> None:
        """The caller ends a choice. Raises UnknownRequest or InvalidArgument."""
        request = self._core.finish(request_id, attempt, choice_index, end_index)
        self._engine.finish(request_id, attempt, choice_index, end_index)
        self._wake(request)

    # Frames.

    def open_stream(self, gateway_id: str, next_indices: list[NextIndex]) -> Stream:
        """A gateway listens from now on; its older stream ends. Raises TooManyGateways."""
        stream = Stream(next(self._stream_ids), gateway_id)
        replaced, grants = self._frames.open_stream(gateway_id, stream.stream_id, next_indices, self._clock())
        self._streams[stream.stream_id] = stream
        if replaced is not None:
            self._end_stream(replaced, Replaced("the gateway opened a newer stream", gateway_id=gateway_id))
        self._grant(grants)
        stream.changed.set()
        return stream

    def close_stream(self, stream: Stream) -> None:
        """The stream is over; its requests wait for the next one."""
        self._streams.pop(stream.stream_id, None)
        self._frames.close_stream(stream.gateway_id, stream.stream_id)

    def heard(self, gateway_id: str) -> None:
        """Any message came from the gateway."""
        self._frames.heard(gateway_id, self._clock())

    def acknowledge(self, gateway_id: str, next_indices: list[NextIndex]) -> None:
        """A gateway took tokens over."""
        self._grant(self._frames.acknowledge(gateway_id, next_indices))

    def expire(self) -> None:
        """Abort the requests of gateways that are gone. Call about once a second."""
        expired = self._frames.expired(self._clock())
        error = FramesLost("nothing came from the gateway for too long")
        for stream_id in expired.stream_ids:
            self._end_stream(stream_id, error)
        for request in expired.requests:
            self._fail(Failure(request=request, error=error))

    # Drain.

    async def drain(self, move_after_s: float) -> None:
        """Take nothing new; let requests end for a while, then move what is left, and wait until all calls are over."""
        self._core.is_draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), move_after_s)
        except TimeoutError:
            failures = self._core.move_all()
            logger.info("moving requests", extra={"requests": len(failures)})
            for failure in failures:
                self._fail(failure)
            await self._idle.wait()

    def _end_stream(self, stream_id: int, error: MeshError) -> None:
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.fail(error)

    def _post(self, callback: Callable[..., None], *args: object) -> None:
        if threading.get_ident() == self._thread_id:
            # An engine that runs on the loop.
            callback(*args)
            return
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            # The loop is closed: the process ends, nobody listens.
            logger.debug("engine event after the end", extra={"callback": callback.__name__})

    def _stepped(self, step: int, entries: list[StepEntry]) -> None:
        self.step = step
        if drafted := [one.entry for one in entries if one.entry.drafted_count]:
            self._on_drafted(drafted)
        told = None
        for request_id, attempt, entry in entries:
            request = self._core.emit(request_id, attempt, entry)
            if request is None:
                continue
            if not request.gateway_id:
                self._wake(request)
            elif (stream_id := self._frames.emitted(request)) is not None and stream_id != told:
                told = stream_id
                self._streams[stream_id].changed.set()

    def _ended(self, request_id: str, attempt: int, usage: RequestUsage) -> None:
        request = self._core.engine_ended(request_id, attempt, usage)
        if request is not None:
            self._wake(request)

    def _failed(self, request_id: str, attempt: int, error: MeshError) -> None:
        request = self._core.find(request_id, attempt)
        if request is not None:
            # Whoever goes on needs the indices up to which entries came, which only the ledger knows.
            told = moved(request) if isinstance(error, Moved) else error
            self._fail(Failure(request=request, error=told))

    def _fail(self, failure: Failure) -> None:
        session = self._sessions.get((failure.request.request_id, failure.request.attempt))
        if session is not None:
            session.fail(failure.error)

    def _wake(self, request: RequestLedger) -> None:
        session = self._sessions.get((request.request_id, request.attempt))
        if session is not None:
            session.changed.set()

    def _grant(self, grants: list[Grant]) -> None:
        for one in grants:
            self._engine.grant(one.request_id, one.attempt, one.choice_index, one.limit)
            session = self._sessions.get((one.request_id, one.attempt))
            if session is not None and session.request.is_settled:
                session.changed.set()
