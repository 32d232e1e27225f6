"""A call on a direct connection, as callers of grpc.aio know it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, Callable, Iterable
from typing import Any, Protocol

import grpc
from google.protobuf.message import DecodeError

from shoal_common.rpc.direct.frames import DirectBroken, Ending, FrameKind, MessageTooLarge, pack_frame
from shoal_common.rpc.direct.messages import Messages, Wire
from shoal_common.rpc.status import DETAILS_KEY

logger = logging.getLogger(__name__)

_CODES = {code.value[0]: code for code in grpc.StatusCode}
_EOF = grpc.aio.EOF  # type: ignore[attr-defined]
_NO_METADATA = grpc.aio.Metadata()


def rpc_error(code: grpc.StatusCode, details: str, status: bytes = b"") -> grpc.aio.AioRpcError:
    """The error that grpc.aio raises for such a status."""
    trailing = grpc.aio.Metadata((DETAILS_KEY, status)) if status else _NO_METADATA
    return grpc.aio.AioRpcError(code, _NO_METADATA, trailing, details, None)


class Caller(Wire, Protocol):
    """The connection of a call, which knows the call as long as it has not ended."""

    def forget(self, call_id: int) -> None:
        """The call has ended."""

    def abandon(self, call_id: int, timer: asyncio.TimerHandle | None) -> None:
        """The call has not ended, and nobody has it any more. From any thread."""


class DirectCall:
    """Reads and writes messages until the status. Errors are those of grpc.aio: AioRpcError, or a cancellation.

    The connection holds it weakly: a call that its caller lets go of is cancelled, where grpc.aio keeps it until its
    deadline.
    """

    def __init__(
        self,
        wire: Caller,
        call_id: int,
        serialize: Callable[[Any], bytes] | None,
        deserialize: Callable[[bytes], Any] | None,
    ) -> None:
        self.messages = Messages(wire, call_id)
        self._wire, self._call_id = wire, call_id
        self._serialize, self._deserialize = serialize or bytes, deserialize or bytes
        self._timer: asyncio.TimerHandle | None = None
        self._pump: asyncio.Task[None] | None = None
        self._is_over = False
        self._is_half_closed = False
        self._is_told = False

    def __del__(self) -> None:
        if not self._is_over:
            self._wire.abandon(self._call_id, self._timer)

    # For the connection.

    def expires(self, timer: asyncio.TimerHandle) -> None:
        """The timer of its deadline, which calls `expire`."""
        self._timer = timer

    def expire(self) -> None:
        """Its time is over."""
        self._leave(lambda: rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def end(self, ending: Ending) -> None:
        """The status came."""
        self._over()
        code = _CODES.get(ending.code, grpc.StatusCode.UNKNOWN)
        if code is grpc.StatusCode.OK:
            self._is_told = True
            self.messages.feed_end()
            self.messages.fail_writing(_finished)
        else:
            self.messages.fail(lambda: rpc_error(code, ending.details, ending.status))

    def failed(self, code: grpc.StatusCode, details: str) -> None:
        """It ends without a word from the server, or to it."""
        self._over()
        self.messages.fail(lambda: rpc_error(code, details))

    def write_all(self, requests: AsyncIterable[Any] | Iterable[Any]) -> None:
        """Send what an iterator gives, and then no more."""
        self._pump = asyncio.get_running_loop().create_task(self._write_all(requests))

    # For the caller.

    async def read(self) -> Any:
        """The next message; EOF once the call has ended well."""
        try:
            payload = await self.messages.next()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if payload is None:
            return _EOF
        try:
            return self._deserialize(payload)
        except (DecodeError, UnicodeDecodeError) as error:
            self.cancel()
            raise rpc_error(grpc.StatusCode.INTERNAL, "the answer is not the message of its method") from error

    def __aiter__(self) -> DirectCall:
        return self

    async def __anext__(self) -> Any:
        message = await self.read()
        if message is _EOF:
            raise StopAsyncIteration
        return message

    async def write(self, request: Any) -> None:
        """Send a message, once the server takes it. Raises InvalidStateError after the end, or `done_writing`."""
        if self._is_told or self._is_half_closed:
            raise _finished()
        payload = self._serialize(request)
        try:
            await self.messages.send(payload)
        except DirectBroken as error:
            raise rpc_error(grpc.StatusCode.UNAVAILABLE, error.message) from error
        except MessageTooLarge as error:
            details = f"CLIENT: {error.message}"
            self._leave(lambda: rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, details))
            raise rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, details) from error
        except asyncio.CancelledError:
            self.cancel()
            raise

    async def done_writing(self) -> None:
        """No more messages will be sent. Safe to repeat."""
        if not self._is_over and not self._is_half_closed:
            self._is_half_closed = True
            self._wire.write(pack_frame(FrameKind.HALF_CLOSE, self._call_id))

    def cancel(self) -> bool:
        """End the call; whoever reads or writes is cancelled. False when it has ended already."""
        has_left = self._leave(asyncio.CancelledError)
        self._is_told = self._is_told or has_left
        return has_left

    async def only_answer(self) -> Any:
        """Of a unary call: the answer."""
        answer = await self.read()
        # The status comes after the answer, and judges it.
        if answer is _EOF or await self.read() is not _EOF:
            self.cancel()
            raise rpc_error(grpc.StatusCode.INTERNAL, "a unary call has one answer")
        return answer

    def _leave(self, error: Callable[[], BaseException]) -> bool:
        if self._is_over:
            return False
        self._over()
        self._wire.write(pack_frame(FrameKind.CANCEL, self._call_id))
        self.messages.drop()
        self.messages.fail(error)
        return True

    def _over(self) -> None:
        self._is_over = True
        self._wire.forget(self._call_id)
        if self._timer is not None:
            self._timer.cancel()
        if self._pump is not None:
            self._pump.cancel()

    async def _write_all(self, requests: AsyncIterable[Any] | Iterable[Any]) -> None:
        try:
            if isinstance(requests, AsyncIterable):
                async for request in requests:
                    await self.write(request)
            else:
                for request in requests:
                    await self.write(request)
            await self.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # The reader hears why the call ended.
        except Exception as error:
            # As grpc.aio: nobody awaits the requests, so what goes wrong with them ends the call.
            logger.debug("the requests of a call failed", exc_info=error)
            self.cancel()


def _finished() -> asyncio.InvalidStateError:
    return asyncio.InvalidStateError("no message can be sent on this call any more")
