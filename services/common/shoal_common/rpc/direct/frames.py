"""How calls are framed on a direct connection. Pure.

A frame is a header (size of the payload, number of the call, kind) and its payload; all numbers are little-endian.
The caller numbers its calls from 1; call 0 is the connection itself.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum

from shoal_common.errors import MeshError, Unavailable

VERSION = 1
KEY_BYTES = 16
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""As by gRPC. A prompt of 1M tokens is 3 to 4 MiB packed, just over gRPC's own limit."""
_HEADER = struct.Struct("<IIB")
_OPENING = struct.Struct("<BHHd")
_ENDING = struct.Struct("<HI")
_CREDIT = struct.Struct("<I")
_HELLO = struct.Struct(f"<H{KEY_BYTES}s")
HEADER_BYTES = _HEADER.size
MAX_TEXT_BYTES = 16 * 1024
"""Of a call's metadata, and of a status with its details: those of gRPC end there too."""
_MAX_NAME_BYTES = 65_535
_MAX_PAYLOAD_BYTES = MAX_MESSAGE_BYTES + MAX_TEXT_BYTES + _MAX_NAME_BYTES + _OPENING.size
_HAS_REQUEST = 1
_RESOURCE_EXHAUSTED = 8


class FrameKind(IntEnum):
    """What a payload is."""

    HELLO = 1
    """First in both directions: version, and the key from the caller."""
    OPEN = 2
    MESSAGE = 3
    HALF_CLOSE = 4
    """The caller has no more messages."""
    CANCEL = 5
    END = 6
    """The status, after the last message to the caller."""
    CREDIT = 7
    """So many bytes of messages were consumed."""
    PING = 8
    PONG = 9


class DirectBroken(Unavailable):
    """What came is no frame of ours, or the connection has ended."""

    reason = "DIRECT_BROKEN"


class MessageTooLarge(MeshError):
    """A message, or metadata, is over the limit; its call cannot go on, all others can."""

    code, reason = "RESOURCE_EXHAUSTED", "MESSAGE_TOO_LARGE"


def too_large(size_bytes: int, max_bytes: int = MAX_MESSAGE_BYTES, what: str = "message") -> MessageTooLarge:
    """What to raise for what is; worded as by gRPC."""
    return MessageTooLarge(
        f"Sent {what} larger than max ({size_bytes} vs. {max_bytes})", size_bytes=size_bytes, max_bytes=max_bytes
    )


@dataclass(frozen=True, slots=True)
class Opening:
    """A call begins. `request`: the one message of a method that takes one, None where messages follow.

    timeout_s   seconds that the call has, infinity for none
    metadata    text only; neither names nor values hold a NUL
    """

    method: str
    timeout_s: float
    metadata: Mapping[str, str]
    request: bytes | None

    def pack(self) -> bytes:
        """The payload. Raises MessageTooLarge, ValueError for metadata with a NUL."""
        if self.request is not None and len(self.request) > MAX_MESSAGE_BYTES:
            raise too_large(len(self.request))
        method = self.method.encode()
        parts = [part for pair in self.metadata.items() for part in pair]
        metadata = "\0".join(parts).encode()
        if metadata.count(0) >= max(len(parts), 1):
            raise ValueError("metadata with a NUL")
        if len(metadata) > MAX_TEXT_BYTES:
            raise too_large(len(metadata), MAX_TEXT_BYTES, "metadata")
        flags = 0 if self.request is None else _HAS_REQUEST
        head = _OPENING.pack(flags, len(method), len(metadata), self.timeout_s)
        return b"".join((head, method, metadata, self.request or b""))

    @classmethod
    def unpack(cls, payload: bytes) -> Opening:
        """Raises DirectBroken."""
        try:
            flags, method_size, metadata_size, timeout_s = _OPENING.unpack_from(payload)
            at = _OPENING.size + method_size
            end = at + metadata_size
            # Not a number is neither.
            if end > len(payload) or flags > _HAS_REQUEST or not timeout_s > -math.inf:
                raise ValueError(f"{len(payload)} bytes, flags {flags}, {timeout_s} s")
            parts = payload[at:end].decode().split("\0") if metadata_size else []
            request = payload[end:] if flags else None
            metadata = dict(zip(parts[::2], parts[1::2], strict=True))
            return cls(payload[_OPENING.size : at].decode(), timeout_s, metadata, request)
        except (struct.error, ValueError) as error:
            raise DirectBroken(f"not the opening of a call: {error}") from error


