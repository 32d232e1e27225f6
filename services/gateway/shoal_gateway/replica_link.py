"""The Reserve stream to one scheduler replica, re-opened with bounded backoff for as long as the replica is known."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc
from shoal.scheduler.v1 import scheduler_service_pb2 as pb
from shoal.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from shoal_common.rpc import SETTLE_S, Channel, Channels, from_rpc_error

logger = logging.getLogger(__name__)

_EOF = grpc.aio.EOF  # type: ignore[attr-defined]

_BACKOFF_S = (0.05, 2.0)
_PATIENCE_S = 0.01
"""What changes nothing for anybody who waits leaves with whatever comes next, or after so long."""
_MAX_BATCH = 64
_MAX_PENDING = 16_384
"""A replica that does not read so many messages is as good as gone."""


class ReplicaLink:
    """One replica. `on_up` when a stream opens, `on_down` when it breaks, `on_message` in between."""

    def __init__(
        self,
        *,
        replica_id: str,
        address: str,
        gateway_id: str,
        channels: Channels,
        on_up: Callable[[ReplicaLink], None],
        on_down: Callable[[ReplicaLink], None],
        on_message: Callable[[ReplicaLink, pb.ReserveResponse], None],
    ) -> None:
        self.replica_id, self.address = replica_id, address
        self._gateway_id, self._channels = gateway_id, channels
        self._on_up, self._on_down, self._on_message = on_up, on_down, on_message
        self._pending: deque[pb.ReserveRequest] = deque()
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._call: Any = None
        self.is_up = False
        self._task = asyncio.create_task(self._run())

    def send(self, message: pb.ReserveRequest, *, can_wait: bool = False) -> None:
        """Send in order; dropped while the stream is down, as whoever picks up the pieces says all anew."""
        if not self.is_up:
            return
        if len(self._pending) >= _MAX_PENDING:
            logger.warning("scheduler does not read", extra={"replica": self.replica_id})
            self._call.cancel()
            return
        self._pending.append(message)
        if not can_wait:
            self._wake.set()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_PATIENCE_S, self._flush)

    async def close(self) -> None:
        """End the stream; `on_down` is called if it was up."""
        if self._timer is not None:
            self._timer.cancel()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def _flush(self) -> None:
        self._timer = None
        self._wake.set()

    async def _run(self) -> None:
        backoff_s = _BACKOFF_S[0]
        channel = self._channels.get(self.address)
        while True:
            was_up = False
            try:
                await self._one_stream(channel)
            except grpc.RpcError as error:
                reason = from_rpc_error(error).reason
                logger.info("reserve stream ended", extra={"replica": self.replica_id, "reason": reason})
            finally:
                was_up = self._down()
            if was_up:
                backoff_s = _BACKOFF_S[0]
                channel = self._channels.rebuild(channel)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _BACKOFF_S[1])

    async def _one_stream(self, channel: Channel) -> None:
        await channel.settle(SETTLE_S)
        stub: Any = SchedulerServiceStub(channel.as_grpc())
        call = stub.Reserve(timeout=math.inf)
        self._call = call
        writer = None
        try:
            await call.write(pb.ReserveRequest(opened=pb.Opened(gateway_id=self._gateway_id)))
            self.is_up = True
            self._on_up(self)
            writer = asyncio.create_task(self._write(call))
            while (message := await call.read()) is not _EOF:
                self._on_message(self, message)
        finally:
            call.cancel()
            if writer is not None:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)

    def _down(self) -> bool:
        was_up, self.is_up = self.is_up, False
        self._pending.clear()
        if was_up:
            self._on_down(self)
        return was_up

    async def _write(self, call: Any) -> None:
        # The reader hears why a stream ends.
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._pending:
                    await call.write(self._next())

    def _next(self) -> pb.ReserveRequest:
        """All that is pending, up to a batch, as one message."""
        if len(self._pending) == 1:
            return self._pending.popleft()
        message = pb.ReserveRequest()
        while self._pending and len(message.batch.requests) < _MAX_BATCH:
            message.batch.requests.append(self._pending.popleft())
        return message
