"""One Reserve stream, with every message in the test's hands."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from shoal.scheduler.v1 import scheduler_service_pb2 as pb
from shoal.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from shoal_common.rpc import from_rpc_error

TIMEOUT_S = 60.0


class GatewayStream:
    """A gateway's side of Reserve. `answers` holds what came, by request."""

    def __init__(self, channel: Any, gateway_id: str = "gateway") -> None:
        self._gateway_id = gateway_id
        self._call: Any = SchedulerServiceStub(channel).Reserve(timeout=TIMEOUT_S)
        self._reader: asyncio.Task[None] | None = None
        self._came = asyncio.Condition()
        self.answers: dict[str, list[pb.ReserveResponse]] = {}
        self.ended_by: str | None = None
        """Reason of the status that ended the stream."""

    async def open(self) -> GatewayStream:
        """Say who we are and read from now on."""
        await self.say(pb.ReserveRequest(opened=pb.Opened(gateway_id=self._gateway_id)))
        self._reader = asyncio.create_task(self._read())
        return self

    async def say(self, message: pb.ReserveRequest) -> None:
        """Send one message."""
        await self._call.write(message)

    async def submit(self, request_id: str, **fields: Any) -> None:
        """Submit a request of 100 prompt tokens and 10 output tokens; `fields` replace what is named."""
        values = {"prompt_tokens": 100, "max_tokens": 10, "choice_count": 1, **fields}
        await self.say(pb.ReserveRequest(request_id=request_id, submit=pb.Submit(**values)))

    async def admitted(self, request_id: str, attempt: int = 1) -> None:
        """The worker admitted it."""
        await self.say(pb.ReserveRequest(request_id=request_id, admitted=pb.Admitted(attempt=attempt)))

    async def refused(self, request_id: str, attempt: int = 1, reason: str = "OUT_OF_BLOCKS") -> None:
        """The worker refused it."""
        await self.say(pb.ReserveRequest(request_id=request_id, refused=pb.Refused(attempt=attempt, reason=reason)))

    async def lost(self, request_id: str, cause: pb.LostCause.ValueType, attempt: int = 1) -> None:
        """The attempt is gone, three tokens after its start."""
        lost = pb.Lost(attempt=attempt, cause=cause, output_counts=[3])
        await self.say(pb.ReserveRequest(request_id=request_id, lost=lost))

    async def finished(self, request_id: str) -> None:
        """It is complete."""
        await self.say(pb.ReserveRequest(request_id=request_id, finished=pb.Finished()))

    async def verdict(self, request_id: str, count: int = 1, timeout_s: float = 20.0) -> pb.ReserveResponse:
        """The `count`-th placement or denial of a request; waits for it."""

        def verdicts() -> list[pb.ReserveResponse]:
            return [one for one in self.answers.get(request_id, []) if not one.HasField("queued")]

        async with self._came:
            await asyncio.wait_for(self._came.wait_for(lambda: len(verdicts()) >= count), timeout_s)
        return verdicts()[count - 1]

    async def worker(self, request_id: str, count: int = 1, timeout_s: float = 20.0) -> str:
        """The worker of the `count`-th verdict, which must be a placement."""
        verdict = await self.verdict(request_id, count, timeout_s)
        assert verdict.HasField("placement"), verdict
        return verdict.placement.decode.instance_id

    async def close(self) -> None:
        """Break the stream."""
        self._call.cancel()
        if self._reader is not None:
            await asyncio.wait({self._reader})

    async def _read(self) -> None:
        try:
            while isinstance(message := await self._call.read(), pb.ReserveResponse):
                async with self._came:
                    self.answers.setdefault(message.request_id, []).append(message)
                    self._came.notify_all()
        except grpc.aio.AioRpcError as error:
            self.ended_by = from_rpc_error(error).reason
