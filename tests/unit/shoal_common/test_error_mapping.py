"""MeshError to status and back through a real server, for methods of all four arities."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from opentelemetry import trace
from shoal_common.errors import InvalidArgument, MeshError, OutOfCapacity, QuotaExceeded
from shoal_common.request_scope import request_id
from shoal_common.rpc import Channel, Readiness, RpcServer, Service, from_rpc_error, from_status, to_status
from shoal_common.telemetry import Metrics

ARITIES = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
Act = Callable[[Any], Awaitable[bytes]]


def _identity(payload: bytes) -> bytes:
    return payload


def _parsed(payload: bytes) -> bytes:
    if payload == b"malformed":
        raise DecodeError("Error parsing message")
    return payload


async def _read(request: Any) -> None:
    if hasattr(request, "__aiter__"):
        async for _ in request:
            pass


class Probe:
    """A service `test.Probe` with one method per arity; each awaits `act` and answers with what it returns."""

    def __init__(self, act: Act) -> None:
        self._act = act

    async def one(self, request: Any, context: Any) -> bytes:
        await _read(request)
        return await self._act(context)

    async def many(self, request: Any, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        await _read(request)
        yield await self._act(context)

    async def written(self, request: Any, context: Any) -> None:
        await context.write(b"first")
        await context.write(await self._act(context))


def _add(servicer: Any, server: Any) -> None:
    methods = {
        "unary_unary": servicer.one,
        "unary_stream": servicer.many,
        "stream_unary": servicer.one,
        "stream_stream": servicer.many,
        "written_stream": servicer.written,
    }
    handlers = {
        name: getattr(grpc, f"{name.replace('written', 'unary')}_rpc_method_handler")(
            method, request_deserializer=_parsed, response_serializer=_identity
        )
        for name, method in methods.items()
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Probe", handlers),))


@asynccontextmanager
async def probe(act: Act, metrics: Metrics | None = None) -> AsyncIterator[Channel]:
    service = Service("test.Probe", _add, Probe(act))
    server = RpcServer(
        [service],
        listen_address="127.0.0.1:0",
        readiness=Readiness(),
        metrics=metrics or Metrics(),
        has_reflection=False,
    )
    channel = Channel(await server.start())
    try:
        yield channel
    finally:
        await channel.close()
        await server.stop(0)


async def call(channel: Channel, method: str, request: bytes = b"request") -> list[bytes]:
    arity = method.replace("written", "unary")
    stub = getattr(channel, arity)(f"/test.Probe/{method}", _identity, _identity)

    async def requests() -> AsyncIterator[bytes]:
        yield request

    running = stub(requests() if arity.startswith("stream") else request, timeout=10)
    if arity.endswith("unary"):
        return [await running]
    return [answer async for answer in running]


def failing(error: Exception) -> Act:
    async def act(context: Any) -> bytes:
        raise error

    return act


@pytest.mark.parametrize("method", [*ARITIES, "written_stream"])
async def test_a_mesh_error_reaches_the_caller_with_reason_metadata_and_retry_delay(method: str) -> None:
    async with probe(failing(OutOfCapacity("3 blocks wanted, 1 free", retry_after_s=1.5, wanted=3, free=1))) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, method)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    error = from_rpc_error(caught.value)
    assert isinstance(error, OutOfCapacity)
    assert error.message == "3 blocks wanted, 1 free"
    assert dict(error.metadata) == {"wanted": "3", "free": "1"}
    assert error.retry_after_s == 1.5


def test_only_a_callers_own_limit_is_a_quota_failure() -> None:
    def violations(error: MeshError) -> list[tuple[str, str]]:
        kind = error_details_pb2.QuotaFailure
        named = [one for one in to_status(error).details if one.TypeName() == kind.DESCRIPTOR.full_name]
        failures = [kind.FromString(one.value) for one in named]
        return [(one.subject, one.description) for failure in failures for one in failure.violations]

    own = QuotaExceeded("this key may send 3 requests per minute", reason="REQUESTS_PER_MINUTE", retry_after_s=2.0)
    assert violations(own) == [("api_key", "this key may send 3 requests per minute")]
    assert from_status(to_status(own)).retry_after_s == 2.0
    assert violations(OutOfCapacity("no room")) == []


@pytest.mark.parametrize("method", [*ARITIES, "written_stream"])
async def test_a_bug_is_logged_once_and_sent_without_details(method: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        async with probe(failing(KeyError("secret prompt"))) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(channel, method)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(caught.value.details())
    # By whomever: this bug, and not what grpc says of an earlier test's event loop.
    logged = [record for record in caplog.records if record.exc_info and record.exc_info[0] is KeyError]
    assert [record.levelname for record in logged] == ["ERROR"]


@pytest.mark.parametrize("method", [*ARITIES, "written_stream"])
async def test_a_request_that_does_not_parse_is_the_callers_fault(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def act(context: Any) -> bytes:
        return b"last"

    async with probe(act) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, method, b"malformed")
    error = from_rpc_error(caught.value)
    assert (error.code, error.reason) == ("INVALID_ARGUMENT", "MALFORMED_MESSAGE")
    # But what asyncio says of an earlier test's event loop.
    assert not [record for record in caplog.records if record.name != "asyncio"]


@pytest.mark.parametrize("method", [*ARITIES, "written_stream"])
async def test_an_answer_passes_untouched(method: str) -> None:
    async def act(context: Any) -> bytes:
        return b"last"

    async with probe(act) as channel:
        assert (await call(channel, method))[-1] == b"last"


@pytest.mark.parametrize("method", [*ARITIES, "written_stream"])
async def test_an_abort_by_the_servicer_keeps_its_code(method: str, caplog: pytest.LogCaptureFixture) -> None:
    async def act(context: Any) -> bytes:
        await context.abort(grpc.StatusCode.OUT_OF_RANGE, "past the end")
        return b""

    async with probe(act) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, method)
    assert caught.value.code() is grpc.StatusCode.OUT_OF_RANGE
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_bad_field_is_named_in_the_status() -> None:
    async with probe(failing(InvalidArgument.at("sampling.top_p", "must be in (0, 1], got 2"))) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, "unary_unary")
    (violation,) = from_rpc_error(caught.value).violations
    assert violation.field == "sampling.top_p"


@pytest.mark.parametrize("method", ["unary_unary", "unary_stream"])
async def test_cancelling_a_call_runs_the_finally_of_its_method(method: str, caplog: pytest.LogCaptureFixture) -> None:
    entered, left = asyncio.Event(), asyncio.Event()

    async def act(context: Any) -> bytes:
        entered.set()
        try:
            await asyncio.Event().wait()
            return b""
        finally:
            left.set()

    metrics = Metrics()
    async with probe(act, metrics) as channel:
        running = asyncio.create_task(call(channel, method))
        await asyncio.wait_for(entered.wait(), 5)
        running.cancel()
        await asyncio.wait_for(left.wait(), 5)
    assert not [record for record in caplog.records if record.exc_info]
    assert f'code="CANCELLED",le="+Inf",method="/test.Probe/{method}"}} 1.0'.encode() in metrics.render()


async def test_a_stream_cancelled_between_messages_runs_the_finally_of_its_method() -> None:
    left = asyncio.Event()

    class Endless(Probe):
        async def many(self, request: Any, context: Any) -> AsyncIterator[bytes]:
            try:
                while True:
                    yield bytes(1 << 20)
            finally:
                left.set()

    async def unused(context: Any) -> bytes:
        return b""

    service = Service("test.Probe", _add, Endless(unused))
    server = RpcServer([service], listen_address="127.0.0.1:0", readiness=Readiness(), metrics=Metrics())
    channel = Channel(await server.start())
    stub = channel.unary_stream("/test.Probe/unary_stream", _identity, _identity)
    running = stub(b"", timeout=math.inf)
    await running.read()
    running.cancel()
    await asyncio.wait_for(left.wait(), 5)
    await channel.close()
    await server.stop(0)


async def test_a_call_without_a_deadline_is_refused_by_the_channel() -> None:
    channel = Channel("127.0.0.1:1")
    with pytest.raises(ValueError, match="without a deadline"):
        channel.unary_unary("/test.Probe/unary_unary")(b"")
    await channel.close()


async def test_trace_and_request_id_of_the_caller_reach_the_method() -> None:
    seen: list[tuple[int, str]] = []

    async def act(context: Any) -> bytes:
        seen.append((trace.get_current_span().get_span_context().trace_id, request_id.get()))
        return b""

    parent = trace.NonRecordingSpan(trace.SpanContext(0xABC, 0xDEF, is_remote=False))
    async with probe(act) as channel:
        request_id.set("r-7")
        with trace.use_span(parent):
            await call(channel, "unary_stream")
    assert seen == [(0xABC, "r-7")]


def test_every_error_class_names_a_canonical_code() -> None:
    def descendants(kind: type[MeshError]) -> list[type[MeshError]]:
        return [kind, *(one for child in kind.__subclasses__() for one in descendants(child))]

    codes = {code.name for code in grpc.StatusCode}
    assert {kind.code for kind in descendants(MeshError)} <= codes
