"""The commands that every instance carries out: drain, resume, log_level, profile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from shoal_common import logs, profiler
from shoal_common.control import Command
from shoal_common.errors import FailedPrecondition, InvalidArgument
from shoal_common.rpc.readiness import Readiness


def standard_commands(readiness: Readiness) -> dict[str, Command]:
    """`drain` and `resume` go through the readiness, to which the service listens; a service may replace any of them.

    log_level  level=DEBUG|INFO|WARNING|ERROR; answers what it was
    profile    seconds=0..30; answers the sampled stacks, so ask with a longer timeout
    """
    profiling = asyncio.Lock()

    async def drain(arguments: Mapping[str, str]) -> Mapping[str, str]:
        readiness.begin_drain()
        return {"is_draining": "true"}

    async def resume(arguments: Mapping[str, str]) -> Mapping[str, str]:
        readiness.end_drain()
        return {"is_draining": "false"}

    async def profile(arguments: Mapping[str, str]) -> Mapping[str, str]:
        text = arguments.get("seconds", "5")
        if profiling.locked():
            raise FailedPrecondition("a profile is being taken", reason="PROFILE_RUNNING")
        async with profiling:
            try:
                return {"stacks": await asyncio.to_thread(profiler.sample, float(text))}
            except ValueError as error:
                raise InvalidArgument.at("seconds", str(error)) from error

    return {"drain": drain, "resume": resume, "log_level": _log_level, "profile": profile}


async def _log_level(arguments: Mapping[str, str]) -> Mapping[str, str]:
    before = logging.getLevelName(logging.getLogger().level)
    try:
        logs.set_level(arguments.get("level", ""))
    except ValueError as error:
        raise InvalidArgument.at("level", str(error)) from error
    return {"level": arguments["level"], "was": before}
