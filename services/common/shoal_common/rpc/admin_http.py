"""The admin port: /metrics, /healthz, /readyz. On threads of its own, so that a busy event loop still answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn
from typing import Any

from shoal_common.rpc.readiness import Readiness
from shoal_common.rpc.server import AddressInUse

_MAX_THREADS = 16
_SOCKET_TIMEOUT_S = 5.0


class _Server(ThreadingMixIn, HTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], handler: Callable[..., BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self._slots = threading.BoundedSemaphore(_MAX_THREADS)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve on a thread if one of them is free, else hang up: scrapers try again, we never pile up."""
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """One connection, then the slot is free again."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()


class AdminServer:
    """HTTP/1.1, GET only. `/healthz` 200 while the process runs; `/readyz` 200 if ready, else 503 with what misses."""

    def __init__(self, *, listen_address: str, readiness: Readiness, render_metrics: Callable[[], bytes]) -> None:
        host, _, port = listen_address.rpartition(":")
        pages: dict[str, Callable[[], tuple[int, str, bytes]]] = {
            "/metrics": lambda: (200, "text/plain; version=0.0.4; charset=utf-8", render_metrics()),
            "/healthz": lambda: (200, "application/json", b'{"status": "ok"}\n'),
            "/readyz": lambda: _ready_page(readiness),
        }
        try:
            self._server = _Server((host, int(port)), _handler(pages))
        except OSError as error:
            raise AddressInUse(f"cannot listen on {listen_address}; is another process there?") from error
        self.address = f"{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="admin-http", daemon=True)

    def start(self) -> None:
        """Answer from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Stop answering and free the port."""
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()


def _ready_page(readiness: Readiness) -> tuple[int, str, bytes]:
    missing = readiness.missing
    body = {"ready": not missing, "missing": list(missing)}
    return (503 if missing else 200), "application/json", json.dumps(body).encode() + b"\n"


def _handler(pages: dict[str, Callable[[], tuple[int, str, bytes]]]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = _SOCKET_TIMEOUT_S

        def do_GET(self) -> None:
            page = pages.get(self.path.split("?")[0])
            status, kind, body = page() if page else (404, "text/plain", b"not found\n")
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Scrapes are not worth a line each."""

    return Handler
