"""The Frames stream of one decode worker: entries in, acknowledgements out, kept open across breaks."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grpc
from shoal.decode.v1 import decode_service_pb2 as pb
from shoal.decode.v1.decode_service_pb2_grpc import DecodeServiceStub
from shoal_common.errors import Unavailable
from shoal_common.rpc import SETTLE_S, Channel, Channels, from_rpc_error

from shoal_gateway.entry_sinks import ChoiceKey, EntrySink, EntrySinks, RequestKey
from shoal_gateway.pulse import Pulse

logger = logging.getLogger(__name__)

_EOF = grpc.aio.EOF  # type: ignore[attr-defined]

BEAT_S = 1.0
REOPEN_S = 3.0
ACK_DELAY_S = 0.05
"""A message costs more than what it says, so acknowledgements wait for others."""
END_ACK_DELAY_S = 0.01
"""Those of a choice's end: the worker ends the call, and the books are closed, once it has them."""
ACK_TOKENS = 64
"""So many tokens of a choice do not wait. Well below the 256 that a worker keeps, or it would pause."""
_BACKOFF_S = (0.05, 2.0)


class WorkerLost(Unavailable):
    """The worker's stream broke and did not come back, or the worker stands still."""

    reason = "BROKEN"


class WorkerLink:
    """One worker, as long as it is known. Invariant: at most one stream is open; entries go to attached sinks only.

    When the stream breaks it is re-opened with the next indices wanted; if that takes longer than REOPEN_S, all
    attached sinks are told that the worker is lost.

    numbers     for choices; the same for all links of a gateway, as a worker may outlive a link to it
    on_change   called when `is_open` has changed
    """

    def __init__(
        self,
        *,
        address: str,
        gateway_id: str,
        channels: Channels,
        pulse: Pulse,
        numbers: Iterator[int] | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.address = address
        self._on_change = on_change
        self._gateway_id, self._channels, self._pulse = gateway_id, channels, pulse
        self._sinks = EntrySinks(numbers or itertools.count(1))
        self._acks: dict[ChoiceKey, int] = {}
        self._sent_acks: dict[ChoiceKey, int] = {}
        self._ends: dict[ChoiceKey, int] = {}
        self._new_ends: list[ChoiceKey] = []
        self._open = asyncio.Event()
        self._wake = asyncio.Event()
        self._flush_timer: asyncio.TimerHandle | None = None
        self._flush_due_s = 0.0
        self._lost_timer: asyncio.TimerHandle | None = None
        self._call: Any = None
        self._task = asyncio.create_task(self._run())

    @property
    def is_idle(self) -> bool:
        """No attempt is attached."""
        return not self._sinks

    @property
    def is_open(self) -> bool:
        """The worker has answered on the present stream."""
        return self._open.is_set()

    async def wait_open(self, timeout_s: float) -> None:
        """Wait until the worker answers. Raises WorkerLost (UNREACHABLE)."""
        if self._open.is_set():
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._open.wait()
        except TimeoutError as error:
            raise WorkerLost(
                f"worker {self.address} did not open its stream in {timeout_s} s", reason="UNREACHABLE"
            ) from error

    def attach(self, key: RequestKey, sink: EntrySink, choice_count: int = 1) -> int:
        """Entries of this attempt go to `sink` from now on. Returns the number of its first choice."""
        return self._sinks.attach(key, sink, choice_count)

    def detach(self, key: RequestKey, choice_count: int) -> None:
        """The attempt is over. Safe to repeat."""
        self._sinks.detach(key)
        for choice_index in range(choice_count):
            self._acks.pop((key, choice_index), None)
            self._sent_acks.pop((key, choice_index), None)
            self._ends.pop((key, choice_index), None)

    def acknowledge(self, key: RequestKey, choice_index: int, next_index: int, *, is_end: bool) -> None:
        """Everything below `next_index` is taken over. Sent within ACK_DELAY_S, at the end END_ACK_DELAY_S."""
        if key not in self._sinks:
            return
        self._acknowledge([((key, choice_index), next_index)], END_ACK_DELAY_S if is_end else ACK_DELAY_S)

    def _acknowledge(self, choices: Iterable[tuple[ChoiceKey, int]], delay_s: float) -> None:
        is_due = False
        for choice, next_index in choices:
            self._acks[choice] = next_index
            is_due = is_due or next_index - self._sent_acks.get(choice, 0) >= ACK_TOKENS
        if is_due:
            self._wake.set()
            return
        loop = asyncio.get_running_loop()
        due_s = loop.time() + delay_s
        if self._flush_timer is None or due_s < self._flush_due_s:
            if self._flush_timer is not None:
                self._flush_timer.cancel()
            self._flush_timer, self._flush_due_s = loop.call_at(due_s, self._flush), due_s

    def finish(self, key: RequestKey, choice_index: int, end_index: int) -> None:
        """End a choice normally at `end_index`; repeated on every new stream until the attempt is detached."""
        if key in self._sinks:
            self._ends[(key, choice_index)] = end_index
            self._new_ends.append((key, choice_index))
            self._wake.set()

    def check(self, now_s: float, *, was_stalled: bool) -> None:
        """Judge the worker's pulse; if it stands still its attempts are lost and the stream begins anew."""
        if was_stalled:
            self._pulse.excuse(now_s)
        trouble = self._pulse.verdict(now_s)
        if trouble is not None:
            logger.warning("worker stands still", extra={"worker": self.address, "trouble": trouble})
            self._pulse.reset()
            self._lose(f"worker {self.address}: {trouble}", "NO_PROGRESS")
            if self._call is not None:
                self._call.cancel()

    async def close(self) -> None:
        """End the stream; attached sinks are told."""
        self._task.cancel()
        for timer in (self._flush_timer, self._lost_timer):
            if timer is not None:
                timer.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._lose(f"worker {self.address} is gone", "BROKEN")

    def _flush(self) -> None:
        self._flush_timer = None
        self._wake.set()

    def _lose(self, message: str, reason: str) -> None:
        for _, sink in list(self._sinks.items()):
            sink.on_worker_lost(WorkerLost(message, reason=reason))

    def _not_back(self) -> None:
        self._lost_timer = None
        if not self._open.is_set():
            self._lose(f"the stream of worker {self.address} did not come back in {REOPEN_S} s", "BROKEN")

    async def _run(self) -> None:
        backoff_s = _BACKOFF_S[0]
        channel = self._channels.get(self.address)
        while True:
            try:
                await self._one_stream(channel)
            except grpc.RpcError as error:
                told = from_rpc_error(error)
                logger.info("frames stream ended", extra={"worker": self.address, "reason": told.reason})
            except Exception as error:
                logger.error("frames stream failed unexpectedly", extra={"worker": self.address}, exc_info=error)
            except asyncio.CancelledError:
                # The reader of a call that `check` gave up sees a cancellation; only one of this task is the end.
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
            if self._open.is_set():
                self._open.clear()
                self._on_change()
                self._pulse.reset()
                backoff_s = _BACKOFF_S[0]
                # A broken connection can stay broken in its channel; a fresh one costs a millisecond.
                channel = self._channels.rebuild(channel)
                if self._lost_timer is None:
                    self._lost_timer = asyncio.get_running_loop().call_later(REOPEN_S, self._not_back)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _BACKOFF_S[1])

    async def _one_stream(self, channel: Channel) -> None:
        await channel.settle(SETTLE_S)
        stub: Any = DecodeServiceStub(channel.as_grpc())
        call = stub.Frames(timeout=math.inf)
        self._call = call
        writer = None
        try:
            await call.write(self._hello())
            writer = asyncio.create_task(self._write(call))
            while (message := await call.read()) is not _EOF:
                self._take(message)
        finally:
            self._call = None
            call.cancel()
            if writer is not None:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)

    def _hello(self) -> pb.FramesRequest:
        hello = pb.Hello(gateway_id=self._gateway_id)
        for (request_id, attempt), sink in self._sinks.items():
            for choice_index, next_index in enumerate(sink.next_indices()):
                hello.next_indices.add(
                    request_id=request_id, attempt=attempt, choice_index=choice_index, next_index=next_index
                )
        self._new_ends = list(self._ends)
        if self._new_ends:
            self._wake.set()
        return pb.FramesRequest(hello=hello)

    def _take(self, message: pb.FramesResponse) -> None:
        now_s = asyncio.get_running_loop().time()
        if not self._open.is_set():
            self._open.set()
            self._on_change()
            if self._lost_timer is not None:
                self._lost_timer.cancel()
                self._lost_timer = None
        if message.HasField("frame"):
            self._pulse.heard(now_s)
            if taken := self._sinks.take(message.frame):
                self._acknowledge(taken, ACK_DELAY_S)
        elif message.HasField("beat"):
            self._pulse.beat(message.beat.step, message.beat.runnable_count, now_s)

    async def _write(self, call: Any) -> None:
        beat = pb.FramesRequest(beat=pb.GatewayBeat())
        # A stream that ends says why to its reader; here it only stops being written to.
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            while True:
                try:
                    async with asyncio.timeout(BEAT_S):
                        await self._wake.wait()
                except TimeoutError:
                    await call.write(beat)
                    continue
                self._wake.clear()
                for request in self._outgoing():
                    await call.write(request)

    def _outgoing(self) -> list[pb.FramesRequest]:
        out = []
        for key, choice_index in self._new_ends:
            end_index = self._ends.get((key, choice_index))
            if end_index is not None:
                finish = pb.Finish(request_id=key[0], attempt=key[1], choice_index=choice_index, end_index=end_index)
                out.append(pb.FramesRequest(finish=finish))
        self._new_ends = []
        if self._acks:
            acks = pb.Acks()
            for ((request_id, attempt), choice_index), next_index in self._acks.items():
                acks.next_indices.add(
                    request_id=request_id, attempt=attempt, choice_index=choice_index, next_index=next_index
                )
            self._sent_acks |= self._acks
            self._acks.clear()
            out.append(pb.FramesRequest(acks=acks))
        return out
