"""Operating one process, by gRPC (AdminService) and over the bus (control subject): one Operator behind both."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from google.protobuf.duration_pb2 import Duration
from shoal.admin.v1 import admin_service_pb2 as pb
from shoal.admin.v1 import admin_service_pb2_grpc as rpc

from shoal_common import logs, profiler
from shoal_common.control import Command
from shoal_common.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from shoal_common.rpc.readiness import Readiness
from shoal_common.rpc.server import Service

if TYPE_CHECKING:
    import grpc

    Context = grpc.aio.ServicerContext[Any, Any]

logger = logging.getLogger(__name__)

MAX_PROFILE_S = 60.0


class Stopping(FailedPrecondition):
    """The process is leaving for good."""

    reason = "STOPPING"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a service tells and does for its operator; all called on its event loop and quick.

    running_count   requests that run now
    set_draining    True: take no new work, tell the mesh; False: take work again
    numbers         figures of its role, by name
    """

    running_count: Callable[[], int] = lambda: 0
    set_draining: Callable[[bool], None] = lambda is_draining: None
    numbers: Callable[[], Mapping[str, float]] = dict


class Operator:
    """Drain, resume, status, log level, profile of one process. Call `stopping` when its end has begun."""

    def __init__(self, *, instance_id: str, role: str, readiness: Readiness, work: Work) -> None:
        self.instance_id, self.role, self.readiness, self._work = instance_id, role, readiness, work
        self._started_s = time.monotonic()
        self._is_stopping = False
        self._is_profiling = False

    @property
    def uptime_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started_s

    def numbers(self) -> Mapping[str, float]:
        """Figures of the role."""
        return self._work.numbers()

    def stopping(self) -> None:
        """The process leaves; no `resume` from here on."""
        self._is_stopping = True
        self.drain()

    def drain(self) -> int:
        """Take no new work. Idempotent. Returns the number of requests that still run."""
        self.readiness.begin_drain()
        self._work.set_draining(True)
        return self._work.running_count()

    def resume(self) -> None:
        """Take work again. Idempotent. Raises Stopping."""
        if self._is_stopping:
            raise Stopping("the process is leaving")
        self._work.set_draining(False)
        self.readiness.end_drain()

    def set_log_level(self, level: str) -> None:
        """Change the level. Raises InvalidArgument."""
        try:
            logs.set_level(level)
        except ValueError as error:
            raise InvalidArgument.at("level", str(error), reason="UNKNOWN_LEVEL") from error
        logger.info("log level set", extra={"log_level": level})

    async def profile(self, duration_s: float) -> str:
        """Folded stacks of the next seconds, at most 60. Raises InvalidArgument, ResourceExhausted."""
        if not 0 < duration_s <= MAX_PROFILE_S:
            raise InvalidArgument.at(
                "duration", f"above 0 and at most {MAX_PROFILE_S:g} s, got {duration_s:g}", reason="BAD_DURATION"
            )
        if self._is_profiling:
            raise ResourceExhausted("a profile is being taken", reason="PROFILE_RUNNING")
        self._is_profiling = True
        try:
            return await asyncio.to_thread(profiler.sample, duration_s)
        finally:
            self._is_profiling = False

    def commands(self) -> dict[str, Command]:
        """The same by name, for ControlServer: drain, resume, log_level (level), profile (duration_s)."""

        async def drain(arguments: Mapping[str, str]) -> Mapping[str, str]:
            return {"running_count": str(self.drain())}

        async def resume(arguments: Mapping[str, str]) -> Mapping[str, str]:
            self.resume()
            return {}

        async def log_level(arguments: Mapping[str, str]) -> Mapping[str, str]:
            self.set_log_level(arguments.get("level", ""))
            return {}

        async def profile(arguments: Mapping[str, str]) -> Mapping[str, str]:
            try:
                duration_s = float(arguments.get("duration_s", "1"))
            except ValueError as error:
                raise InvalidArgument.at("duration_s", "must be a number", reason="BAD_DURATION") from error
            return {"folded_stacks": await self.profile(duration_s)}

        return {"drain": drain, "resume": resume, "log_level": log_level, "profile": profile}


class AdminServicer(rpc.AdminServiceServicer):
    """AdminService of one process."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        """Take no new work."""
        return pb.DrainResponse(running_count=self._operator.drain())

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> pb.ResumeResponse:
        """Take work again."""
        self._operator.resume()
        return pb.ResumeResponse()

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        """What the process is and does."""
        operator, readiness = self._operator, self._operator.readiness
        uptime = Duration()
        uptime.FromMilliseconds(round(operator.uptime_s * 1000))
        return pb.GetStatusResponse(
            instance_id=operator.instance_id,
            role=operator.role,
            version=_version(),
            uptime=uptime,
            is_ready=readiness.is_ready,
            is_draining=readiness.is_draining,
            detail=", ".join(readiness.missing),
            numbers=operator.numbers(),
        )

    async def SetLogLevel(self, request: pb.SetLogLevelRequest, context: Context) -> pb.SetLogLevelResponse:
        """Set the log level."""
        self._operator.set_log_level(request.level)
        return pb.SetLogLevelResponse()

    async def Profile(self, request: pb.ProfileRequest, context: Context) -> pb.ProfileResponse:
        """Sample stacks."""
        seconds = request.duration.seconds + request.duration.nanos / 1e9
        return pb.ProfileResponse(folded_stacks=await self._operator.profile(seconds))


def _version() -> str:
    try:
        return metadata.version("shoal")
    except metadata.PackageNotFoundError:
        # Run from a source tree that was not installed.
        return "source"


def admin_service(operator: Operator) -> Service:
    """AdminService for `serve`."""
    return Service("shoal.admin.v1.AdminService", rpc.add_AdminServiceServicer_to_server, AdminServicer(operator))
