"""Requests that are no message: bytes that do not parse, text that is not UTF-8.

grpc itself ends such a call with UNKNOWN and a Python error for text. Here the failure travels in the message's place
to where errors are mapped.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from shoal_common.errors import InvalidArgument


class MalformedMessage(InvalidArgument):
    """The bytes of a request are not the message that its method takes."""

    reason = "MALFORMED_MESSAGE"


@dataclass(frozen=True, slots=True)
class _Unreadable:
    size_bytes: int


def reading(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """`deserialize`, but what it cannot read becomes a value that `readable` refuses."""
    if deserialize is None:
        return None

    def read(raw: bytes) -> Any:
        try:
            return deserialize(raw)
        except (DecodeError, UnicodeDecodeError):
            return _Unreadable(len(raw))

    return read


def readable(request: Any) -> Any:
    """The request as it is, or a stream whose messages are checked as they come. Raises MalformedMessage."""
    return _Readable(request) if hasattr(request, "__aiter__") else _checked(request)


class _Readable:
    """A stream of requests; ends with MalformedMessage at the first that cannot be read."""

    def __init__(self, requests: Any) -> None:
        self._requests: AsyncIterator[Any] = requests.__aiter__()

    def __aiter__(self) -> _Readable:
        return self

    async def __anext__(self) -> Any:
        return _checked(await anext(self._requests))


def _checked(message: Any) -> Any:
    if isinstance(message, _Unreadable):
        raise MalformedMessage(
            f"{message.size_bytes} bytes are not a message of this method, or a text in them is not UTF-8",
            size_bytes=message.size_bytes,
        )
    return message
