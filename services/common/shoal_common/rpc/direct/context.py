"""What a servicer's method is given of a direct call: the part of grpc.aio.ServicerContext that servicers use."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import grpc

from shoal_common.errors import MeshError
from shoal_common.rpc.direct.frames import Ending, Opening
from shoal_common.rpc.direct.messages import Messages
from shoal_common.rpc.status import DETAILS_KEY, trailing_metadata


class DirectContext:
    """One call. `write` sends a message, `abort` ends the call with a status."""

    def __init__(
        self, opening: Opening, messages: Messages, serialize: Callable[[Any], bytes], *, deadline_s: float
    ) -> None:
        """deadline_s: on the event loop's clock, infinity for none."""
        self._opening, self._messages, self._serialize = opening, messages, serialize
        self._deadline_s = deadline_s
        self._code = grpc.StatusCode.OK
        self._details = ""
        self._status = b""
        self._is_cancelled = False

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        """As the caller sent it."""
        return tuple(self._opening.metadata.items())

    def time_remaining(self) -> float | None:
        """Seconds; None without a deadline."""
        if math.isinf(self._deadline_s):
            return None
        return max(0.0, self._deadline_s - asyncio.get_running_loop().time())

    async def write(self, message: Any) -> None:
        """Send a message, once the caller takes it. Raises what ended the call, where something did."""
        await self._messages.send(self._serialize(message))

    async def abort(
        self,
        code: grpc.StatusCode,
        details: str = "",
        trailing_metadata: Sequence[tuple[str, str | bytes]] = (),
    ) -> NoReturn:
        """End the call; raises always."""
        self._code, self._details = code, details
        for key, value in trailing_metadata:
            if key == DETAILS_KEY and isinstance(value, bytes):
                self._status = value
        raise grpc.aio.AbortError("the call was aborted")

    async def abort_with(self, error: MeshError) -> NoReturn:
        """End the call with the status of `error`; raises always."""
        await self.abort(grpc.StatusCode[error.code], error.message, trailing_metadata(error))

    def set_code(self, code: grpc.StatusCode) -> None:
        """Of a method that is not implemented."""
        self._code = code

    def set_details(self, details: str) -> None:
        """Of a method that is not implemented."""
        self._details = details

    def code(self) -> grpc.StatusCode:
        """What was set."""
        return self._code

    def details(self) -> str:
        """What was set."""
        return self._details

    def cancelled(self) -> bool:
        """The caller has left, or its deadline has passed."""
        return self._is_cancelled

    def cancel(self) -> None:
        """It has."""
        self._is_cancelled = True

    def ending(self) -> Ending:
        """The status as it stands."""
        return Ending(int(self._code.value[0]), self._details, self._status)
