"""One direct connection, what both of its ends have in common: frames in and out, signs of life, the end."""

from __future__ import annotations

import asyncio
import logging
from typing import cast

from shoal_common.rpc.direct.frames import DirectBroken, FrameKind, FrameReader, pack_frame

logger = logging.getLogger(__name__)

PING_S = 10.0
"""After so long without a word from the server the caller asks whether it is there."""
SILENCE_S = 15.0
"""After so long without a word the connection has ended, as by gRPC; the server waits twice as long."""
_QUEUED_BYTES = 1 << 20
_LATE_S = 1.0
_TURN_BYTES = 64 << 10


class DirectConnection(asyncio.Protocol):
    """Reads frames and hands them to `_take`; writes; ends when the peer is silent, breaks the rules, or is gone."""

    def __init__(self, *, pings: bool) -> None:
        """pings: the caller's end, which asks for signs of life."""
        self._pings = pings
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._frames = FrameReader()
        self._is_full = False
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0
        self._waiting: list[asyncio.Future[None]] = []
        self._heard_s = self._due_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self.is_open = False

    # To the calls.

    @property
    def is_full(self) -> bool:
        """It holds back as much as it should."""
        return self._is_full

    def write(self, frames: bytes) -> None:
        """Send, or queue. Nothing happens on a connection that has ended.

        What is written in one turn of the event loop leaves together: a system call, and a peer that is woken, cost
        more than most frames.
        """
        if not self.is_open:
            return
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(frames)
        self._unsent_bytes += len(frames)
        if self._unsent_bytes >= _TURN_BYTES:
            self._flush()

    async def drained(self) -> None:
        """Wait until it takes more. Raises DirectBroken when it has ended."""
        while self._is_full and self.is_open:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._waiting.append(waiter)
            await waiter
        if not self.is_open:
            raise DirectBroken("the connection has ended")

    def close(self, *, at_once: bool = False) -> None:
        """End it; what is queued still leaves unless `at_once`. Safe to repeat."""
        if not at_once:
            self._flush()
        self.is_open = False
        if self._transport is not None:
            if at_once:
                self._transport.abort()
            else:
                self._transport.close()

    # For the two ends.

    def _take(self, kind: int, call_id: int, payload: bytes) -> None:
        """A frame came. Raises DirectBroken where it breaks the rules."""
        raise NotImplementedError

    def _ended(self, error: DirectBroken) -> None:
        """No frame will come any more. Called once."""
        raise NotImplementedError

    # From the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.is_open = cast(asyncio.Transport, transport), True
        self._transport.set_write_buffer_limits(high=_QUEUED_BYTES)
        self._heard_s = self._due_s = self._loop.time()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._timer is not None:
            self._timer.cancel()
        self.resume_writing()
        self._ended(DirectBroken(f"the connection ended: {exc or 'closed'}"))

    def data_received(self, data: bytes) -> None:
        self._heard_s = self._loop.time()
        try:
            for kind, call_id, payload in self._frames.feed(data):
                if kind == FrameKind.PING:
                    self.write(pack_frame(FrameKind.PONG, 0))
                elif kind != FrameKind.PONG:
                    self._take(kind, call_id, payload)
                if not self.is_open:
                    return
        except DirectBroken as error:
            logger.warning("a direct connection breaks the rules", extra={"error": error.message})
            self.close(at_once=True)

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    def _flush(self) -> None:
        unsent = self._unsent
        if unsent and self._transport is not None and self.is_open:
            self._transport.write(unsent[0] if len(unsent) == 1 else b"".join(unsent))
        unsent.clear()
        self._unsent_bytes = 0

    def _look(self) -> None:
        # Looks again when it could be over, instead of setting a timer for every frame.
        now_s = self._loop.time()
        if now_s - self._due_s > _LATE_S:
            # This process stood still itself; what came meanwhile is not read yet.
            self._heard_s = now_s
        silent_s = now_s - self._heard_s
        limit_s = SILENCE_S if self._pings else 2 * SILENCE_S
        if silent_s >= limit_s:
            logger.info("a direct connection is silent", extra={"seconds": round(silent_s, 1)})
            self.close(at_once=True)
            return
        next_s = limit_s - silent_s
        if self._pings:
            if silent_s >= PING_S:
                self.write(pack_frame(FrameKind.PING, 0))
            else:
                next_s = PING_S - silent_s
        self._due_s = now_s + next_s
        self._timer = self._loop.call_at(self._due_s, self._look)
