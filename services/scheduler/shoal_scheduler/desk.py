"""Where the scheduler meets its event loop: changes go in, answers go to the streams' outboxes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from opentelemetry.trace import SpanKind
from shoal.scheduler.v1 import scheduler_service_pb2 as pb
from shoal_common.errors import ResourceExhausted, SlowReader
from shoal_common.load import LoadReport
from shoal_common.rhythm import until_next
from shoal_common.telemetry import TRACER, extract, may_record

from shoal_scheduler.core.messages import Outgoing, Placement
from shoal_scheduler.core.scheduler import Scheduler
from shoal_scheduler.metrics import SchedulerMetrics
from shoal_scheduler.wire import response_of

logger = logging.getLogger(__name__)

_SETTLE_S = 0.05
_TICK_S = 0.5


class Outbox:
    """Answers that one gateway has not read yet. Bounded; a gateway that does not read loses its stream."""

    def __init__(self, stream_id: str, limit: int) -> None:
        self.stream_id = stream_id
        self._limit = limit
        self._queue: asyncio.Queue[pb.ReserveResponse | None] = asyncio.Queue(limit + 1)
        self._is_overfull = False

    def put(self, response: pb.ReserveResponse) -> bool:
        """Send. False past the limit: the stream is over."""
        if self._queue.qsize() < self._limit:
            self._queue.put_nowait(response)
            return True
        self._is_overfull = True
        self.end()
        return False

    def end(self) -> None:
        """No more answers: `get` returns None once those before are read. Safe to repeat."""
        if not self._queue.full():
            self._queue.put_nowait(None)

    async def get(self) -> pb.ReserveResponse | None:
        """The next answer; None at the end. Raises SlowReader if the gateway fell behind."""
        if self._is_overfull:
            raise SlowReader(f"{self._limit} answers wait for this gateway", limit=self._limit)
        return await self._queue.get()


class Desk:
    """Owns the scheduler. One event loop; every change is followed by the placements that it makes possible."""

    def __init__(
        self,
        scheduler: Scheduler,
        metrics: SchedulerMetrics,
        *,
        max_streams: int,
        max_outbox: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler, self._metrics, self._clock = scheduler, metrics, clock
        self._max_streams, self._max_outbox = max_streams, max_outbox
        self._outboxes: dict[str, Outbox] = {}
        self._opened_count = 0
        self._again: asyncio.TimerHandle | None = None
        self.load = LoadReport()
        """Our own load, renewed twice a second; may be read from any thread."""

    def act(self, change: Callable[[Scheduler, float], None]) -> None:
        """Apply a change, place what can be placed and send the answers."""
        now_s = self._clock()
        change(self._scheduler, now_s)
        self._send(self._scheduler.settle(now_s), now_s)
        if self._again is None and len(self._scheduler.queue):
            # Holds and backoffs end without a message.
            self._again = asyncio.get_running_loop().call_later(_SETTLE_S, self._look_again)

    def open_stream(self, gateway_id: str) -> Outbox:
        """A gateway is here. Raises ResourceExhausted (TOO_MANY_STREAMS)."""
        if len(self._outboxes) >= self._max_streams:
            raise ResourceExhausted(
                f"{len(self._outboxes)} gateways are here already",
                reason="TOO_MANY_STREAMS",
                max_streams=self._max_streams,
            )
        self._opened_count += 1
        outbox = Outbox(f"{gateway_id}/{self._opened_count}", self._max_outbox)
        self._outboxes[outbox.stream_id] = outbox
        self.act(lambda scheduler, now_s: scheduler.open_stream(outbox.stream_id))
        return outbox

    def close_stream(self, outbox: Outbox) -> None:
        """Its stream broke or ended. Safe to repeat."""
        if self._outboxes.pop(outbox.stream_id, None) is not None:
            self.act(lambda scheduler, now_s: scheduler.break_stream(outbox.stream_id, now_s))

    async def run(self) -> None:
        """Let time pass until cancelled."""
        try:
            while True:
                await asyncio.sleep(until_next(_TICK_S))
                self.act(lambda scheduler, now_s: scheduler.tick(now_s))
                self._renew_load()
        finally:
            if self._again is not None:
                self._again.cancel()

    def _look_again(self) -> None:
        self._again = None
        self.act(lambda scheduler, now_s: None)

    def _renew_load(self) -> None:
        scheduler = self._scheduler
        waiting = len(scheduler.queue)
        self.load = LoadReport(
            running=len(scheduler.leases) - waiting, waiting=waiting, in_flight=scheduler.fleet.in_flight()
        )
        self._metrics.renew()

    def _send(self, outgoing: list[Outgoing], now_s: float) -> None:
        overfull: dict[str, Outbox] = {}
        for one in outgoing:
            if isinstance(one.answer, Placement):
                self._trace(one.request_id, one.answer, now_s)
            outbox = self._outboxes.get(one.stream_id)
            if outbox is not None and not outbox.put(response_of(one)):
                overfull[one.stream_id] = outbox
        for outbox in overfull.values():
            logger.warning("a gateway does not read its answers", extra={"stream": outbox.stream_id})
            self.close_stream(outbox)

    def _trace(self, request_id: str, placement: Placement, now_s: float) -> None:
        lease = self._scheduler.leases.get(request_id)
        if lease is None:
            return
        waited_s = max(0.0, now_s - lease.arrival_s)
        self._metrics.waited(waited_s)
        headers = {"traceparent": lease.spec.traceparent}
        if not may_record(headers):
            return
        end_ns = time.time_ns()
        span = TRACER.start_span(
            "shoal.scheduler.place",
            context=extract(headers),
            kind=SpanKind.INTERNAL,
            start_time=end_ns - round(waited_s * 1e9),
            attributes={"request_id": request_id, "expected_hit_tokens": placement.expected_hit_tokens},
        )
        span.end(end_ns)
