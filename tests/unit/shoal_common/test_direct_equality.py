"""Calls by direct connections mean what they mean by gRPC: the same scenario by both ways, told the same."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry import trace
from shoal_common.errors import DeadlineExceeded, InvalidArgument, NotFound, QuotaExceeded
from shoal_common.request_scope import request_id
from shoal_common.rpc import from_rpc_error, is_transport_failure
from support.direct_calls import (
    METHODS,
    Act,
    Running,
    arity_of,
    joined,
    listed,
    out_of_capacity,
    refusing,
    running,
    told,
)
from support.waiting import until

EVERY_METHOD = pytest.mark.parametrize("method", METHODS)
EACH_WAY = pytest.mark.parametrize("is_direct", [False, True], ids=["grpc", "direct"])


async def by_both(act: Act, scenario: Callable[[Running], Awaitable[Any]]) -> Any:
    """What is told by gRPC, which must be told by the direct way too."""
    outcomes = []
    for is_direct in (False, True):
        async with running(act, is_direct=is_direct) as probe, asyncio.timeout(20):
            outcomes.append(await scenario(probe))
            if is_direct:
                assert probe.connection._calls == {}
                await until(lambda p=probe: not p.direct_server._running(), what="no call is left")  # type: ignore[misc]
    assert outcomes[1] == outcomes[0]
    return outcomes[0]


async def called(probe: Running, method: str, requests: tuple[bytes, ...] = (b"request",), **options: Any) -> Any:
    """All answers of one call."""

    async def each() -> AsyncIterator[bytes]:
        for one in requests:
            yield one

    arity = arity_of(method)
    call = probe.stub(method)(each() if arity.startswith("stream") else requests[0], timeout=10, **options)
    if arity.endswith("unary"):
        return await told(call)
    return await told(listed(call))


@EVERY_METHOD
async def test_an_answer_is_the_same(method: str) -> None:
    assert await by_both(joined, lambda probe: called(probe, method)) in (
        b"request",
        [b"request"],
        [b"first", b"request"],
    )


@pytest.mark.parametrize("method", ["stream_unary", "stream_stream", "echo_stream"])
@pytest.mark.parametrize("requests", [(), (b"",), (b"a", b"", b"c" * 100_000)])
async def test_all_requests_of_an_iterator_come_in_order(method: str, requests: tuple[bytes, ...]) -> None:
    await by_both(joined, lambda probe: called(probe, method, requests))


@EVERY_METHOD
@pytest.mark.parametrize(
    "error",
    [
        out_of_capacity(),
        InvalidArgument.at("sampling.top_p", "must be in (0, 1], got 2 \N{FISH}"),
        QuotaExceeded("this key may send 3", reason="REQUESTS_PER_MINUTE", retry_after_s=2.0),
        NotFound(""),
        KeyError("secret prompt"),
        NotImplementedError("unwritten"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_an_error_is_the_same(method: str, error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.CRITICAL):
        code, details, _ = await by_both(refusing(error), lambda probe: called(probe, method))
    assert code is not grpc.StatusCode.OK
    assert "secret" not in details


@EVERY_METHOD
async def test_requests_that_do_not_parse_are_the_same_error(method: str) -> None:
    code, _, status = await by_both(joined, lambda probe: called(probe, method, (b"malformed",)))
    assert (code, len(status)) == (grpc.StatusCode.INVALID_ARGUMENT, 1)


@EVERY_METHOD
async def test_an_abort_by_the_servicer_is_the_same(method: str) -> None:
    async def act(requests: list[bytes], context: Any) -> bytes:
        await context.abort(grpc.StatusCode.OUT_OF_RANGE, "past the end")
        return b""

    assert await by_both(act, lambda probe: called(probe, method)) == (grpc.StatusCode.OUT_OF_RANGE, "past the end", [])


async def test_what_is_answered_before_an_error_is_read_before_it() -> None:
    async def scenario(probe: Running) -> list[Any]:
        call = probe.stub("unary_stream")(b"", timeout=10)
        return [await told(call.read()) for _ in range(4)]

    first, *errors = await by_both(refusing(out_of_capacity()), scenario)
    assert first == b"first"
    assert errors == errors[:1] * 3


async def test_a_method_nobody_wrote_is_unimplemented_and_health_is_there() -> None:
    async def scenario(probe: Running) -> Any:
        unknown = probe.channel.unary_unary("/test.Probe/Unwritten", bytes, bytes)
        health: Any = health_pb2_grpc.HealthStub(probe.channel)
        serving = await health.Check(health_pb2.HealthCheckRequest(), timeout=5)
        return await told(unknown(b"", timeout=5)), serving.status, await told(_check(health, "test.Other"))

    (code, _, _), status, (missing, _, _) = await by_both(joined, scenario)
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert (status, missing) == (health_pb2.HealthCheckResponse.SERVING, grpc.StatusCode.NOT_FOUND)


def _check(health: Any, service: str) -> Any:
    return health.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)


async def test_trace_request_id_and_time_left_reach_the_method() -> None:
    async def act(requests: list[bytes], context: Any) -> bytes:
        trace_id = trace.get_current_span().get_span_context().trace_id
        left_s = context.time_remaining()
        return f"{trace_id:x} {request_id.get()} {9 < left_s <= 10}".encode()

    parent = trace.NonRecordingSpan(trace.SpanContext(0xABC, 0xDEF, is_remote=False))
    request_id.set("r-7 \u00fcber".encode().decode("ascii", "ignore"))
    try:
        with trace.use_span(parent):
            assert await by_both(act, lambda probe: called(probe, "unary_unary")) == b"abc r-7 ber True"
    finally:
        request_id.set("")


async def test_a_call_without_an_end_has_no_time_left_to_tell() -> None:
    async def act(requests: list[bytes], context: Any) -> bytes:
        return repr(context.time_remaining()).encode()

    async def scenario(probe: Running) -> Any:
        return await told(probe.stub("unary_unary")(b"", timeout=float("inf")))

    assert await by_both(act, scenario) == b"None"


class Waiting:
    """An act that waits for ever, and tells how it ended."""

    def __init__(self) -> None:
        self.entered, self.left = asyncio.Event(), asyncio.Event()
        self.how: Any = None

    async def __call__(self, requests: list[bytes], context: Any) -> bytes:
        self.entered.set()
        try:
            await asyncio.Event().wait()
        except BaseException as error:
            self.how = type(error)
            raise
        finally:
            self.left.set()
        return b""


async def _by_cancel(call: Any, reading: asyncio.Task[Any]) -> None:
    assert call.cancel() is True


async def _by_task(call: Any, reading: asyncio.Task[Any]) -> None:
    reading.cancel()


WAYS_TO_LEAVE = pytest.mark.parametrize("leave", [_by_cancel, _by_task])


@WAYS_TO_LEAVE
@pytest.mark.parametrize("method", ["unary_stream", "stream_stream", "written_stream"])
async def test_a_caller_that_leaves_ends_the_method(method: str, leave: Any) -> None:
    waiting: list[Waiting] = []

    async def scenario(probe: Running) -> Any:
        act = probe_act(probe, waiting)
        call = await _opened(probe, method)
        assert await call.read() == b"first"
        reading = asyncio.ensure_future(call.read())
        await act.entered.wait()
        await asyncio.sleep(0)
        await leave(call, reading)
        outcome = await told(reading)
        await act.left.wait()
        return (
            outcome,
            act.how,
            call.cancel(),
            await told(call.read()),
            await told(call.done_writing()) if method[0] == "s" else None,
        )

    outcome, how, again, *_ = await by_both(joined, scenario)
    assert (outcome, again) == (asyncio.CancelledError, False)
    assert how is asyncio.CancelledError


def probe_act(probe: Running, made: list[Waiting]) -> Waiting:
    """A fresh act in the server's probe."""
    act = Waiting()
    made.append(act)
    (service,) = probe.server._services
    service.servicer.act = act  # type: ignore[attr-defined]
    return act


