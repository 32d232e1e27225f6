"""Pulls by the byte stream, over connections that are used again."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from google.rpc import status_pb2

from shoal_common.errors import DataLoss, DeadlineExceeded, MeshError, Unavailable
from shoal_common.kv_transport.stream_frames import (
    DataHead,
    FrameKind,
    Pull,
    StreamBroken,
    TimedSocket,
    pack_frame,
)
from shoal_common.kv_transport.wanted import Wanted
from shoal_common.rpc.status import from_status

_IDLE_S = 60.0
_MAX_IDLE = 4
_CONNECT_S = 2.0


class StreamUnreachable(Unavailable):
    """Nobody takes connections there; another way may work."""

    reason = "STREAM_UNREACHABLE"


class StreamPull:
    """One pull, made by any thread; `cancel` ends it from another."""

    def __init__(self, address: str, export_id: str, wanted: Sequence[Wanted], memory: memoryview) -> None:
        """memory: the destination of `wanted`."""
        self.address, self.export_id, self.wanted, self.memory = address, export_id, wanted, memory
        self.connection: TimedSocket | None = None
        self._is_cancelled = False

    def cancel(self) -> None:
        """Cut it. Safe to repeat, and after the end."""
        self._is_cancelled = True
        if self.connection is not None:
            self.connection.cut()

    def run(self, connection: TimedSocket, deadline_s: float) -> None:
        """Ask for everything and take it in, checked. Leaves the connection at the end of the answer."""
        self.connection = connection
        if self._is_cancelled:
            raise StreamBroken("cancelled")
        ranges = tuple((one.first_payload_id, one.count) for one in self.wanted)
        connection.send(pack_frame(FrameKind.PULL, Pull(self.export_id, ranges).pack()), deadline_s)
        for one in self.wanted:
            index = 0
            while index < one.count:
                head = _data_head(connection, deadline_s)
                expected = (one.first_payload_id + index, one.size_bytes)
                if (head.first_payload_id, head.size_bytes) != expected or head.count > one.count - index:
                    raise DataLoss(f"{head} came for payload {expected[0]}", reason="SHORT_PAYLOAD", got=head)
                self._receive(connection, one, index, index + head.count, deadline_s)
                index += head.count

    def _receive(self, connection: TimedSocket, one: Wanted, first: int, end: int, deadline_s: float) -> None:
        if one.stride != one.size_bytes:
            for index in range(first, end):
                begin = one.begin + index * one.stride
                connection.receive_into(self.memory[begin : begin + one.size_bytes], deadline_s)
                one.verify(self.memory, index, index + 1)
            return
        checked = first

        def check(received_bytes: int) -> None:
            nonlocal checked
            whole = first + received_bytes // one.stride
            one.verify(self.memory, checked, whole)
            checked = whole

        span = self.memory[one.begin + first * one.stride : one.begin + end * one.stride]
        connection.receive_into(span, deadline_s, taken=check)


class StreamPool:
    """Connections by address. Safe from any thread."""

    def __init__(
        self, *, ssl_context: ssl.SSLContext | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ssl, self._clock = ssl_context, clock
        self._lock = threading.Lock()
        self._idle: dict[str, deque[tuple[float, TimedSocket]]] = {}
        self._is_closed = False

    def run(self, pull: StreamPull, *, timeout_s: float) -> None:
        """Make a pull. Raises StreamUnreachable, DeadlineExceeded, StreamBroken, DataLoss, or what the holder says."""
        deadline_s = self._clock() + timeout_s
        connection = self._idle_one(pull.address)
        if connection is not None:
            try:
                return self._use(connection, pull, deadline_s)
            except StreamBroken:
                # The holder may have let an idle connection go. A pull is a read: once more, on a new one.
                pass
        self._use(self._connected(pull.address, deadline_s), pull, deadline_s)

    def close(self) -> None:
        """Close what is idle. Safe to repeat."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, {}
        for connections in idle.values():
            for _, connection in connections:
                connection.close()

    def _use(self, connection: TimedSocket, pull: StreamPull, deadline_s: float) -> None:
        is_whole = False
        try:
            pull.run(connection, deadline_s)
            is_whole = True
        except TimeoutError as error:
            raise DeadlineExceeded(f"{pull.address} did not send in time") from error
        except OSError as error:
            raise StreamBroken(f"{pull.address}: {error}") from error
        except _Refused as refused:
            is_whole = True
            raise refused.error from None
        finally:
            pull.connection = None
            if is_whole:
                self._put_back(pull.address, connection)
            else:
                connection.close()

    def _idle_one(self, address: str) -> TimedSocket | None:
        oldest_s = self._clock() - _IDLE_S
        with self._lock:
            waiting = self._idle.get(address)
            while waiting:
                since_s, connection = waiting.pop()
                if since_s >= oldest_s:
                    return connection
                connection.close()
        return None

    def _put_back(self, address: str, connection: TimedSocket) -> None:
        with self._lock:
            waiting = self._idle.setdefault(address, deque())
            if self._is_closed:
                connection.close()
                return
            waiting.append((self._clock(), connection))
            if len(waiting) > _MAX_IDLE:
                waiting.popleft()[1].close()

    def _connected(self, address: str, deadline_s: float) -> TimedSocket:
        host, _, port = address.rpartition(":")
        left_s = min(deadline_s - self._clock(), _CONNECT_S)
        if left_s <= 0:
            raise DeadlineExceeded(f"no time left to connect to {address}")
        try:
            connected = socket.create_connection((host.strip("[]"), int(port)), timeout=left_s)
            try:
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._ssl is not None:
                    connected = self._ssl.wrap_socket(connected, server_hostname=host.strip("[]"))
            except BaseException:
                connected.close()
                raise
        except (OSError, ValueError) as error:
            raise StreamUnreachable(f"{address}: {error}", address=address) from error
        return TimedSocket(connected)


class _Refused(Exception):
    def __init__(self, error: MeshError) -> None:
        super().__init__(error.message)
        self.error = error


def _data_head(connection: TimedSocket, deadline_s: float) -> DataHead:
    kind, body = connection.receive_frame(deadline_s)
    if kind is FrameKind.ERROR:
        raise _Refused(from_status(status_pb2.Status.FromString(body)))
    if kind is not FrameKind.DATA:
        raise StreamBroken(f"{kind.name} came where data was due")
    return DataHead.unpack(body)
