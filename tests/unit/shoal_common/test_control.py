from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
from shoal_common import control
from shoal_common.bus import Bus
from shoal_common.errors import FailedPrecondition, Internal, OutOfCapacity, Unavailable, Unimplemented
from support.nats_server import NatsServer


async def _level(arguments: Mapping[str, str]) -> Mapping[str, str]:
    return {"level": arguments["level"], "was": "INFO"}


async def _refuse(arguments: Mapping[str, str]) -> Mapping[str, str]:
    raise FailedPrecondition("already draining", reason="ALREADY_DRAINING")


async def _break(arguments: Mapping[str, str]) -> Mapping[str, str]:
    raise KeyError("secret")


async def test_commands_are_carried_out_refused_or_unknown_by_the_instance_named(nats_server: NatsServer) -> None:
    bus = Bus(nats_server.url, name="test")
    await bus.start()
    assert await bus.wait_connected(10)
    commands = {"log_level": _level, "drain": _refuse, "profile": _break}
    await control.ControlServer(bus, mesh="t", instance_id="a-1", commands=commands).start()

    async def send(command: str, arguments: dict[str, str] | None = None, instance: str = "a-1") -> dict[str, str]:
        return await control.send(bus, command, arguments, mesh="t", instance_id=instance, timeout_s=5)

    assert await send("log_level", {"level": "DEBUG"}) == {"level": "DEBUG", "was": "INFO"}
    with pytest.raises(FailedPrecondition) as refused:
        await send("drain")
    assert refused.value.reason == "ALREADY_DRAINING"
    with pytest.raises(Unimplemented, match="drain, log_level, profile"):
        await send("dance")
    with pytest.raises(Internal) as broken:
        await send("profile")
    assert "secret" not in broken.value.message
    with pytest.raises(Unavailable):
        await send("drain", instance="b-1")
    await bus.close()


async def test_a_long_command_does_not_hold_up_a_drain_and_too_many_are_refused(nats_server: NatsServer) -> None:
    done = asyncio.Event()

    async def long(arguments: Mapping[str, str]) -> Mapping[str, str]:
        await done.wait()
        return {}

    async def drain(arguments: Mapping[str, str]) -> Mapping[str, str]:
        return {"is_draining": "true"}

    bus = Bus(nats_server.url, name="test")
    await bus.start()
    assert await bus.wait_connected(10)
    await control.ControlServer(bus, mesh="t", instance_id="a-1", commands={"long": long, "drain": drain}).start()

    async def send(command: str) -> dict[str, str]:
        return await control.send(bus, command, mesh="t", instance_id="a-1", timeout_s=10)

    waiting = [asyncio.create_task(send("long"))]
    await asyncio.sleep(0)
    assert await send("drain") == {"is_draining": "true"}
    waiting += [asyncio.create_task(send("long")) for _ in range(8)]
    first_to_end, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    assert isinstance(first_to_end.pop().exception(), OutOfCapacity)
    done.set()
    await asyncio.gather(*waiting, return_exceptions=True)
    await bus.close()