@dataclass(frozen=True, slots=True)
class Ending:
    """A call's status. `status`: a packed google.rpc.Status with its details, empty where there are none."""

    code: int
    details: str = ""
    status: bytes = b""

    def pack(self) -> bytes:
        """The payload. A status that is too long for gRPC becomes the one that gRPC makes of it."""
        details = self.details.encode(errors="replace")
        size = len(details) + len(self.status)
        if size > MAX_TEXT_BYTES:
            return Ending(_RESOURCE_EXHAUSTED, too_large(size, MAX_TEXT_BYTES, "status").message).pack()
        return _ENDING.pack(self.code, len(details)) + details + self.status

    @classmethod
    def unpack(cls, payload: bytes) -> Ending:
        """Raises DirectBroken."""
        try:
            code, size = _ENDING.unpack_from(payload)
            at = _ENDING.size + size
            if at > len(payload):
                raise ValueError(f"{len(payload)} bytes")
            return cls(code, payload[_ENDING.size : at].decode(), payload[at:])
        except (struct.error, ValueError) as error:
            raise DirectBroken(f"not the end of a call: {error}") from error


def pack_frame(kind: FrameKind, call_id: int, payload: bytes = b"") -> bytes:
    """Header and payload."""
    return _HEADER.pack(len(payload), call_id, kind) + payload


def pack_hello(key: bytes) -> bytes:
    """The payload of HELLO; the server's has a key of zeros."""
    return _HELLO.pack(VERSION, key)


def unpack_hello(payload: bytes) -> bytes:
    """The key. Raises DirectBroken, also for another version."""
    try:
        version, key = _HELLO.unpack(payload)
    except struct.error as error:
        raise DirectBroken("not the beginning of a connection") from error
    if version != VERSION:
        raise DirectBroken(f"version {version} of the framing, here it is {VERSION}")
    return bytes(key)


def pack_credit(size_bytes: int) -> bytes:
    """The payload of CREDIT."""
    return _CREDIT.pack(size_bytes)


def unpack_credit(payload: bytes) -> int:
    """Bytes. Raises DirectBroken."""
    try:
        return int(_CREDIT.unpack(payload)[0])
    except struct.error as error:
        raise DirectBroken("not a credit") from error


class FrameReader:
    """Frames out of the bytes of a connection. Holds at most one frame that is not whole yet.

    Until `open_up` only a HELLO is small enough: a stranger makes nobody keep 16 MiB.
    """

    def __init__(self) -> None:
        self._max_bytes = _HELLO.size
        self._rest = bytearray()
        self._wanted = HEADER_BYTES

    def open_up(self) -> None:
        """The peer is known: frames of all sizes may come."""
        self._max_bytes = _MAX_PAYLOAD_BYTES

    def feed(self, data: bytes) -> Iterator[tuple[int, int, bytes]]:
        """Kind, call and payload of all frames that `data` completes. Raises DirectBroken for a size over the limit."""
        rest = self._rest
        if rest:
            rest += data
            if len(rest) < self._wanted:
                return
            data = bytes(rest)
            rest.clear()
        at, end = 0, len(data)
        while end - at >= HEADER_BYTES:
            size, call_id, kind = _HEADER.unpack_from(data, at)
            if size > self._max_bytes:
                raise DirectBroken(f"a frame of {size} bytes")
            stop = at + HEADER_BYTES + size
            if stop > end:
                self._wanted = stop - at
                break
            yield kind, call_id, data[at + HEADER_BYTES : stop]
            at = stop
        else:
            self._wanted = HEADER_BYTES
        if at < end:
            rest += data[at:]
