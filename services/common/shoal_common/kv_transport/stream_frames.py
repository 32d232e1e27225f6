"""How the byte stream is framed, and sending and receiving it over blocking sockets.

A frame is a header (magic, version, kind, body size, XXH3-64 of the body) and its body. After a DATA frame come the
bytes of its payloads, without gaps; their checksums are those of the grant, which the puller has from a call before.
A connection serves one request at a time: PULL is answered by DATA frames in the order asked, CALL by ANSWER, either by
ERROR (a google.rpc.Status as on gRPC). All numbers are little-endian.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import xxhash

from shoal_common.errors import Unavailable
from shoal_common.kv_transport.buffers import Buffer

_HEADER = struct.Struct("<4sBBxxIQ")
_PULL = struct.Struct("<H")
_RANGE = struct.Struct("<II")
_DATA = struct.Struct("<IIQ")
_CALL = struct.Struct("<HHd")
_MAGIC, _VERSION = b"SHKV", 1
HEADER_BYTES = _HEADER.size
MAX_BODY_BYTES = 16 << 20
_MAX_VIEWS = 512
_PEEK_PAUSE_S = 0.001


class FrameKind(IntEnum):
    """What a body is."""

    PULL = 1
    DATA = 2
    ERROR = 3
    CALL = 4
    ANSWER = 5


_KINDS = {int(kind): kind for kind in FrameKind}


class StreamBroken(Unavailable):
    """What came is no frame of ours, or the connection ended inside one."""

    reason = "STREAM_BROKEN"


@dataclass(frozen=True, slots=True)
class Pull:
    """Ranges (first payload_id, count) of an export."""

    export_id: str
    ranges: tuple[tuple[int, int], ...]

    def pack(self) -> bytes:
        """The body."""
        name = self.export_id.encode()
        return _PULL.pack(len(name)) + name + b"".join(_RANGE.pack(*one) for one in self.ranges)

    @classmethod
    def unpack(cls, body: bytes) -> Pull:
        """Raises StreamBroken."""
        try:
            (size,) = _PULL.unpack_from(body)
            name, rest = body[_PULL.size : _PULL.size + size], body[_PULL.size + size :]
            return cls(name.decode(), tuple((first, count) for first, count in _RANGE.iter_unpack(rest)))
        except (struct.error, UnicodeDecodeError) as error:
            raise StreamBroken(f"not a pull: {error}") from error


@dataclass(frozen=True, slots=True)
class DataHead:
    """Announces `count` payloads of `size_bytes` each, the first of them `first_payload_id`."""

    first_payload_id: int
    count: int
    size_bytes: int

    def pack(self) -> bytes:
        """The body."""
        return _DATA.pack(self.first_payload_id, self.count, self.size_bytes)

    @classmethod
    def unpack(cls, body: bytes) -> DataHead:
        """Raises StreamBroken."""
        if len(body) != _DATA.size:
            raise StreamBroken(f"{len(body)} bytes announce data, {_DATA.size} expected")
        return cls(*_DATA.unpack(body))


@dataclass(frozen=True, slots=True)
class Call:
    """A unary method by its short name, with the seconds it has and the metadata that gRPC would carry."""

    method: str
    timeout_s: float
    metadata: Mapping[str, str]
    request: bytes

    def pack(self) -> bytes:
        """The body."""
        method = self.method.encode()
        metadata = json.dumps(dict(self.metadata)).encode() if self.metadata else b""
        return b"".join((_CALL.pack(len(method), len(metadata), self.timeout_s), method, metadata, self.request))

    @classmethod
    def unpack(cls, body: bytes) -> Call:
        """Raises StreamBroken."""
        try:
            method_size, metadata_size, timeout_s = _CALL.unpack_from(body)
            begin = _CALL.size + method_size
            metadata = json.loads(body[begin : begin + metadata_size]) if metadata_size else {}
            return cls(body[_CALL.size : begin].decode(), timeout_s, metadata, body[begin + metadata_size :])
        except (struct.error, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise StreamBroken(f"not a call: {error}") from error


def pack_frame(kind: FrameKind, body: Buffer) -> bytes:
    """Header and body."""
    return _HEADER.pack(_MAGIC, _VERSION, kind, len(body), xxhash.xxh3_64_intdigest(body)) + body


def unpack_header(header: Buffer) -> tuple[FrameKind, int, int]:
    """Kind, body size, checksum of the body. Raises StreamBroken."""
    magic, version, kind, size, checksum = _HEADER.unpack(header)
    known = _KINDS.get(kind)
    if magic != _MAGIC or version != _VERSION or size > MAX_BODY_BYTES or known is None:
        raise StreamBroken(f"no frame of version {_VERSION}: {bytes(header)!r}")
    return known, size, checksum


def check_body(body: Buffer, checksum: int) -> None:
    """Raises StreamBroken for a damaged body."""
    if xxhash.xxh3_64_intdigest(body) != checksum:
        raise StreamBroken(f"a body of {len(body)} bytes is damaged", size_bytes=len(body))


class FrameBuffer:
    """Frames from a connection on which one is due at a time, as its bytes come."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, data: bytes | bytearray) -> tuple[FrameKind, bytes] | None:
        """The frame that `data` completes, if any. Raises StreamBroken for nonsense, or more than the frame."""
        received = self._received
        if received:
            received += data
            data = received
        if len(data) >= HEADER_BYTES:
            kind, size, checksum = unpack_header(data[:HEADER_BYTES])
            if len(data) >= HEADER_BYTES + size:
                body = bytes(data[HEADER_BYTES:])
                if len(body) != size:
                    raise StreamBroken(f"{len(body) - size} bytes came after a frame")
                check_body(body, checksum)
                received.clear()
                return kind, body
        if data is not received:
            received += data
        return None


