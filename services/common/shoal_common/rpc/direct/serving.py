"""The serving end of one direct connection: the methods of a gRPC server, by the same handlers."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import socket
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from shoal_common.rpc.direct.connection import DirectConnection
from shoal_common.rpc.direct.context import DirectContext
from shoal_common.rpc.direct.frames import (
    KEY_BYTES,
    MAX_MESSAGE_BYTES,
    DirectBroken,
    Ending,
    FrameKind,
    Opening,
    pack_frame,
    pack_hello,
    too_large,
    unpack_credit,
    unpack_hello,
)
from shoal_common.rpc.direct.messages import Messages
from shoal_common.same_host import is_of_our_user

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]

MAX_CALLS = 16_384
"""Of one connection at a time."""
_HELLO_S = 5.0
_UNAVAILABLE = Ending(grpc.StatusCode.UNAVAILABLE.value[0], "the server ends")
_LATE = Ending(grpc.StatusCode.DEADLINE_EXCEEDED.value[0], "Deadline Exceeded")


class Server(Protocol):
    """What its connections need of it."""

    methods: Mapping[str, Handler]
    key: bytes
    is_stopping: bool

    def connected(self, connection: Serving) -> bool:
        """A connection was made. False: it is one too many."""
        ...

    def disconnected(self, connection: Serving) -> None:
        """It is over."""


class _Call:
    """One call being served."""

    __slots__ = ("context", "has_begun", "is_late", "messages", "task", "timer")

    def __init__(self, messages: Messages, context: DirectContext) -> None:
        self.messages, self.context = messages, context
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.has_begun = False
        self.is_late = False

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        self.context.cancel()
        if self.task is not None:
            self.task.cancel()


class Serving(DirectConnection):
    """One caller."""

    def __init__(self, server: Server) -> None:
        super().__init__(is_caller=False)
        self._server = server
        self._calls: dict[int, _Call] = {}
        self._last_id = 0
        self._is_known = False
        self._hello: asyncio.TimerHandle | None = None

    def tasks(self) -> list[asyncio.Task[None]]:
        """What is running."""
        return [call.task for call in self._calls.values() if call.task is not None]

    def cut(self) -> None:
        """Cancel what is running; the callers are told that the server ends."""
        for call_id, call in list(self._calls.items()):
            if call.task is not None:
                call.task.cancel()
            if not call.has_begun:
                self._close(call_id, call, _UNAVAILABLE)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        peer = transport.get_extra_info("socket")
        is_ours = peer.family != socket.AF_UNIX or is_of_our_user(peer)
        if not is_ours or not self._server.connected(self):
            self.close(at_once=True)
            return
        self._hello = self._loop.call_later(_HELLO_S, self._is_unknown)

    def _is_unknown(self) -> None:
        if not self._is_known:
            self.close(at_once=True)

    def _ended(self, error: DirectBroken) -> None:
        self._server.disconnected(self)
        if self._hello is not None:
            self._hello.cancel()
        message = error.message
        for call_id, call in list(self._calls.items()):
            call.messages.fail(lambda: DirectBroken(message))
            self._cancel(call_id, call)

    def _take(self, kind: int, call_id: int, payload: bytes) -> None:
        if not self._is_known:
            self._greet(kind, payload)
        elif kind == FrameKind.OPEN:
            self._open(call_id, payload)
        elif kind == FrameKind.PING:
            self.write(pack_frame(FrameKind.PONG, 0))
        else:
            call = self._calls.get(call_id)
            if call is None:
                if not 0 < call_id <= self._last_id:
                    raise DirectBroken(f"a frame for call {call_id}, which was not opened")
                return  # It crossed the end of the call.
            if kind == FrameKind.MESSAGE:
                call.messages.feed(payload)
            elif kind == FrameKind.CREDIT:
                call.messages.feed_credit(unpack_credit(payload))
            elif kind == FrameKind.HALF_CLOSE:
                call.messages.feed_end()
            elif kind == FrameKind.CANCEL:
                self._cancel(call_id, call)
            else:
                raise DirectBroken(f"a frame of kind {kind}")

    def _greet(self, kind: int, payload: bytes) -> None:
        if kind != FrameKind.HELLO or not secrets.compare_digest(unpack_hello(payload), self._server.key):
            raise DirectBroken("the caller does not show this server's key")
        self._is_known = True
        if self._hello is not None:
            self._hello.cancel()
        self._frames.open_up()
        self.write(pack_frame(FrameKind.HELLO, 0, pack_hello(bytes(KEY_BYTES))))

    def _open(self, call_id: int, payload: bytes) -> None:
        if call_id <= self._last_id:
            raise DirectBroken(f"call {call_id} after call {self._last_id}")
        self._last_id = call_id
        opening = Opening.unpack(payload)
        handler = self._server.methods.get(opening.method)
        refusal = self._refusal(opening, handler)
        if handler is None or refusal is not None:
            self.write(pack_frame(FrameKind.END, call_id, (refusal or _UNAVAILABLE).pack()))
            return
        messages = Messages(self, call_id)
        if opening.request is not None:
            messages.feed_end()
        is_endless = math.isinf(opening.timeout_s)
        deadline_s = math.inf if is_endless else self._loop.time() + opening.timeout_s
        context = DirectContext(opening, messages, handler.response_serializer or bytes, deadline_s=deadline_s)
        call = self._calls[call_id] = _Call(messages, context)
        if not is_endless:
            call.timer = self._loop.call_at(deadline_s, self._expire, call_id, call)
        call.task = self._loop.create_task(self._run(call_id, call, handler, opening.request))

    def _refusal(self, opening: Opening, handler: Handler | None) -> Ending | None:
        if handler is None:
            return Ending(grpc.StatusCode.UNIMPLEMENTED.value[0], "Method not found!")
        if self._server.is_stopping:
            return _UNAVAILABLE
        if len(self._calls) >= MAX_CALLS:
            return Ending(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], f"{MAX_CALLS} calls run on this connection")
        if (opening.request is None) != handler.request_streaming:
            return Ending(grpc.StatusCode.UNIMPLEMENTED.value[0], "The method is of another kind!")
        return None

    def _expire(self, call_id: int, call: _Call) -> None:
        call.is_late = True
        self._cancel(call_id, call)

    def _cancel(self, call_id: int, call: _Call) -> None:
        call.cancel()
        if not call.has_begun:
            # Its task ends without having run a line.
            self._close(call_id, call, _LATE if call.is_late else None)

    def _close(self, call_id: int, call: _Call, ending: Ending | None, answer: bytes = b"") -> None:
        if self._calls.pop(call_id, None) is None:
            return
        if call.timer is not None:
            call.timer.cancel()
        call.messages.drop()
        call.messages.fail(_over)
        if ending is not None:
            self.write(answer + pack_frame(FrameKind.END, call_id, ending.pack()))

    async def _run(self, call_id: int, call: _Call, handler: Handler, request: bytes | None) -> None:
        call.has_begun = True
        ending = None
        answer = b""
        try:
            read = handler.request_deserializer or bytes
            taken = _Requests(call.messages, read) if request is None else read(request)
            function = getattr(handler, _ARITIES[handler.request_streaming, handler.response_streaming])
            result = await function(taken, call.context)
            if not handler.response_streaming:
                payload = (handler.response_serializer or bytes)(result)
                if len(payload) > MAX_MESSAGE_BYTES:
                    await call.context.abort_with(too_large(len(payload)))
                answer = pack_frame(FrameKind.MESSAGE, call_id, payload)
            ending = call.context.ending()
        except grpc.aio.AbortError:
            ending = call.context.ending()
        except asyncio.CancelledError:
            # A caller that has left is told nothing.
            ending = _LATE if call.is_late else None if call.context.cancelled() else _UNAVAILABLE
        except DirectBroken:
            pass  # There is nobody to tell.
        except Exception as error:
            logger.error("a direct call failed outside of its method", exc_info=error)
            ending = Ending(grpc.StatusCode.INTERNAL.value[0], "internal error; the server's log has the details")
        finally:
            self._close(call_id, call, ending, answer)


def _over() -> DirectBroken:
    return DirectBroken("the call has ended")


_ARITIES = {
    (False, False): "unary_unary",
    (False, True): "unary_stream",
    (True, False): "stream_unary",
    (True, True): "stream_stream",
}


class _Requests:
    """The messages of a caller as gRPC gives them: an asynchronous iterator."""

    def __init__(self, messages: Messages, read: Callable[[bytes], Any]) -> None:
        self._messages, self._read = messages, read

    def __aiter__(self) -> _Requests:
        return self

    async def __anext__(self) -> Any:
        payload = await self._messages.next()
        if payload is None:
            raise StopAsyncIteration
        return self._read(payload)
