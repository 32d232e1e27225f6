"""Serves live exports, and calls that must be fast, as a byte stream."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from typing import Any

from shoal_common.errors import MeshError, NotFound
from shoal_common.kv_transport.exports import Export, ExportTable
from shoal_common.kv_transport.local_calls import LocalCalls
from shoal_common.kv_transport.stream_calls import CallConnection, StreamCall, answer_call_on, error_frame
from shoal_common.kv_transport.stream_frames import (
    DataHead,
    FrameKind,
    Pull,
    StreamBroken,
    TimedSocket,
    pack_frame,
)
from shoal_common.rpc.server import AddressInUse
from shoal_common.same_host import unpace

logger = logging.getLogger(__name__)

_PIECE_BYTES = 16 << 20
_SEND_BUFFER_BYTES = 4 << 20
_BACKLOG = 128
_JOIN_S = 2.0
_CALL_S = 120.0


class StreamServer:
    """Threads with blocking sockets, one per connection that pulls; connections that call are the event loop's.

    `max_connections` of both together at most; more are closed at once.

    A puller names an export by its unguessable id. Who does not read what was asked for is cut: 16 MiB have
    `io_timeout_s` plus the time that they take at `slowest_bytes_per_s`. What lies in the arena is sent without a copy.
    """

    def __init__(
        self,
        exports: ExportTable,
        *,
        listen_address: str,
        calls: Mapping[str, StreamCall] | None = None,
        ssl_context: ssl.SSLContext | None = None,
        max_connections: int = 256,
        io_timeout_s: float = 5.0,
        idle_s: float = 120.0,
        slowest_bytes_per_s: float = 10e6,
    ) -> None:
        """listen_address   host:port; port 0 picks one
        calls            by name, e.g. {"Acquire": StreamCall(pb.AcquireRequest, acquire)}
        ssl_context      of a server, with the mesh's CA and client certificates required; None: plain
        idle_s           a connection that asks for nothing so long is closed; pullers keep theirs for half of it
        """
        self._exports, self._calls, self._ssl = exports, dict(calls or {}), ssl_context
        self._listen_address, self._max_connections, self._io_timeout_s = listen_address, max_connections, io_timeout_s
        self._idle_s, self._slowest_bytes_per_s = idle_s, slowest_bytes_per_s
        self._listener: socket.socket | None = None
        self._address = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._accepting: threading.Thread | None = None
        self._lock = threading.Lock()
        self._live: dict[threading.Thread, TimedSocket] = {}
        self._callers: set[CallConnection] = set()
        self._adopting: set[asyncio.Task[Any]] = set()
        self._local = LocalCalls(self._calls, idle_s=idle_s, began=self._began, ended=self._callers.discard)
        self._is_closed = False
        self.refused_count = 0
        self.cut_count = 0
        self.sent_bytes = 0

    @property
    def address(self) -> str:
        """ ":port" once started (the host is the one that a puller called already); empty before and after."""
        return self._address

    @property
    def call_socket(self) -> str:
        """Name of the abstract unix socket that serves the calls to this host, once started; empty where TLS is due."""
        return self._local.name

    @property
    def connection_count(self) -> int:
        """Connections being served."""
        return len(self._live) + len(self._callers)

    def start(self) -> None:
        """Listen and serve. Called on the event loop that runs the handlers. Raises AddressInUse."""
        host, _, port = self._listen_address.rpartition(":")
        self._loop = asyncio.get_running_loop()
        try:
            self._listener = socket.create_server((host.strip("[]"), int(port)), backlog=_BACKLOG)
        except OSError as error:
            raise AddressInUse(f"{self._listen_address}: {error}") from error
        self._address = f":{self._listener.getsockname()[1]}"
        if self._calls and self._ssl is None:
            self._local.start()
        self._accepting = threading.Thread(target=self._accept, args=(self._listener,), name="kv-stream", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Stop listening, cut every connection and wait for its threads. Before the arena is closed."""
        self._is_closed = True
        listener, self._listener = self._listener, None
        self._address = ""
        if listener is None:
            return
        self._local.close()
        # A thread in accept() is not woken by close(), but by this.
        listener.shutdown(socket.SHUT_RDWR)
        if self._accepting is not None:
            self._accepting.join(_JOIN_S)
        listener.close()
        with self._lock:
            live = dict(self._live)
        for caller in list(self._callers):
            caller.close()
        for connection in live.values():
            connection.cut()
        for thread in live:
            thread.join(_JOIN_S)

    def _accept(self, listener: socket.socket) -> None:
        while not self._is_closed:
            try:
                accepted, _ = listener.accept()
            except OSError as error:
                if self._is_closed:
                    return
                # Out of descriptors, say: the rest of the service goes on, and so does this in a moment.
                logger.warning("no connection accepted", extra={"error": str(error)})
                time.sleep(0.1)
                continue
            self._admit(accepted)

    def _admit(self, accepted: socket.socket) -> None:
        thread = threading.Thread(target=self._serve, args=(accepted,), name="kv-stream-peer", daemon=True)
        with self._lock:
            has_room = self.connection_count < self._max_connections and not self._is_closed
            if has_room:
                self._live[thread] = TimedSocket(accepted)
        if has_room:
            thread.start()
        else:
            self.refused_count += 1
            accepted.close()

    def _serve(self, accepted: socket.socket) -> None:
        connection: TimedSocket | None = None
        try:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            unpace(accepted)
            # As large as the kernel lets it be: it then takes a whole prefix in few pieces, for a fifth less CPU time.
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            connection = TimedSocket(self._wrapped(accepted))
            with self._lock:
                self._live[threading.current_thread()] = connection
            if self._ssl is None and connection.peek_kind(time.monotonic() + self._io_timeout_s) is FrameKind.CALL:
                assert self._loop is not None
                with self._lock:
                    self._live.pop(threading.current_thread())
                self._loop.call_soon_threadsafe(self._adopt, connection.unblocked())
                connection = None
                return
            while not self._is_closed and self._answer(connection):
                pass
        except TimeoutError:
            self.cut_count += 1
        except (OSError, StreamBroken) as error:
            logger.debug("stream broken", extra={"error": str(error)})
        finally:
            if connection is not None:
                connection.close()
            with self._lock:
                self._live.pop(threading.current_thread(), None)

    def _began(self, connection: CallConnection) -> bool:
        if self.connection_count >= self._max_connections or self._is_closed:
            self.refused_count += 1
            return False
        self._callers.add(connection)
        return True

    def _adopt(self, accepted: socket.socket) -> None:
        """Serve a connection that calls, here on the event loop."""
        assert self._loop is not None
        connection = CallConnection(self._calls, idle_s=self._idle_s, ended=self._callers.discard)
        if self._is_closed:
            accepted.close()
            return
        self._callers.add(connection)
        adopting = self._loop.create_task(self._loop.connect_accepted_socket(lambda: connection, accepted))
        self._adopting.add(adopting)
        adopting.add_done_callback(self._adopting.discard)

    def _wrapped(self, accepted: socket.socket) -> socket.socket:
        if self._ssl is None:
            return accepted
        accepted.settimeout(self._io_timeout_s)
        return self._ssl.wrap_socket(accepted, server_side=True)

    def _answer(self, connection: TimedSocket) -> bool:
        """One request; False when the peer is done."""
        received = connection.receive_request(self._idle_s, self._io_timeout_s)
        if received is None:
            return False
        kind, body = received
        try:
            if kind is FrameKind.PULL:
                self._send(connection, Pull.unpack(body))
            elif kind is FrameKind.CALL:
                assert self._loop is not None
                answer = answer_call_on(self._loop, self._calls, body, timeout_s=_CALL_S)
                connection.send(answer, self._deadline_s(len(answer)))
            else:
                raise StreamBroken(f"{kind.name} is no request")
        except StreamBroken:
            raise
        except MeshError as error:
            connection.send(error_frame(error), self._deadline_s(0))
        return True

    def _send(self, connection: TimedSocket, pull: Pull) -> None:
        export = self._exports.get(pull.export_id)
        for first, count in pull.ranges:
            while count > 0:
                sent = self._send_piece(connection, export, first, count)
                first, count = first + sent, count - sent

    def _send_piece(self, connection: TimedSocket, export: Export, first: int, count: int) -> int:
        piece = export.piece(first, count, max_bytes=_PIECE_BYTES)
        if not export.is_open:
            raise NotFound(f"export {export.export_id}", reason="UNKNOWN_EXPORT", export_id=export.export_id)
        head = pack_frame(FrameKind.DATA, DataHead(piece.first_payload_id, piece.count, piece.size_bytes).pack())
        size_bytes = piece.count * piece.size_bytes
        connection.send_all([head, *piece.views], self._deadline_s(size_bytes))
        self.sent_bytes += size_bytes
        return piece.count

    def _deadline_s(self, size_bytes: int) -> float:
        return time.monotonic() + self._io_timeout_s + size_bytes / self._slowest_bytes_per_s
