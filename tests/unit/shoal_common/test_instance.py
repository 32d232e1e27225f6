"""A worker process that prepares first, and what ends it."""

from __future__ import annotations

import asyncio

import pytest
from shoal_common.admin import Work
from shoal_common.bus import Bus
from shoal_common.detached import run_detached
from shoal_common.instance import Addresses, EngineStopped, Instance
from shoal_common.load import LoadReport
from shoal_common.presence import Presence
from shoal_common.process import Process
from shoal_common.rpc import Readiness
from shoal_common.settings import SharedSettings
from shoal_common.telemetry import Metrics, configure_tracing


def instance(healthy: list[bool]) -> Instance:
    tracing = configure_tracing(service="test", instance="test-1", otlp_endpoint=None)
    return Instance(
        process=Process("test", "test-1", Metrics(), tracing),
        shared=SharedSettings(nats_url="off"),
        bus=Bus.off(),
        role="test",
        addresses=Addresses(listen="127.0.0.1:0", admin="127.0.0.1:0", advertise=""),
        work=Work(),
        describe=lambda instance_id, address: Presence(instance_id=instance_id, role="test", address=address),
        sample_load=LoadReport,
        readiness=Readiness("nats", "engine"),
        is_healthy=lambda: healthy[0],
    )


async def nothing() -> None:
    """Done at once."""


async def test_an_error_while_preparing_ends_the_process_and_is_raised() -> None:
    async def fail() -> None:
        await run_detached(lambda: int("no number"), name="loader")

    with pytest.raises(ValueError, match="no number"):
        await asyncio.wait_for(instance([True]).serve([], prepare=fail, drain=nothing, drain_grace_s=1), 20)


async def test_an_engine_that_stopped_ends_the_process() -> None:
    with pytest.raises(EngineStopped):
        await asyncio.wait_for(instance([False]).serve([], prepare=nothing, drain=nothing, drain_grace_s=1), 20)


async def test_work_beside_the_loop_returns_its_result() -> None:
    assert await run_detached(lambda: 6 * 7, name="worker") == 42
