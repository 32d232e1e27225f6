"""One direct connection, what both of its ends have in common: frames in and out, signs of life, the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import cast

from shoal_common.rpc.direct.frames import DirectBroken, FrameKind, FrameReader, pack_frame
from shoal_common.same_host import unpace

logger = logging.getLogger(__name__)

PING_S = 10.0
"""So often the caller says that it lives and asks the same: of one that only reads the server hears nothing else."""
SILENCE_S = 15.0
"""After so long without a word the connection has ended, as by gRPC; the server waits twice as long."""
_QUEUED_BYTES = 1 << 20
_CHOKED_BYTES = 16 << 20
"""A server takes nothing more from a caller that leaves so much unread; one that still does not read is silent then.
A caller always reads, so the two never wait for each other."""
_LATE_S = 1.0
_DOUBT_S = 0.1
_FLUSH_S = 1.0
_TURN_BYTES = 64 << 10


class DirectConnection(asyncio.Protocol):
    """Reads frames and hands them to `_take`; writes; ends when the peer is silent, breaks the rules, or is gone."""

    def __init__(self, *, is_caller: bool) -> None:
        """is_caller: the end that asks for signs of life, and that always reads."""
        self._is_caller = is_caller
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._frames = FrameReader()
        self._is_full = False
        self._is_choked = False
        self._is_doubted = False
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0
        self._waiting: list[asyncio.Future[None]] = []
        self._heard_s = self._due_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._lost = asyncio.Event()
        self.is_open = False

    # To the calls.

    @property
    def is_full(self) -> bool:
        """It holds back as much as it should."""
        return self._is_full

    @property
    def queued_bytes(self) -> int:
        """What it holds back."""
        return self._unsent_bytes + (0 if self._transport is None else self._transport.get_write_buffer_size())

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
        # After the calls have heard of the end.
        self._loop.call_soon(self._wake)

    async def closed(self) -> None:
        """End it, once what is queued has left; after a second at the latest."""
        self.close()
        if self._transport is not None:
            try:
                async with asyncio.timeout(_FLUSH_S):
                    await self._lost.wait()
            except TimeoutError:
                logger.debug("the peer does not take what it was told")
            finally:
                self._transport.abort()

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
        connected = transport.get_extra_info("socket")
        if connected.family != socket.AF_UNIX:
            # A peer that is gone already shows elsewhere.
            with contextlib.suppress(OSError):
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            unpace(connected)
        self._heard_s = self._loop.time()
        # The first sign of life comes after the greeting.
        self._look_in(PING_S if self._is_caller else 2 * SILENCE_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._timer is not None:
            self._timer.cancel()
        self._wake()
        self._lost.set()
        self._ended(DirectBroken(f"the connection ended: {exc or 'closed'}"))

    def data_received(self, data: bytes) -> None:
        self._heard_s = self._loop.time()
        try:
            for kind, call_id, payload in self._frames.feed(data):
                self._take(kind, call_id, payload)
                if not self.is_open:
                    return
        except DirectBroken as error:
            logger.warning("a direct connection breaks the rules", extra={"error": error.message})
            self.close(at_once=True)
        else:
            if self._is_full and not self._is_caller and self.queued_bytes > _CHOKED_BYTES:
                self._choke()

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._wake()
        if self._is_choked:
            self._is_choked = False
            if self._transport is not None and self.is_open:
                self._heard_s = self._loop.time()
                self._transport.resume_reading()

    def _choke(self) -> None:
        if self._transport is not None and not self._is_choked:
            self._is_choked = True
            self._transport.pause_reading()

    def _wake(self) -> None:
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
        limit_s = SILENCE_S if self._is_caller else 2 * SILENCE_S
        next_s = limit_s - silent_s
        if silent_s >= limit_s:
            if self._is_doubted:
                logger.info("a direct connection is silent", extra={"seconds": round(silent_s, 1)})
                self.close(at_once=True)
                return
            # Timers may come before what has arrived: it is judged by the second look.
            next_s = _DOUBT_S
        self._is_doubted = silent_s >= limit_s
        if self._is_caller and not self._is_doubted:
            self.write(pack_frame(FrameKind.PING, 0))
            next_s = min(next_s, PING_S)
        self._look_in(next_s)

    def _look_in(self, seconds: float) -> None:
        self._due_s = self._loop.time() + seconds
        self._timer = self._loop.call_at(self._due_s, self._look)