async def _opened(probe: Running, method: str) -> Any:
    if arity_of(method).startswith("unary"):
        return probe.stub(method)(b"request", timeout=20)
    call = probe.stub(method)(timeout=20)
    await call.done_writing()
    return call


async def test_wait_for_ends_a_unary_call_at_both_ends() -> None:
    async def scenario(probe: Running) -> Any:
        act = probe_act(probe, [])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_awaited(probe.stub("unary_unary")(b"", timeout=20)), 0.05)
        await act.left.wait()
        return act.how

    await by_both(joined, scenario)


async def _awaited(call: Any) -> Any:
    return await call


async def test_a_deadline_ends_a_call_at_both_ends() -> None:
    async def scenario(probe: Running) -> Any:
        act = probe_act(probe, [])
        unary = await told(probe.stub("unary_unary")(b"", timeout=0.05))
        await act.left.wait()
        stream = probe.stub("unary_stream")(b"", timeout=0.05)
        outcomes = [await told(stream.read()) for _ in range(3)]
        return [one if isinstance(one, bytes) else one[0] for one in (unary, *outcomes)], act.how

    late = grpc.StatusCode.DEADLINE_EXCEEDED
    assert await by_both(joined, scenario) == ([late, b"first", late, late], asyncio.CancelledError)


async def test_a_deadline_of_a_servers_own_is_an_answer() -> None:
    await by_both(
        refusing(DeadlineExceeded("no hello in 5 s", timeout_s=5)), lambda probe: called(probe, "unary_unary")
    )


