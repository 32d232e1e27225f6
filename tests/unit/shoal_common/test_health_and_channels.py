"""Health and reflection of a server; channels to servers that come and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from shoal.inference.v1.inference_service_pb2_grpc import (
    InferenceServiceServicer,
    add_InferenceServiceServicer_to_server,
)
from shoal_common.rpc import Channel, Channels, Readiness, RpcServer, Service, is_transport_failure
from shoal_common.telemetry import Metrics
from support.nats_server import free_port

NAME = "shoal.inference.v1.InferenceService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def server(address: str, readiness: Readiness | None = None) -> RpcServer:
    unwritten: Any = InferenceServiceServicer
    service = Service(NAME, add_InferenceServiceServicer_to_server, unwritten())
    return RpcServer([service], listen_address=address, readiness=readiness or Readiness(), metrics=Metrics())


async def check(channel: Channel, service: str = "") -> int:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
    return int(answer.status)


@pytest.fixture
async def channels() -> AsyncIterator[Channels]:
    made = Channels()
    yield made
    await made.close()


async def test_health_follows_the_readiness_and_knows_its_services(channels: Channels) -> None:
    readiness = Readiness("model")
    running = server("127.0.0.1:0", readiness)
    channel = channels.get(await running.start())
    assert (await check(channel), await check(channel, NAME)) == (SERVING, NOT_SERVING)
    stub: Any = health_pb2_grpc.HealthStub(channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=NAME), timeout=20)
    assert (await watch.read()).status == NOT_SERVING
    readiness.set("model")
    assert (await watch.read()).status == SERVING
    readiness.begin_drain()
    assert (await watch.read()).status == NOT_SERVING
    watch.cancel()
    with pytest.raises(grpc.aio.AioRpcError) as unknown:
        await check(channel, "shoal.pond.v1.PondService")
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
    await running.stop(0)


async def test_reflection_lists_the_services(channels: Channels) -> None:
    running = server("127.0.0.1:0")
    address = await running.start()

    def listed() -> set[str]:
        with grpc.insecure_channel(address) as plain:
            return set(ProtoReflectionDescriptorDatabase(plain).get_services())

    assert {NAME, "grpc.health.v1.Health"} <= await asyncio.to_thread(listed)
    await running.stop(0)


async def test_a_method_nobody_wrote_is_unimplemented(channels: Channels) -> None:
    running = server("127.0.0.1:0")
    channel = channels.get(await running.start())
    method = channel.unary_unary(f"/{NAME}/ListModels", lambda raw: raw, lambda raw: raw)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await method(b"", timeout=5)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await running.stop(0)


async def test_a_dead_server_is_a_transport_failure_and_a_rebuilt_channel_reaches_its_successor(
    channels: Channels,
) -> None:
    address = f"127.0.0.1:{free_port()}"
    first = server(address)
    await first.start()
    broken = channels.get(address)
    await check(broken)
    await first.stop(0)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await check(broken)
    assert is_transport_failure(caught.value)
    second = server(address)
    await second.start()
    fresh = channels.rebuild(broken)
    assert fresh is not broken
    assert channels.rebuild(broken) is fresh
    assert await check(fresh) == SERVING
    await second.stop(0)


async def test_an_address_has_one_channel(channels: Channels) -> None:
    assert channels.get("127.0.0.1:1") is channels.get("127.0.0.1:1")


@pytest.mark.long
async def test_pings_every_ten_seconds_on_an_idle_stream_are_accepted(channels: Channels) -> None:
    running = server("127.0.0.1:0")
    channel = channels.get(await running.start())
    stub: Any = health_pb2_grpc.HealthStub(channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=60)
    await watch.read()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(watch.read())), 35)
    assert not watch.done()
    watch.cancel()
    await running.stop(0)
