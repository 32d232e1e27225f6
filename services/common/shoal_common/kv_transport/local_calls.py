"""Calls from this host by a unix socket: half of the time that a loopback takes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import struct
from collections.abc import Callable, Mapping

from shoal_common.kv_transport.stream_calls import CallConnection, StreamCall

_PREFIX = "unix:"
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_BACKLOG = 128


class LocalCalls:
    """An abstract socket with a random name, served by one event loop. Processes of other users are cut at once.

    An arena in shared memory is open to the same processes: those of its owner.
    """

    def __init__(
        self,
        calls: Mapping[str, StreamCall],
        *,
        idle_s: float,
        began: Callable[[CallConnection], bool],
        ended: Callable[[CallConnection], None],
    ) -> None:
        """began: told of each connection; False cuts it. Otherwise as CallConnection and StreamServer."""
        self._calls, self._idle_s, self._began, self._ended = calls, idle_s, began, ended
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener: socket.socket | None = None
        self._serving: asyncio.Task[asyncio.Server] | None = None
        self.name = ""

    def start(self) -> None:
        """Listen and serve, on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        name = f"shoal-kv-calls-{secrets.token_hex(16)}"
        self._listener.bind(f"\0{name}")
        self._listener.listen(_BACKLOG)
        self._serving = self._loop.create_task(self._loop.create_unix_server(self._connection, sock=self._listener))
        self.name = name

    def close(self) -> None:
        """Take no more connections; those that there are stay. Safe to repeat, from any thread."""
        self.name = ""
        loop, self._loop = self._loop, None
        if loop is not None:
            # A loop that has ended serves nobody.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._close)

    def _close(self) -> None:
        if self._serving is not None:
            self._serving.add_done_callback(_close_server)
        self._serving = self._listener = None

    def _connection(self) -> CallConnection:
        return CallConnection(self._calls, idle_s=self._idle_s, ended=self._ended, admits=self._admits)

    def _admits(self, connection: CallConnection, transport: asyncio.BaseTransport) -> bool:
        credentials = transport.get_extra_info("socket").getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
        )
        _, uid, _ = _CREDENTIALS.unpack(credentials)
        return uid == os.geteuid() and self._began(connection)


def local_address(name: str) -> str:
    """How StreamCaller is told of a socket of LocalCalls."""
    return _PREFIX + name


def is_local(address: str) -> bool:
    """Whether it is a `local_address`, not host:port."""
    return address.startswith(_PREFIX)


def connected_to(address: str) -> socket.socket:
    """A connection to a `local_address`, for an event loop. Raises OSError; at once, also when too many wait there."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        made.connect(f"\0{address[len(_PREFIX) :]}")
    except BaseException:
        made.close()
        raise
    return made


def _close_server(serving: asyncio.Task[asyncio.Server]) -> None:
    if not serving.cancelled() and serving.exception() is None:
        serving.result().close()