async def test_a_caller_that_leaves_while_the_server_writes_ends_it() -> None:
    left: list[asyncio.Event] = []

    async def act(requests: list[bytes], context: Any) -> bytes:
        done = asyncio.Event()
        left.append(done)
        try:
            while True:
                await context.write(bytes(1 << 18))
        finally:
            done.set()

    async def scenario(probe: Running) -> Any:
        call = probe.stub("written_stream")(b"", timeout=20)
        assert (await call.read(), len(await call.read())) == (b"first", 1 << 18)
        call.cancel()
        await left[-1].wait()
        return await told(call.read())

    assert await by_both(act, scenario) is asyncio.CancelledError


async def test_writing_after_an_end_is_refused_and_reading_tells_it_again() -> None:
    async def scenario(probe: Running) -> Any:
        half = probe.stub("echo_stream")(timeout=20)
        await half.write(b"a")
        await half.done_writing()
        await half.done_writing()
        outcomes = [await told(half.write(b"b")), await half.read(), await half.read(), await half.read()]
        ended = [await told(half.write(b"c")), half.cancel(), await told(half.read())]
        left = probe.stub("echo_stream")(timeout=20)
        await left.write(b"a")
        assert await left.read() == b"a"
        left.cancel()
        return outcomes, ended, await told(left.write(b"")), await told(left.done_writing())

    outcomes, ended, after, done = await by_both(joined, scenario)
    eof = grpc.aio.EOF  # type: ignore[attr-defined]
    assert outcomes == [asyncio.InvalidStateError, b"a", eof, eof]
    assert ended == [asyncio.InvalidStateError, False, eof]
    assert (after, done) == (asyncio.InvalidStateError, None)


async def test_an_iterator_that_fails_cancels_its_call() -> None:
    async def bad() -> AsyncIterator[bytes]:
        yield b"a"
        raise KeyError("no more")

    async def scenario(probe: Running) -> Any:
        return await told(listed(probe.stub("stream_stream")(bad(), timeout=20)))

    assert await by_both(joined, scenario) is asyncio.CancelledError


async def test_plain_iterators_are_taken_too() -> None:
    async def scenario(probe: Running) -> Any:
        return await told(probe.stub("stream_unary")(iter([b"a", b"b"]), timeout=20))

    assert await by_both(joined, scenario) == b"a+b"


async def test_closing_a_channel_cancels_its_calls() -> None:
    async def scenario(probe: Running) -> Any:
        act = probe_act(probe, [])
        reading = asyncio.ensure_future(_awaited(probe.stub("unary_unary")(b"", timeout=20)))
        await act.entered.wait()
        await probe.channel.close()
        outcome = await told(reading)
        await act.left.wait()
        return outcome

    outcomes = []
    for is_direct in (False, True):
        async with running(is_direct=is_direct) as probe:
            outcomes.append(await scenario(probe))
    assert outcomes == [asyncio.CancelledError] * 2


@EACH_WAY
async def test_closing_a_channel_with_grace_lets_its_calls_end(is_direct: bool) -> None:
    may_end = asyncio.Event()

    async def act(requests: list[bytes], context: Any) -> bytes:
        may_end.set()
        await asyncio.sleep(0.05)
        return b"done"

    async with running(act, is_direct=is_direct) as probe:
        reading = asyncio.ensure_future(_awaited(probe.stub("unary_unary")(b"", timeout=20)))
        await may_end.wait()
        await probe.channel.close(10)
        assert await reading == b"done"


@EACH_WAY
@pytest.mark.parametrize("grace_s", [0, 10])
async def test_a_server_that_stops_lets_calls_end_in_its_grace_and_cuts_the_others(
    is_direct: bool, grace_s: float
) -> None:
    entered, may_end = asyncio.Event(), asyncio.Event()

    async def act(requests: list[bytes], context: Any) -> bytes:
        entered.set()
        await may_end.wait()
        return b"done"

    async with running(act, is_direct=is_direct) as probe:
        reading = asyncio.ensure_future(_awaited(probe.stub("unary_unary")(b"", timeout=20)))
        await entered.wait()
        stopping = asyncio.ensure_future(probe.server.stop(grace_s))
        if grace_s:
            await until(lambda: probe.direct_server.is_stopping)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await probe.stub("unary_unary")(b"", timeout=20)
            assert is_transport_failure(refused.value)
            may_end.set()
            assert await reading == b"done"
        else:
            with pytest.raises(grpc.aio.AioRpcError) as cut:
                await reading
            assert is_transport_failure(cut.value)
            assert from_rpc_error(cut.value).code in ("UNAVAILABLE", "CANCELLED")
        await stopping


@EACH_WAY
async def test_a_call_is_in_the_metrics_of_its_server(is_direct: bool) -> None:
    async with running(is_direct=is_direct) as probe:
        await called(probe, "unary_unary")
        count = 'shoal_rpc_server_duration_seconds_count{code="OK",method="/test.Probe/unary_unary"} 1.0'
        await until(lambda: count in probe.metrics.render().decode())
        assert probe.metric("rpc_direct_connections") == (1.0 if is_direct else 0.0)
