"""A scheduler that places everything on a given worker: stands in where the gateway alone is the subject."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from shoal.scheduler.v1 import scheduler_service_pb2 as pb
from shoal.scheduler.v1 import scheduler_service_pb2_grpc as rpc

Place = Callable[[str, pb.ReserveRequest], pb.ReserveResponse | None]
"""request id and the message that asks (Submit, Refused or Lost) to the answer; None says nothing."""


class FakeScheduler(rpc.SchedulerServiceServicer):
    """Answers every question by `place` and remembers what it was told."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.heard: list[pb.ReserveRequest] = []
        self.streams = 0
        self.message_count = 0
        """Of the wire: a batch is one."""

    def told(self, kind: str) -> list[pb.ReserveRequest]:
        """Messages of one kind, in order."""
        return [one for one in self.heard if one.WhichOneof("message") == kind]

    async def Reserve(
        self, requests: AsyncIterator[pb.ReserveRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.ReserveResponse]:
        """One gateway."""
        self.streams += 1
        async for received in requests:
            self.message_count += 1
            for message in received.batch.requests if received.HasField("batch") else [received]:
                self.heard.append(message)
                if message.WhichOneof("message") in ("submit", "refused", "lost"):
                    answer = self._place(message.request_id, message)
                    if answer is not None:
                        yield answer

    async def GetFleet(
        self, request: pb.GetFleetRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetFleetResponse:
        """Nobody asks for it here."""
        return pb.GetFleetResponse()


def placed(request_id: str, worker_id: str, address: str, **more: Any) -> pb.ReserveResponse:
    """A placement on one worker."""
    placement = pb.Placement(placement_id="p", decode=pb.PlacedWorker(instance_id=worker_id, address=address), **more)
    return pb.ReserveResponse(request_id=request_id, placement=placement)


@contextlib.asynccontextmanager
async def serving(scheduler: FakeScheduler) -> AsyncIterator[str]:
    """Serve on a free port; the address."""
    server = grpc.aio.server()
    rpc.add_SchedulerServiceServicer_to_server(scheduler, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
        await asyncio.sleep(0)
