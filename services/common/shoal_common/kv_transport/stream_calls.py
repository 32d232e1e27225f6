"""Unary methods that the byte stream serves beside gRPC."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

from google.protobuf.message import DecodeError, Message
from opentelemetry.trace import Span, SpanKind

from shoal_common.errors import DeadlineExceeded, Internal, InvalidArgument, MeshError, Unimplemented
from shoal_common.kv_transport.stream_frames import Call, FrameBuffer, FrameKind, StreamBroken, pack_frame
from shoal_common.request_scope import REQUEST_ID_KEY, request_id
from shoal_common.rpc.status import to_status
from shoal_common.telemetry import TRACER, extract, may_record

logger = logging.getLogger(__name__)

_INTERNAL_MESSAGE = "internal error; the server's log has the details"


@dataclass(frozen=True, slots=True)
class StreamCall:
    """A unary method that the stream serves beside gRPC, for its lower latency: the same handler, the same meaning.

    request_type   protobuf class of the request
    handler        runs on the event loop that started the server, is cancelled when the caller leaves or its deadline
                   passes; a MeshError becomes the caller's, as by gRPC
    at_once        asked before it, and answers what needs no waiting: without a task, a timer, or a span that nobody
                   records; None for the rest, and then nothing has been done
    """

    request_type: type[Message]
    handler: Callable[[Any], Awaitable[Message]]
    at_once: Callable[[Any], Message | None] | None = None


def begin_call(calls: Mapping[str, StreamCall], body: bytes) -> bytes | Coroutine[Any, Any, bytes]:
    """The frame that answers a CALL, ANSWER or ERROR, or what makes it. Raises StreamBroken for a body that is none.

    Called on the event loop that runs the handlers.
    """
    call = Call.unpack(body)
    try:
        method = calls.get(call.method)
        if method is None:
            raise Unimplemented(f"the stream has no {call.method!r}", reason="UNKNOWN_METHOD", method=call.method)
        try:
            request = method.request_type.FromString(call.request)
        except DecodeError as error:
            raise InvalidArgument.at("request", str(error)) from error
        answer = None if method.at_once is None else _at_once(method.at_once, call, request)
    except Exception as error:
        return _failed(call, error)
    return _answer(method, call, request) if answer is None else pack_frame(FrameKind.ANSWER, answer)


async def answer_call(calls: Mapping[str, StreamCall], body: bytes) -> bytes:
    """As `begin_call`, to its end."""
    begun = begin_call(calls, body)
    return begun if isinstance(begun, bytes) else await begun


def answer_call_on(
    loop: asyncio.AbstractEventLoop, calls: Mapping[str, StreamCall], body: bytes, *, timeout_s: float
) -> bytes:
    """As `answer_call`, from another thread than that of `loop`. Raises TimeoutError when the loop does not run."""
    running = asyncio.run_coroutine_threadsafe(answer_call(calls, body), loop)
    try:
        return running.result(timeout_s)
    except concurrent.futures.CancelledError as error:
        raise StreamBroken("the server ends") from error
    finally:
        running.cancel()


def error_frame(error: MeshError) -> bytes:
    """What tells a peer of an error."""
    return pack_frame(FrameKind.ERROR, to_status(error).SerializeToString())


def _at_once(answer_now: Callable[[Any], Message | None], call: Call, request: Message) -> bytes | None:
    is_recorded = may_record(call.metadata)
    set_before = request_id.set(call.metadata.get(REQUEST_ID_KEY, ""))
    try:
        with _span(call) if is_recorded else nullcontext():
            answer = answer_now(request)
    finally:
        request_id.reset(set_before)
    return None if answer is None else answer.SerializeToString()


async def _answer(method: StreamCall, call: Call, request: Message) -> bytes:
    request_id.set(call.metadata.get(REQUEST_ID_KEY, ""))
    try:
        with _span(call):
            try:
                async with asyncio.timeout(call.timeout_s):
                    answer = await method.handler(request)
            except TimeoutError as error:
                seconds = call.timeout_s
                raise DeadlineExceeded(f"{call.method} took more than {seconds} s", timeout_s=seconds) from error
            return pack_frame(FrameKind.ANSWER, answer.SerializeToString())
    except Exception as error:
        return _failed(call, error)


def _failed(call: Call, error: Exception) -> bytes:
    if isinstance(error, MeshError):
        return error_frame(error)
    logger.error("unexpected error in a method", extra={"method": call.method}, exc_info=error)
    return error_frame(Internal(_INTERNAL_MESSAGE))


def _span(call: Call) -> AbstractContextManager[Span]:
    return TRACER.start_as_current_span(
        call.method,
        context=extract(call.metadata),
        kind=SpanKind.SERVER,
        attributes={"rpc.system": "shoal_stream", "rpc.method": call.method},
        record_exception=False,
        set_status_on_exception=False,
    )


class CallConnection(asyncio.Protocol):
    """A connection that only makes calls, on the event loop itself: without a thread's two hand-overs a call.

    One call at a time. Who sends another before the answer, does not read answers, or is silent for `idle_s`, is cut.
    """

    def __init__(
        self,
        calls: Mapping[str, StreamCall],
        *,
        idle_s: float,
        ended: Callable[[CallConnection], None],
        admits: Callable[[CallConnection, asyncio.BaseTransport], bool] = lambda connection, transport: True,
    ) -> None:
        """admits: asked when it is connected; False cuts it."""
        self._calls, self._idle_s, self._ended, self._admits = calls, idle_s, ended, admits
        self._frames = FrameBuffer()
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._running: asyncio.Task[None] | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._idle_since_s = 0.0

    def close(self) -> None:
        """Cut it. Safe to repeat."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._admits(self, transport):
            self._idle_since_s = self._loop.time()
            self._cut_if_idle()
        else:
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        if self._idle is not None:
            self._idle.cancel()
        if self._running is not None:
            self._running.cancel()
        self._ended(self)

    def data_received(self, data: bytes) -> None:
        try:
            frame = self._frames.feed(data)
            if frame is None:
                return
            kind, body = frame
            if kind is not FrameKind.CALL or self._running is not None or not self._is_drained():
                raise StreamBroken("one call at a time")
            begun = begin_call(self._calls, body)
        except StreamBroken as error:
            logger.debug("stream broken", extra={"error": str(error)})
            self.close()
            return
        if isinstance(begun, bytes):
            self._send(begun)
        else:
            self._running = self._loop.create_task(self._answer(begun))

    async def _answer(self, begun: Coroutine[Any, Any, bytes]) -> None:
        frame = await begun
        self._running = None
        self._send(frame)

    def _send(self, frame: bytes) -> None:
        if self._transport is not None:
            self._transport.write(frame)
        self._idle_since_s = self._loop.time()

    def _is_drained(self) -> bool:
        return self._transport is not None and not self._transport.get_write_buffer_size()

    def _cut_if_idle(self) -> None:
        # Looks again when it would be over, instead of setting a timer for every call.
        left_s = self._idle_s if self._running is not None else self._idle_since_s + self._idle_s - self._loop.time()
        if left_s <= 0:
            self.close()
        else:
            self._idle = self._loop.call_later(left_s, self._cut_if_idle)
