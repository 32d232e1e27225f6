"""Connections to streams that are used again, and pulls over them."""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shoal_common.errors import DeadlineExceeded, Unavailable
from shoal_common.kv_transport.stream_frames import StreamBroken, TimedSocket
from shoal_common.kv_transport.stream_pull import HolderRefused, Steps, StreamPull
from shoal_common.same_host import unpace

_IDLE_S = 60.0
_MAX_IDLE = 4
_CONNECT_S = 2.0
_SLICE_BYTES = 1 << 20
"""Received at once on an event loop, a third of a millisecond."""
_TURN_BYTES = 4 << 20
"""Received before others of the event loop have their turn, if it comes as fast as that."""
_WAIT_MS, _MAX_WAITS = 1, 16
"""For how long the event loop stands still for what comes next, and how often in one turn."""


class StreamUnreachable(Unavailable):
    """Nobody takes connections there; another way may work."""

    reason = "STREAM_UNREACHABLE"


class RunningPull:
    """A pull in a thread; `cancel` ends it from another."""

    def __init__(self, pull: StreamPull) -> None:
        self.pull = pull
        self.connection: TimedSocket | None = None
        self.is_cancelled = False

    def cancel(self) -> None:
        """Cut it. Safe to repeat, and after the end."""
        self.is_cancelled = True
        if self.connection is not None:
            self.connection.cut()


class StreamPool:
    """Connections by address. Safe from any thread.

    Pulls raise StreamUnreachable, DeadlineExceeded, StreamBroken, DataLoss, or what the holder says.
    """

    def __init__(
        self, *, ssl_context: ssl.SSLContext | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ssl, self._clock = ssl_context, clock
        self._lock = threading.Lock()
        self._idle: dict[str, deque[tuple[float, TimedSocket]]] = {}
        self._is_closed = False

    def run(self, running: RunningPull, *, timeout_s: float) -> None:
        """Make a pull in this thread."""
        deadline_s = self._clock() + timeout_s
        connection = self._idle_one(running.pull.address)
        if connection is not None:
            try:
                return self._use(connection, running, deadline_s)
            except StreamBroken:
                # The holder may have let an idle connection go. A pull is a read: once more, on a new one.
                pass
        self._use(self._connected(running.pull.address, deadline_s), running, deadline_s)

    async def run_on_loop(self, pull: StreamPull, *, timeout_s: float) -> bool:
        """Make a pull on the running event loop, without a thread. False when no connection is idle or it has ended."""
        connection = self._idle_one(pull.address) if self._ssl is None else None
        if connection is None:
            return False
        try:
            with self._kept(pull.address, connection):
                async with asyncio.timeout(timeout_s):
                    await _converse_on_loop(pull, connection.unblocked())
        except StreamBroken:
            return False
        return True

    def close(self) -> None:
        """Close what is idle. Safe to repeat."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, {}
        for connections in idle.values():
            for _, connection in connections:
                connection.close()

    def _use(self, connection: TimedSocket, running: RunningPull, deadline_s: float) -> None:
        running.connection = connection
        try:
            with self._kept(running.pull.address, connection):
                if running.is_cancelled:
                    raise StreamBroken("cancelled")
                _converse(running.pull, connection, deadline_s)
        finally:
            running.connection = None

    @contextmanager
    def _kept(self, address: str, connection: TimedSocket) -> Iterator[None]:
        """Puts the connection back if the pull left it at the end of an answer, else closes it."""
        is_whole = False
        try:
            yield
            is_whole = True
        except TimeoutError as error:
            raise DeadlineExceeded(f"{address} did not send in time") from error
        except OSError as error:
            raise StreamBroken(f"{address}: {error}") from error
        except HolderRefused as refused:
            is_whole = True
            raise refused.error from None
        finally:
            if is_whole:
                self._put_back(address, connection)
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
                unpace(connected)
                if self._ssl is not None:
                    connected = self._ssl.wrap_socket(connected, server_hostname=host.strip("[]"))
            except BaseException:
                connected.close()
                raise
        except (OSError, ValueError) as error:
            raise StreamUnreachable(f"{address}: {error}", address=address) from error
        return TimedSocket(connected)


def _converse(pull: StreamPull, connection: TimedSocket, deadline_s: float) -> None:
    steps = pull.steps()
    step = next(steps, None)
    while step is not None:
        if isinstance(step, bytes):
            connection.send(step, deadline_s)
            step = next(steps, None)
        else:
            step = _told(steps, connection.receive_some(step, deadline_s))


async def _converse_on_loop(pull: StreamPull, connected: socket.socket) -> None:
    arrivals = select.poll()
    arrivals.register(connected, select.POLLIN)
    steps = pull.steps()
    step = next(steps, None)
    turn_bytes = wait_count = 0
    while step is not None:
        if isinstance(step, bytes):
            await _send_all(connected, step)
            step = next(steps, None)
            continue
        try:
            count = connected.recv_into(step[:_SLICE_BYTES])
        except BlockingIOError:
            # More is on its way, mostly: it takes longer to hear of it from the event loop than it takes to come.
            wait_count += 1
            if wait_count > _MAX_WAITS or not arrivals.poll(_WAIT_MS):
                await _readable(connected)
                turn_bytes = wait_count = 0
            continue
        step = _told(steps, count)
        turn_bytes += count
        if turn_bytes >= _TURN_BYTES:
            await asyncio.sleep(0)
            turn_bytes = wait_count = 0


async def _send_all(connected: socket.socket, data: bytes) -> None:
    try:
        sent = connected.send(data)
    except BlockingIOError:
        sent = 0
    if sent < len(data):
        await asyncio.get_running_loop().sock_sendall(connected, data[sent:])


def _told(steps: Steps, count: int) -> bytes | memoryview | None:
    """The next step after so many bytes came; None at the end."""
    try:
        return steps.send(count)
    except StopIteration:
        return None


async def _readable(connected: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(connected, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(connected)
