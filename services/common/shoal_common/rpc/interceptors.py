"""What surrounds every method of a server: error mapping, a span, metrics, the request's id."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import SpanKind
from prometheus_client import Gauge, Histogram

from shoal_common.errors import MeshError
from shoal_common.request_scope import REQUEST_ID_KEY, request_id
from shoal_common.rpc.reading import readable, reading
from shoal_common.rpc.status import to_status, trailing_metadata
from shoal_common.telemetry import TRACE_KEYS, TRACER, Metrics, extract, may_record

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    # Generic in the stubs only.
    Handler = grpc.RpcMethodHandler[Any, Any]
    Context = grpc.aio.ServicerContext[Any, Any]
    _Base = grpc.aio.ServerInterceptor[Any, Any]
else:
    _Base = grpc.aio.ServerInterceptor

_INTERNAL_MESSAGE = "internal error; the server's log has the details"


class ServerInterceptor(_Base):
    """Maps MeshError to a status with ErrorInfo, in methods of all four arities.

    Anything else is a bug: logged once with its traceback, sent as INTERNAL without details. A cancellation and an
    abort by the servicer itself pass untouched. Servicer methods must be coroutines or async generators.
    """

    def __init__(self, metrics: Metrics, *, is_edge: bool = False) -> None:
        """is_edge: callers are outside of the mesh; of what they say of themselves only the trace goes on."""
        self._is_edge = is_edge
        self._durations = metrics.histogram(
            "rpc_server_duration_seconds", "Time from the start of a call to its status", ("method", "code")
        )
        self._in_flight = metrics.gauge("rpc_server_in_flight", "Calls being served", ("method",))

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """The handler found, wrapped; None as it is for an unknown method."""
        handler = await continuation(handler_call_details)
        return handler if handler is None else self.around(handler_call_details.method, handler)

    def around(self, method: str, handler: Handler) -> Handler:
        """The handler of a method, wrapped: a coroutine of request and context, which writes what it streams."""
        kind = ("stream" if handler.request_streaming else "unary", "stream" if handler.response_streaming else "unary")
        inner: Callable[..., Any] = getattr(handler, "_".join(kind))
        wrap = self._streaming if handler.response_streaming else self._unary
        about = _About(method, self._in_flight.labels(method))
        make = getattr(grpc, "_".join((*kind, "rpc_method_handler")))
        wrapped: Handler = make(
            wrap(about, inner),
            request_deserializer=reading(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )
        return wrapped

    def _unary(self, about: _About, inner: Callable[..., Any]) -> Callable[[Any, Context], Awaitable[Any]]:
        async def call(request: Any, context: Context) -> Any:
            with self._around(about, context) as outcome:
                try:
                    answer = inner(readable(request), context)
                    return await answer if inspect.isawaitable(answer) else answer
                except Exception as error:
                    await outcome.fail(error)

        return call

    def _streaming(self, about: _About, inner: Callable[..., Any]) -> Callable[[Any, Context], Awaitable[None]]:
        # A coroutine that writes, not a generator: a call cancelled between two messages then ends here, in its own
        # task, and the servicer's `finally` runs before the call is over, not when the garbage collector finds it.
        async def call(request: Any, context: Context) -> None:
            with self._around(about, context) as outcome:
                try:
                    answers = inner(readable(request), context)
                    if inspect.isawaitable(answers):
                        await answers
                        return
                    try:
                        async for answer in answers:
                            await context.write(answer)
                    finally:
                        await answers.aclose()
                except Exception as error:
                    await outcome.fail(error)

        return call

    @contextmanager
    def _around(self, about: _About, context: Context) -> Iterator[_Outcome]:
        # Each call is a task with a context of its own, so what is set here need not be reset.
        metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        if self._is_edge:
            # Baggage could name a tenant or a priority.
            metadata = {key: value for key, value in metadata.items() if key in TRACE_KEYS}
        request_id.set(metadata.get(REQUEST_ID_KEY, ""))
        span = _entered(about.name, metadata)
        outcome = _Outcome(about.method, context)
        about.in_flight.inc()
        started = time.monotonic()
        try:
            yield outcome
        except BaseException:
            if outcome.code == "OK":
                outcome.code = "CANCELLED"
            raise
        finally:
            about.in_flight.dec()
            about.durations(self._durations, outcome.code).observe(time.monotonic() - started)
            if span is not None:
                span.set_attribute("rpc.grpc.status_code", grpc.StatusCode[outcome.code].value[0])
                span.end()


class _About:
    """What is the same in all calls of a method."""

    def __init__(self, method: str, in_flight: Gauge) -> None:
        self.method, self.name, self.in_flight = method, method.lstrip("/"), in_flight
        self._durations: dict[str, Histogram] = {}

    def durations(self, all_methods: Histogram, code: str) -> Histogram:
        """Those that ended with a code."""
        found = self._durations.get(code)
        if found is None:
            found = self._durations[code] = all_methods.labels(self.method, code)
        return found


def _entered(name: str, metadata: dict[str, str]) -> trace.Span | None:
    """The span of a call, current from now on; None where nobody records one and the caller has named its own."""
    caller = extract(metadata)
    if TRACE_KEYS[0] in metadata and not may_record(metadata):
        # Their span and nothing else: baggage is not passed on.
        otel_context.attach(trace.set_span_in_context(trace.get_current_span(caller)))
        return None
    attributes = {"rpc.system": "grpc", "rpc.method": name}
    span = TRACER.start_span(name, context=caller, kind=SpanKind.SERVER, attributes=attributes)
    otel_context.attach(trace.set_span_in_context(span))
    return span


class _Outcome:
    """How one call ended, and the way to end it with an error."""

    def __init__(self, method: str, context: Context) -> None:
        self._method, self._context = method, context
        self.code = "OK"

    async def fail(self, error: Exception) -> None:
        """End the call with the status of `error`; raises always."""
        if isinstance(error, grpc.aio.AbortError):
            self.code = _name(self._context.code())
            raise error
        if isinstance(error, NotImplementedError) and _name(self._context.code()) == "UNIMPLEMENTED":
            self.code = "UNIMPLEMENTED"
            await self._context.abort(grpc.StatusCode.UNIMPLEMENTED, self._context.details() or "")
        if self._context.cancelled():
            self.code = "CANCELLED"
            raise error
        if not isinstance(error, MeshError):
            self.code = "INTERNAL"
            logger.error("unexpected error in a method", extra={"method": self._method}, exc_info=error)
            trace.get_current_span().record_exception(error)
            await self._context.abort(grpc.StatusCode.INTERNAL, _INTERNAL_MESSAGE)
        else:
            self.code = error.code
            status = to_status(error)
            trace.get_current_span().set_attribute("error.type", error.reason)
            await self._context.abort(grpc.StatusCode[error.code], status.message, trailing_metadata(error))


def _name(code: grpc.StatusCode | int | None) -> str:
    """aio contexts hold the code as a number once it is set, as the enum before."""
    if isinstance(code, grpc.StatusCode):
        return code.name
    for one in grpc.StatusCode:
        if one.value[0] == code:
            return one.name
    return "UNKNOWN"
