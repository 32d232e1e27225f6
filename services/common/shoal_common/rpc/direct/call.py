"""A call on a direct connection, as callers of grpc.aio know it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from shoal_common.rpc.direct.frames import DirectBroken, Ending, FrameKind, pack_frame
from shoal_common.rpc.direct.messages import Messages, Wire

_CODES = {code.value[0]: code for code in grpc.StatusCode}
_DETAILS_KEY = "grpc-status-details-bin"
_EOF = grpc.aio.EOF  # type: ignore[attr-defined]
_NO_METADATA = grpc.aio.Metadata()


def rpc_error(code: grpc.StatusCode, details: str, status: bytes = b"") -> grpc.aio.AioRpcError:
    """The error that grpc.aio raises for such a status."""
    trailing = grpc.aio.Metadata((_DETAILS_KEY, status)) if status else _NO_METADATA
    return grpc.aio.AioRpcError(code, _NO_METADATA, trailing, details, None)


class DirectCall:
    """Reads and writes messages until the status. Errors are those of grpc.aio: AioRpcError, or a cancellation.

    ended   told once when the call no longer belongs to the connection
    """

    def __init__(
        self,
        wire: Wire,
        call_id: int,
        serialize: Callable[[Any], bytes],
        deserialize: Callable[[bytes], Any],
        ended: Callable[[int], None],
    ) -> None:
        self.messages = Messages(wire, call_id)
        self._wire, self._call_id = wire, call_id
        self._serialize, self._deserialize, self._on_ended = serialize, deserialize, ended
        self._timer: asyncio.TimerHandle | None = None
        self._pump: asyncio.Task[None] | None = None
        self._is_over = False

    # For the connection.

    def expires(self, timeout_s: float) -> None:
        """The call has so many seconds from now on."""
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._expire)

    def end(self, ending: Ending) -> None:
        """The status came."""
        self._over()
        code = _CODES.get(ending.code, grpc.StatusCode.UNKNOWN)
        if code is grpc.StatusCode.OK:
            self.messages.feed_end()
            self.messages.fail_writing(asyncio.InvalidStateError("the call is over"))
        else:
            self.messages.fail(rpc_error(code, ending.details, ending.status))

    def broken(self, error: DirectBroken) -> None:
        """The connection is gone."""
        self._over()
        self.messages.fail(rpc_error(grpc.StatusCode.UNAVAILABLE, error.message))

    def write_all(self, requests: AsyncIterable[Any]) -> None:
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
        except DecodeError as error:
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
        """Send a message, once the server takes it."""
        try:
            await self.messages.send(self._serialize(request))
        except DirectBroken as error:
            raise rpc_error(grpc.StatusCode.UNAVAILABLE, error.message) from error

    async def done_writing(self) -> None:
        """No more messages will be sent."""
        self._wire.write(pack_frame(FrameKind.HALF_CLOSE, self._call_id))

    def cancel(self) -> bool:
        """End the call; whoever reads or writes is cancelled. False when it has ended already."""
        return self._leave(asyncio.CancelledError())

    async def only_answer(self) -> Any:
        """Of a unary call: the answer."""
        answer = await self.read()
        # The status comes after the answer, and judges it.
        if answer is _EOF or await self.read() is not _EOF:
            self.cancel()
            raise rpc_error(grpc.StatusCode.INTERNAL, "a unary call has one answer")
        return answer

    def _expire(self) -> None:
        self._leave(rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def _leave(self, error: BaseException) -> bool:
        if self._is_over:
            return False
        self._over()
        self._wire.write(pack_frame(FrameKind.CANCEL, self._call_id))
        self.messages.fail(error)
        return True

    def _over(self) -> None:
        self._is_over = True
        self._on_ended(self._call_id)
        if self._timer is not None:
            self._timer.cancel()
        if self._pump is not None:
            self._pump.cancel()

    async def _write_all(self, requests: AsyncIterable[Any]) -> None:
        try:
            async for request in requests:
                await self.write(request)
            await self.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # The reader hears why the call ended.