class TimedSocket:
    """A connected socket, plain or TLS, whose every step ends by a deadline of the monotonic clock.

    Raises TimeoutError past it, OSError for a broken connection, StreamBroken for nonsense.
    """

    def __init__(self, inner: socket.socket, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._inner, self._clock = inner, clock
        self._has_gather = type(inner) is socket.socket

    def receive_some(self, view: memoryview, deadline_s: float) -> int:
        """What has come, as far as it fits into `view`; how many bytes, 0 at the end of the stream."""
        self._allow(deadline_s)
        return self._inner.recv_into(view)

    def receive_into(self, view: memoryview, deadline_s: float) -> None:
        """Fill `view`."""
        done = 0
        while done < view.nbytes:
            count = self.receive_some(view[done:], deadline_s)
            if not count:
                raise StreamBroken(f"the stream ended {view.nbytes - done} bytes early")
            done += count

    def peek_kind(self, deadline_s: float) -> FrameKind | None:
        """Kind of the frame that comes next, left where it is; None when the peer is done. Plain sockets only."""
        while True:
            self._allow(deadline_s)
            header = self._inner.recv(HEADER_BYTES, socket.MSG_PEEK)
            if not header:
                return None
            if len(header) == HEADER_BYTES:
                return unpack_header(header)[0]
            # The rest is on its way; a peer that stops here is cut at the deadline.
            time.sleep(_PEEK_PAUSE_S)

    def receive_request(self, idle_s: float, io_timeout_s: float) -> tuple[FrameKind, bytes] | None:
        """The next frame, waited for `idle_s`, then `io_timeout_s` to be complete; None when the peer is done."""
        header = bytearray(HEADER_BYTES)
        self._allow(self._clock() + idle_s)
        count = self._inner.recv_into(header)
        if not count:
            return None
        deadline_s = self._clock() + io_timeout_s
        self.receive_into(memoryview(header)[count:], deadline_s)
        return self._receive_body(header, deadline_s)

    def send(self, data: Buffer, deadline_s: float) -> None:
        """All of `data`."""
        self._allow(deadline_s)
        self._inner.sendall(data)

    def send_all(self, views: Sequence[Buffer], deadline_s: float) -> None:
        """All views, as they lie."""
        if not self._has_gather:
            for view in views:
                self.send(view, deadline_s)
            return
        waiting = [memoryview(view) for view in views if len(view)]
        at = 0
        while at < len(waiting):
            self._allow(deadline_s)
            sent = self._inner.sendmsg(waiting[at : at + _MAX_VIEWS])
            while sent:
                size = waiting[at].nbytes
                if sent < size:
                    waiting[at] = waiting[at][sent:]
                    break
                sent -= size
                at += 1

    def cut(self) -> None:
        """End the connection under whoever uses it. Safe to repeat, from any thread."""
        with contextlib.suppress(OSError):
            self._inner.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the socket back."""
        self._inner.close()

    def unblocked(self) -> socket.socket:
        """The socket itself, for an event loop; this one must not be used meanwhile."""
        self._inner.setblocking(False)
        return self._inner

    def _receive_body(self, header: bytearray, deadline_s: float) -> tuple[FrameKind, bytes]:
        kind, size, checksum = unpack_header(header)
        body = bytearray(size)
        self.receive_into(memoryview(body), deadline_s)
        check_body(body, checksum)
        return kind, bytes(body)

    def _allow(self, deadline_s: float) -> None:
        left_s = deadline_s - self._clock()
        if left_s <= 0:
            raise TimeoutError("the deadline has passed")
        self._inner.settimeout(left_s)
