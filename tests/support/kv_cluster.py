"""KV cache nodes as processes that find each other over NATS, each with a disk of its own."""

from __future__ import annotations

import contextlib
import secrets
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from support.kv_client import KvClient, TestChain
from support.mesh import wait_for
from support.nats_server import NatsServer
from support.service_process import ServiceProcess, service_process

MESH = "kv-e2e"


@dataclass
class Cluster:
    """Running nodes by name."""

    nats: NatsServer
    folder: Path
    stack: contextlib.ExitStack
    nodes: dict[str, ServiceProcess] = field(default_factory=dict)

    def start(self, name: str, **settings: str) -> None:
        disk = self.folder / f"disk-{name}"
        environment = {
            "SHOAL_MESH": MESH,
            "SHOAL_NATS_URL": self.nats.url,
            "SHOAL_KV_CACHE_RAM_BYTES": str(4 << 20),
            "SHOAL_KV_CACHE_MAX_ENTRIES": "10000",
            "SHOAL_KV_CACHE_SSD_DIRECTORY": str(disk),
            "SHOAL_KV_CACHE_SSD_BYTES": str(64 << 20),
            "SHOAL_KV_CACHE_SSD_SEGMENT_FILE_BYTES": str(1 << 20),
            **({"SHOAL_KV_CACHE_NODE_ID": name} if not (disk / "node_id").exists() else {}),
            **{f"SHOAL_KV_CACHE_{key.upper()}": value for key, value in settings.items()},
        }
        log = self.folder / f"{name}-{len(list(self.folder.glob(f'{name}-*')))}.log"
        self.nodes[name] = self.stack.enter_context(
            service_process("shoal_kv_cache", log=log, environment=environment, timeout_s=120)
        )

    def kill(self, name: str) -> None:
        popen = self.nodes.pop(name).popen
        popen.kill()
        popen.wait()

    def wait_for_peers(self, timeout_s: float = 60.0) -> None:
        """Until every node knows exactly the others."""

        def known() -> dict[str, float]:
            return {name: metric(node, "shoal_kv_cache_peers") for name, node in self.nodes.items()}

        wanted = {name: len(self.nodes) - 1.0 for name in self.nodes}
        wait_for(lambda: known() == wanted, what=lambda: f"peers {wanted}, not {known()}", timeout_s=timeout_s)

    def wait_until_written(self) -> None:
        """Until nothing waits for slower tiers."""
        for node in self.nodes.values():
            wait_for(lambda node=node: metric(node, "shoal_kv_cache_queued_bytes") == 0, what=lambda: "queues")  # type: ignore[misc]


def metric(node: ServiceProcess, name: str) -> float:
    with urllib.request.urlopen(f"http://{node.admin}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


@contextlib.contextmanager
def kv_cluster(folder: Path, names: Sequence[str], **settings: str) -> Iterator[Cluster]:
    """Nodes of these names that know each other, up inside the block."""
    nats = NatsServer(folder / "nats")
    nats.start()
    with contextlib.ExitStack() as stack:
        stack.callback(nats.stop)
        started = Cluster(nats, folder, stack)
        with ThreadPoolExecutor() as pool:
            # Side by side: imports are most of a start.
            list(pool.map(lambda name: started.start(name, **settings), names))
        started.wait_for_peers()
        yield started


@contextlib.asynccontextmanager
async def client(node: ServiceProcess) -> AsyncIterator[KvClient]:
    connected = KvClient(node.address)
    try:
        yield connected
    finally:
        await connected.close()


async def read_back(one: KvClient, chain: TestChain, *, timeout_s: float = 10.0) -> int:
    """Tokens of a chain that are found usable, each of their payloads compared."""
    lease_id = secrets.token_hex(8)
    try:
        answer = await one.acquire(chain, lease_id=lease_id, timeout_s=timeout_s)
        found = await one.read(answer)
    finally:
        await one.release(lease_id)
    tokens = max(answer.hit_tokens, answer.replay_tokens)
    wanted = chain.blocks(tokens // 128)
    if answer.hit_tokens:
        wanted.append(chain.snapshot(answer.hit_tokens // 128 - 1))
    assert found == wanted
    return tokens
