"""The messages of one call, as one of its two sides has them: in order, each side bounded by the other's credit."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from shoal_common.rpc.direct.frames import (
    HEADER_BYTES,
    MAX_MESSAGE_BYTES,
    DirectBroken,
    FrameKind,
    pack_credit,
    pack_frame,
    too_large,
)

WINDOW_BYTES = 1 << 20
"""So much may be under way unread; a message leaves as long as any of it is left, so one more can be."""
_RETURN_BYTES = WINDOW_BYTES // 2

MakeError = Callable[[], BaseException]
"""Makes an error anew each time: one that is kept would keep the frames that it was raised in, in a circle."""


class Wire(Protocol):
    """The connection of a call."""

    def write(self, frames: bytes) -> None:
        """Send, or queue. Nothing happens on a connection that has ended."""

    async def drained(self) -> None:
        """Wait until it takes more. Raises DirectBroken when it has ended."""

    @property
    def is_full(self) -> bool:
        """It holds back as much as it should."""
        ...


class Messages:
    """Invariant: at most WINDOW_BYTES and one message are received and not read; `next` gives them in order.

    A message counts with its header, so that empty ones are bounded too. One reader and one writer at a time; a
    second one is refused. `fail` ends both; what was received before is still read.
    """

    __slots__ = (
        "_call_id",
        "_error",
        "_is_over",
        "_left_bytes",
        "_owed_bytes",
        "_reader",
        "_received",
        "_unread_bytes",
        "_wire",
        "_write_error",
        "_writer",
    )

    def __init__(self, wire: Wire, call_id: int) -> None:
        self._wire, self._call_id = wire, call_id
        self._received: deque[bytes] = deque()
        self._unread_bytes = 0
        self._owed_bytes = 0
        self._left_bytes = WINDOW_BYTES
        self._is_over = False
        self._error: MakeError | None = None
        self._write_error: MakeError | None = None
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None

    # What the connection tells.

    def feed(self, payload: bytes) -> None:
        """A message came. Raises DirectBroken when it is too large, has no credit, or comes after the last."""
        if self._is_over:
            raise DirectBroken("a message after the last one")
        # The peer knows of no more credit than was returned, so it must see some left.
        if len(payload) > MAX_MESSAGE_BYTES or self._unread_bytes + self._owed_bytes >= WINDOW_BYTES:
            raise DirectBroken("more messages than there was credit for")
        self._unread_bytes += len(payload) + HEADER_BYTES
        self._received.append(payload)
        self._wake(self._reader)

    def feed_credit(self, size_bytes: int) -> None:
        """The peer has read so much."""
        self._left_bytes = min(WINDOW_BYTES, self._left_bytes + size_bytes)
        self._wake(self._writer)

    def feed_end(self) -> None:
        """No message will come any more."""
        self._is_over = True
        self._wake(self._reader)

    def fail(self, error: MakeError) -> None:
        """Reading, when all is read, and writing raise this from now on. The first one stays."""
        if self._error is None:
            self._error = error
        self._wake(self._reader)
        self.fail_writing(error)

    def fail_writing(self, error: MakeError) -> None:
        """Writing raises this from now on. The first one stays."""
        if self._write_error is None:
            self._write_error = error
        self._wake(self._writer)

    def drop(self) -> None:
        """Forget what was received."""
        self._received.clear()
        self._unread_bytes = 0

    # What the call does.

    async def next(self) -> bytes | None:
        """The next message; None after the last."""
        while not self._received:
            if self._is_over:
                return None
            if self._error is not None:
                raise self._error()
            waiter = self._reader = _waiting(self._reader)
            try:
                await waiter
            finally:
                if self._reader is waiter:
                    self._reader = None
        payload = self._received.popleft()
        size = len(payload) + HEADER_BYTES
        self._unread_bytes -= size
        self._owed_bytes += size
        if self._owed_bytes >= _RETURN_BYTES:
            self._wire.write(pack_frame(FrameKind.CREDIT, self._call_id, pack_credit(self._owed_bytes)))
            self._owed_bytes = 0
        return payload

    async def send(self, payload: bytes) -> None:
        """One message, once the peer and the connection take it.

        Raises MessageTooLarge, then nothing is sent; what `fail` was given; DirectBroken.
        """
        if len(payload) > MAX_MESSAGE_BYTES:
            raise too_large(len(payload))
        while self._left_bytes <= 0 or self._write_error is not None:
            if self._write_error is not None:
                raise self._write_error()
            waiter = self._writer = _waiting(self._writer)
            try:
                await waiter
            finally:
                if self._writer is waiter:
                    self._writer = None
        self._left_bytes -= len(payload) + HEADER_BYTES
        self._wire.write(pack_frame(FrameKind.MESSAGE, self._call_id, payload))
        if self._wire.is_full:
            await self._wire.drained()

    @staticmethod
    def _wake(waiter: asyncio.Future[None] | None) -> None:
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def _waiting(before: asyncio.Future[None] | None) -> asyncio.Future[None]:
    """What to wait for. Raises InvalidStateError if another task waits in the same place."""
    if before is not None and not before.done():
        raise asyncio.InvalidStateError("another task waits for this call's messages")
    return asyncio.get_running_loop().create_future()
