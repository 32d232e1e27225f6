"""SchedulerService: protobuf in, core, protobuf out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias

import grpc
from shoal.scheduler.v1 import scheduler_service_pb2 as pb
from shoal.scheduler.v1 import scheduler_service_pb2_grpc as pb_grpc
from shoal_common.errors import Draining, InvalidArgument

from shoal_scheduler.core.scheduler import Scheduler
from shoal_scheduler.desk import Desk, Outbox
from shoal_scheduler.wire import LOSS_CAUSES, duration, instance_of, seconds, spec_of

logger = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class SchedulerServicer(pb_grpc.SchedulerServiceServicer):
    """Serves the gateways. `view_age_s`: how long ago the bus was last heard."""

    def __init__(
        self,
        desk: Desk,
        scheduler: Scheduler,
        *,
        default_remaining_s: float,
        view_age_s: Callable[[float], float],
    ) -> None:
        self._desk, self._scheduler = desk, scheduler
        self._default_remaining_s = default_remaining_s
        self._view_age_s = view_age_s
        self._readers: set[asyncio.Task[None]] = set()

    async def Reserve(
        self, request_iterator: AsyncIterator[pb.ReserveRequest], context: Context
    ) -> AsyncIterator[pb.ReserveResponse]:
        """One gateway."""
        first = await anext(aiter(request_iterator), None)
        if first is None:
            return
        if first.WhichOneof("message") != "opened" or not first.opened.gateway_id:
            raise InvalidArgument.at("opened.gateway_id", "the first message is Opened and names the gateway")
        outbox = self._desk.open_stream(first.opened.gateway_id)
        reader = asyncio.create_task(self._read(request_iterator, outbox))
        # Not left to the reader itself: one that is cancelled before its first step runs nothing.
        reader.add_done_callback(lambda _: outbox.end())
        self._readers.add(reader)
        try:
            while (response := await outbox.get()) is not None:
                yield response
            await asyncio.wait({reader})
            if reader.cancelled():
                raise Draining("this replica leaves; another one takes your requests")
            reader.result()
        finally:
            reader.cancel()
            self._readers.discard(reader)
            self._desk.close_stream(outbox)

    async def GetFleet(self, request: pb.GetFleetRequest, context: Context) -> pb.GetFleetResponse:
        """The fleet."""
        now_s = time.monotonic()
        return pb.GetFleetResponse(
            instances=[instance_of(one, now_s) for one in self._scheduler.fleet.all()],
            queued_count=len(self._scheduler.queue),
            view_age=duration(self._view_age_s(now_s)),
        )

    def close(self) -> None:
        """End all Reserve streams: the gateways go on at another replica."""
        for reader in tuple(self._readers):
            reader.cancel()

    async def _read(self, requests: AsyncIterator[pb.ReserveRequest], outbox: Outbox) -> None:
        async for request in requests:
            if request.HasField("batch"):
                for one in request.batch.requests:
                    self._take(one, outbox.stream_id)
            else:
                self._take(request, outbox.stream_id)

    def _take(self, request: pb.ReserveRequest, stream_id: str) -> None:
        kind = request.WhichOneof("message")
        if kind == "submit":
            self._submit(request, stream_id)
        elif kind == "adopt":
            self._adopt(request, stream_id)
        else:
            self._desk.act(lambda scheduler, now_s: _report(scheduler, request, now_s))

    def _submit(self, request: pb.ReserveRequest, stream_id: str) -> None:
        submit = request.submit
        self._desk.act(
            lambda scheduler, now_s: scheduler.submit(
                stream_id,
                request.request_id,
                spec_of(submit),
                waited_s=seconds(submit.waited),
                remaining_s=self._remaining_s(submit),
                now_s=now_s,
            )
        )

    def _adopt(self, request: pb.ReserveRequest, stream_id: str) -> None:
        adopt = request.adopt
        self._desk.act(
            lambda scheduler, now_s: scheduler.adopt(
                stream_id,
                request.request_id,
                spec_of(adopt.submit),
                attempt=adopt.attempt,
                worker_id=adopt.worker_id,
                output_counts=adopt.output_counts,
                waited_s=seconds(adopt.submit.waited),
                remaining_s=self._remaining_s(adopt.submit),
                now_s=now_s,
            )
        )

    def _remaining_s(self, submit: pb.Submit) -> float:
        return seconds(submit.remaining) if submit.HasField("remaining") else self._default_remaining_s


def _report(scheduler: Scheduler, request: pb.ReserveRequest, now_s: float) -> None:
    request_id = request.request_id
    match request.WhichOneof("message"):
        case "admitted":
            scheduler.admitted(request_id, request.admitted.attempt, now_s)
        case "refused":
            scheduler.refused(request_id, request.refused.attempt, request.refused.reason, now_s)
        case "lost":
            lost = request.lost
            # A cause of a newer version counts as the gravest.
            cause = LOSS_CAUSES.get(lost.cause, LOSS_CAUSES[pb.LOST_CAUSE_BROKEN])
            scheduler.lost(request_id, lost.attempt, cause, lost.output_counts, now_s)
        case "finished":
            scheduler.finished(request_id, now_s)
        case "cancelled":
            scheduler.ended(request_id)
        case other:
            logger.warning("unexpected message on Reserve", extra={"kind": other})
