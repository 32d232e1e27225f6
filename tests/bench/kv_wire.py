"""Reading a cached prefix from a node: shared memory against redis on a unix socket, TCP against redis and Mooncake.

Timed, from the call to the bytes being in this process, one read at a time, everything on one host:
ours      PrefixCache.acquired and Prefix.blocks: one call that finds and pins (it ends the lease before, too), the copy
          into aligned memory, and the check of every block's XXH3-64
redis     one MGET by redis-py into new bytes objects, unchecked
Mooncake  one batch_get_into: a question to its master, then its TCP transport from the process that holds the objects
          into registered memory, unchecked

Redis and Mooncake send with the host's congestion control (`congestion` in the figures), ours without pacing on one
host (`same_host.unpace`). With reno for all of them (in a network namespace of its own) the ratios were the same.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop
from bench.harness import Bar, finish, percentile
from bench.kv_wire_bases import MooncakeStore, Prefix, Read, congestion, load, redis_clients, redis_reader
from shoal.common.v1 import kv_transport_pb2 as transport_pb
from shoal_common.chains import HashChain
from shoal_common.kv_cache_client import CacheItem, CacheNodes, CacheWriter, PrefixCache
from shoal_common.kv_transport import KvPuller, PayloadSpec
from shoal_common.rpc import Channels
from shoal_common.telemetry import Metrics
from support.service_process import service_process

BLOCK_BYTES = 113_920
"""A block of V4.1."""
PREFIXES = 4
"""Read in turn."""
BATCH = 10
"""Reads of one way in a row, before the other's: each then runs as it does alone, under the same load."""
SIZES = {"4MiB": 36, "16MiB": 147}
SHM, TCP, GRPC = transport_pb.TRANSPORT_KIND_SHM, transport_pb.TRANSPORT_KIND_TCP, transport_pb.TRANSPORT_KIND_GRPC
BESIDE: tuple[tuple[str, ...], ...] = (("shm", "redis_unix"), ("tcp", "redis_tcp", "mooncake"), ("grpc",))
WANTED = {
    ("shm", "redis_unix", "4MiB"): 2.5,
    ("shm", "redis_unix", "16MiB"): 5.0,
    ("tcp", "redis_tcp", "4MiB"): 1.0,
    ("tcp", "redis_tcp", "16MiB"): 2.0,
    ("tcp", "mooncake", "4MiB"): 1.5,
    ("tcp", "mooncake", "16MiB"): 1.5,
}


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

    async def write(self, chains: Sequence[HashChain], blocks: Sequence[Sequence[bytes]]) -> None:
        """Store all of it."""
        running = asyncio.create_task(self.writer.run())
        for chain, data in zip(chains, blocks, strict=True):
            items = [_item(chain, index, one) for index, one in enumerate(data)]
            self.writer.offer(items, numerics_id="numerics", tenant_tag=b"t" * 32)
        await self.writer.flush()
        running.cancel()

    def reader(self, chains: Sequence[HashChain]) -> Read:
        """Gets the prefix of a turn, checked; how many bytes came."""
        end_tokens = len(chains[0].hashes) * 128

        async def read(turn: int) -> int:
            async with self.cache.acquired(
                chains[turn % len(chains)].hashes,
                kv_id="kv",
                numerics_id="numerics",
                tenant_tag=b"t" * 32,
                max_hit_tokens=end_tokens,
                want_replay=True,
            ) as prefix:
                return sum(map(len, await prefix.blocks(end_tokens) or ()))

        return read

    async def close(self) -> None:
        """Let go of everything."""
        self.writer.close()
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


async def timed(readers: dict[str, Read], rounds: int, size_bytes: int) -> dict[str, list[float]]:
    """Seconds of every read, batch by batch; the first batch of each way is its warm-up."""
    took: dict[str, list[float]] = {name: [] for name in readers}
    for batch in range(rounds // BATCH + 1):
        for name, read in readers.items():
            for turn in range(BATCH):
                began_s = time.perf_counter()
                got = await read(turn)
                took_s = time.perf_counter() - began_s
                if got != size_bytes:
                    raise RuntimeError(f"{name}: {got} of {size_bytes} bytes came")
                if batch:
                    took[name].append(took_s)
    return took


async def measure(rounds: int) -> int:
    """All ways and sizes, and report."""
    figures: dict[str, object] = {"load_at_start": load(), "congestion": congestion()}
    took: dict[tuple[str, str], list[float]] = {}
    store: MooncakeStore | None = None
    try:
        store = MooncakeStore(256 << 20, 32 << 20)
    except Exception as error:
        figures["mooncake_not_run"] = str(error)
    with (
        tempfile.TemporaryDirectory() as folder,
        service_process("shoal_kv_cache", log=Path(folder) / "log") as node,
        redis_clients() as (unix, tcp),
    ):
        ways = {"shm": (SHM, TCP, GRPC), "tcp": (TCP, GRPC), "grpc": (GRPC,)}
        clients = {name: Client(node.address, kinds) for name, kinds in ways.items()}
        for size, count in SIZES.items():
            chains = [HashChain(os.urandom(32), list(range(count * 128))) for _ in range(PREFIXES)]
            blocks = [[os.urandom(BLOCK_BYTES) for _ in range(count)] for _ in range(PREFIXES)]
            prefixes: list[Prefix] = [(chain.hashes, data) for chain, data in zip(chains, blocks, strict=True)]
            await clients["shm"].write(chains, blocks)
            readers = {name: client.reader(chains) for name, client in clients.items()}
            readers |= {"redis_unix": redis_reader(unix, prefixes), "redis_tcp": redis_reader(tcp, prefixes)}
            if store is not None:
                readers["mooncake"] = store.reader(prefixes)
            for pair in BESIDE:
                together = {name: readers[name] for name in pair if name in readers}
                for name, values in (await timed(together, rounds, count * BLOCK_BYTES)).items():
                    took[name, size] = values
        for client in clients.values():
            await client.close()
    if store is not None:
        store.close()
    figures["load_at_end"] = load()
    for (name, size), values in took.items():
        figures[f"{name}_{size}_p50_ms"] = round(percentile(values, 0.5) * 1e3, 3)
        figures[f"{name}_{size}_min_ms"] = round(min(values) * 1e3, 3)
    bars = [
        Bar(
            name=f"{way}_{size}",
            value=percentile(took[base, size], 0.5) / percentile(took[way, size], 0.5),
            want=want,
            sense="at least",
            unit=f"x {base}",
        )
        for (way, base, size), want in WANTED.items()
        if (base, size) in took
    ]
    for name, value in figures.items():
        print(f"{name:28} {value}")
    return finish(
        "kv_wire",
        workload={"reads": rounds, "prefixes": PREFIXES, "block_bytes": BLOCK_BYTES, "blocks": SIZES, "batch": BATCH},
        bars=bars,
        figures=figures,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    chosen = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(measure(chosen.rounds)))
