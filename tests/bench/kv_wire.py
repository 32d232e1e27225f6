"""Reading a cached prefix against redis: over shared memory and a unix socket, and both over TCP."""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import uvloop
from bench.harness import Bar, finish, percentile
from shoal.common.v1 import kv_transport_pb2 as transport_pb
from shoal_common.chains import HashChain
from shoal_common.kv_cache_client import CacheItem, CacheNodes, CacheWriter, PrefixCache
from shoal_common.kv_transport import KvPuller, PayloadSpec
from shoal_common.rpc import Channels
from shoal_common.telemetry import Metrics

BLOCK_BYTES = 113_920
PREFIXES = 4
"""Read in turn, so that neither side finds all of its bytes in the core's own cache."""
SIZES = {"4MiB": 36, "16MiB": 147}
SHM, TCP, GRPC = transport_pb.TRANSPORT_KIND_SHM, transport_pb.TRANSPORT_KIND_TCP, transport_pb.TRANSPORT_KIND_GRPC
WANTED = {("shm", "4MiB"): 2.5, ("shm", "16MiB"): 5.0, ("tcp", "4MiB"): 1.0, ("tcp", "16MiB"): 2.0}
Read = Callable[[int], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Chains of one length and the bytes of their blocks."""

    name: str
    chains: list[HashChain]
    blocks: list[list[bytes]]


def prefixes(name: str, block_count: int) -> Prefixes:
    """Random ones."""
    chains = [HashChain(os.urandom(32), list(range(block_count * 128))) for _ in range(PREFIXES)]
    blocks = [[os.urandom(BLOCK_BYTES) for _ in range(block_count)] for _ in range(PREFIXES)]
    return Prefixes(name, chains, blocks)


@contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A process that ends with the block."""
    started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield started
    finally:
        started.terminate()
        started.wait(10)


@contextmanager
def redis_server() -> Iterator[tuple[Any, Any]]:
    """redis-py clients of a server of ours: by its unix socket, by TCP."""
    import redis

    found = shutil.which("redis-server")
    if found is None:
        raise SystemExit("redis-server is not installed")
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/socket"
        command = (found, "--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no", "--dir", folder)
        port = _free_port()
        with process(*command, "--port", str(port), "--bind", "127.0.0.1"):
            deadline_s = time.monotonic() + 10
            while not Path(path).exists() and time.monotonic() < deadline_s:
                time.sleep(0.01)
            yield redis.Redis(unix_socket_path=path), redis.Redis(host="127.0.0.1", port=port)


def _free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _ready(lines: IO[str]) -> str:
    """The address that the node says, after whatever its libraries say."""
    for line in lines:
        if line.startswith("READY "):
            return line.split()[1]
    raise RuntimeError("the node did not start")


class Client:
    """The workers' client of a node, by one way."""

    def __init__(self, address: str, kinds: tuple[transport_pb.TransportKind.ValueType, ...]) -> None:
        self.channels, self.puller, metrics = Channels(), KvPuller(kinds), Metrics()
        nodes = CacheNodes(address=address, watcher=None)
        self.cache = PrefixCache(
            channels=self.channels,
            puller=self.puller,
            nodes=nodes,
            metrics=metrics,
            owner_id="bench",
            acquire_timeout_s=10,
            pull_timeout_s=10,
            lease_s=60,
        )
        self.writer = CacheWriter(
            channels=self.channels,
            nodes=nodes,
            metrics=metrics,
            owner_id="bench",
            max_queued_bytes=1 << 30,
            put_timeout_s=60,
        )

    async def write(self, some: Prefixes) -> None:
        """Store all of it."""
        running = asyncio.create_task(self.writer.run())
        for chain, blocks in zip(some.chains, some.blocks, strict=True):
            items = [_item(chain, index, data) for index, data in enumerate(blocks)]
            self.writer.offer(items, numerics_id="numerics", tenant_tag=b"t" * 32)
        await self.writer.flush()
        running.cancel()

    def reader(self, some: Prefixes) -> Read:
        """Gets the prefix of a turn; how many bytes came."""
        end_tokens = len(some.blocks[0]) * 128

        async def read(turn: int) -> int:
            async with self.cache.acquired(
                some.chains[turn % PREFIXES].hashes,
                kv_id="kv",
                numerics_id="numerics",
                tenant_tag=b"t" * 32,
                max_hit_tokens=end_tokens,
                want_replay=True,
            ) as prefix:
                found = await prefix.blocks(end_tokens)
                return sum(map(len, found or ()))

        return read

    async def close(self) -> None:
        """Let go of everything."""
        await self.cache.close()
        self.puller.close()
        await self.channels.close()


def _item(chain: HashChain, index: int, data: bytes) -> CacheItem:
    spec = PayloadSpec(
        kind=transport_pb.PAYLOAD_KIND_BLOCK,
        position_begin=index * 128,
        position_end=index * 128 + 128,
        shape=(len(data),),
        dtype="uint8",
        kv_id="kv",
        block_hash=chain.hashes[index],
    )
    return CacheItem(spec=spec, parent_hash=chain.parent_of(index), data=data)


def redis_reader(client: Any, some: Prefixes) -> Read:
    """One MGET of the blocks of a prefix, as a cache on redis would."""
    for chain, blocks in zip(some.chains, some.blocks, strict=True):
        client.mset(dict(zip(chain.hashes, blocks, strict=True)))

    async def read(turn: int) -> int:
        return sum(map(len, client.mget(some.chains[turn % PREFIXES].hashes)))

    return read


async def timed(readers: dict[str, Read], rounds: int, size_bytes: int) -> dict[str, list[float]]:
    """Seconds of every read, all ways in turn."""
    took: dict[str, list[float]] = {name: [] for name in readers}
    for turn in range(rounds + PREFIXES):
        for name, read in readers.items():
            began_s = time.perf_counter()
            got = await read(turn)
            took_s = time.perf_counter() - began_s
            if got != size_bytes:
                raise RuntimeError(f"{name}: {got} of {size_bytes} bytes came")
            if turn >= PREFIXES:
                took[name].append(took_s)
    return took


async def measure(rounds: int, node: tuple[str, ...]) -> int:
    """All ways and sizes, and report."""
    bars: list[Bar] = []
    figures: dict[str, object] = {"load_at_start": os.getloadavg()[0]}
    with process(sys.executable, "-P", "-m", *node) as serving, redis_server() as (unix, tcp):
        assert serving.stdout is not None
        address = _ready(serving.stdout)
        clients = {
            "shm": Client(address, (SHM, TCP, GRPC)),
            "tcp": Client(address, (TCP, GRPC)),
            "grpc": Client(address, (GRPC,)),
        }
        for size, block_count in SIZES.items():
            some = prefixes(size, block_count)
            await clients["shm"].write(some)
            readers = {name: client.reader(some) for name, client in clients.items()}
            readers |= {"redis_unix": redis_reader(unix, some), "redis_tcp": redis_reader(tcp, some)}
            took = await timed(readers, rounds, block_count * BLOCK_BYTES)
            for name, values in took.items():
                figures[f"{name}_{size}_p50_ms"] = round(percentile(values, 0.5) * 1e3, 3)
                figures[f"{name}_{size}_min_ms"] = round(min(values) * 1e3, 3)
            for way, base in (("shm", "redis_unix"), ("tcp", "redis_tcp")):
                ratio = percentile(took[base], 0.5) / percentile(took[way], 0.5)
                bars.append(
                    Bar(name=f"{way}_{size}", value=ratio, want=WANTED[way, size], sense="at least", unit=f"x {base}")
                )
        for client in clients.values():
            await client.close()
    figures["load_at_end"] = os.getloadavg()[0]
    for name, value in figures.items():
        print(f"{name:28} {value}")
    return finish(
        "kv_wire",
        workload={"rounds": rounds, "prefixes": PREFIXES, "block_bytes": BLOCK_BYTES, "blocks": SIZES, "node": node[0]},
        bars=bars,
        figures=figures,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    chosen = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(measure(chosen.rounds, ("support.kv_node", str(512 << 20)))))
