"""The HTTP listener: bound before anything starts, so that an occupied port is one line."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
from collections.abc import Iterator

import uvicorn
from shoal_common.rhythm import until_next
from shoal_common.rpc import AddressInUse

from shoal_gateway.http.app import App
from shoal_gateway.http.protocol import BoundedProtocol

_BACKLOG = 1024
_KEEP_ALIVE_S = 75
_DATE_S = 1.0


class _Server(uvicorn.Server):
    """Signals belong to the process, not to one of its two servers; and an idle one sleeps."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._leaving = asyncio.Event()

    def leave(self) -> None:
        """End `serve`. Safe to repeat."""
        self.should_exit = True
        self._leaving.set()

    async def main_loop(self) -> None:
        """Until `leave`. Uvicorn's own asks ten times a second whether that was called; only the date needs renewal."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), until_next(_DATE_S))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them alone."""
        yield


class HttpServer:
    """Serves an App on one address. `bind`, `start`, `stop`, in this order."""

    def __init__(self, app: App, *, listen_address: str, head_timeout_s: float, stop_grace_s: float) -> None:
        self._listen_address = listen_address
        self._socket: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None
        config = uvicorn.Config(
            app,
            # One is made for each connection; the type is what uvicorn's own protocols are.
            http=functools.partial(BoundedProtocol, head_timeout_s=head_timeout_s),  # type: ignore[arg-type]
            loop="none",
            ws="none",
            lifespan="off",
            # A request that waited behind another one must not take that one's name over.
            reset_contextvars=True,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(stop_grace_s)),
        )
        # Every broken request of every scanner would be a line.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        self._server = _Server(config)

    def bind(self) -> str:
        """Take the address. Returns it with the real port. Raises AddressInUse."""
        host, _, port = self._listen_address.rpartition(":")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host.strip("[]"), int(port)))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise AddressInUse(f"cannot listen on {self._listen_address}; is another process there?") from error
        listener.setblocking(False)
        self._socket = listener
        return f"{host}:{listener.getsockname()[1]}"

    async def start(self) -> None:
        """Accept connections from now on; the kernel queued those that came since `bind`."""
        if self._socket is None:
            raise RuntimeError("bind comes first")
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))

    async def stop(self) -> None:
        """Accept no more, let open responses end within the grace, close. Safe to repeat."""
        self._server.leave()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()
