"""What one hop costs: a unary call and a stream of small messages over loopback, server and client as in the mesh."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import uvloop
from bench.harness import Bar, finish, percentile
from shoal_common.rpc import Channel, Readiness, RpcServer, Service
from shoal_common.telemetry import Metrics

CALLS = 2000
MESSAGES = 20_000
PAYLOAD = bytes(64)


def _identity(payload: bytes) -> bytes:
    return payload


async def _echo(request: bytes, context: Any) -> bytes:
    return request


async def _stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
    for _ in range(MESSAGES):
        yield request


def _add(servicer: object, server: Any) -> None:
    handlers = {
        "Echo": grpc.unary_unary_rpc_method_handler(_echo, _identity, _identity),
        "Stream": grpc.unary_stream_rpc_method_handler(_stream, _identity, _identity),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Echo", handlers),))


async def measure() -> int:
    """Run both and report."""
    service = Service("bench.Echo", _add, object())
    server = RpcServer([service], listen_address="127.0.0.1:0", readiness=Readiness(), metrics=Metrics())
    channel = Channel(await server.start())
    echo = channel.unary_unary("/bench.Echo/Echo", _identity, _identity)
    latencies_s = []
    for _ in range(CALLS):
        started = time.perf_counter()
        await echo(PAYLOAD, timeout=10)
        latencies_s.append(time.perf_counter() - started)
    started = time.perf_counter()
    count = 0
    async for _ in channel.unary_stream("/bench.Echo/Stream", _identity, _identity)(PAYLOAD, timeout=120):
        count += 1
    rate = count / (time.perf_counter() - started)
    await channel.close()
    await server.stop(0)
    return finish(
        "rpc",
        workload={"calls": CALLS, "messages": MESSAGES, "payload_bytes": len(PAYLOAD), "one_process": True},
        bars=[
            Bar(name="unary_p50", value=percentile(latencies_s, 0.5) * 1e3, want=3, sense="at most", unit="ms"),
            Bar(name="stream_messages", value=rate, want=2000, sense="at least", unit="1/s"),
        ],
        figures={"unary_p99_ms": percentile(latencies_s, 0.99) * 1e3},
    )


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(measure()))
