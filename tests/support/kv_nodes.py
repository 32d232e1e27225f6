"""KV cache nodes served by gRPC in the test's own process, so that a test can reach into them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.common.v1 import kv_transport_service_pb2_grpc as transport_rpc
from shoal.kv_cache.v1 import kv_cache_service_pb2_grpc as rpc
from shoal_common.bus import Bus
from shoal_common.kv_transport import KvTransportServicer
from shoal_common.presence import Presence
from shoal_common.rpc import Readiness, RpcServer, Service
from shoal_common.telemetry import Metrics
from shoal_kv_cache.cluster.members import NODE_LABEL, ROLE, peer_of
from shoal_kv_cache.config import KvCacheConfig
from shoal_kv_cache.node import Node
from shoal_kv_cache.servicer import KvCacheServicer
from shoal_kv_cache.tiers.remote import RemoteStore
from shoal_kv_cache.tiers.ssd import Fsync, SsdTier
from support.kv_client import KvClient


@dataclass
class ServedNode:
    """A node, and a client of it."""

    node: Node
    client: KvClient
    address: str
    server: RpcServer

    @property
    def presence(self) -> Presence:
        """What it would announce."""
        node_id = self.node.node_id
        return Presence(instance_id=node_id, role=ROLE, address=self.address, labels={NODE_LABEL: node_id})

    async def kill(self) -> None:
        """Its server is gone at once."""
        await self.server.stop(0)


def open_disk(folder: Path, **more: Any) -> SsdTier:
    """A small disk tier."""
    defaults: dict[str, Any] = {"capacity_bytes": 8 << 20, "segment_file_bytes": 1 << 20, "fsync": Fsync.NEVER}
    return SsdTier(folder, **(defaults | more))


@contextlib.asynccontextmanager
async def served_node(
    name: str = "node",
    *,
    ssd: SsdTier | None = None,
    remote: RemoteStore | None = None,
    bus: Bus | None = None,
    others: Sequence[ServedNode] = (),
    **settings: Any,
) -> AsyncIterator[ServedNode]:
    """A node of small tables, up inside the block. others: those that it sees when it starts."""
    config = KvCacheConfig(
        **{"ram_bytes": 1 << 20, "max_entries": 4096, "put_timeout_s": 10.0, "load_timeout_s": 5.0, **settings}
    )
    node = Node(config, bus or Bus.off(), mesh="local", instance_id=name, node_id=name, ssd=ssd, remote=remote)
    await node.recover()
    node.start()
    await node.flushes.catch_up([peer_of(one.presence) for one in others])
    server = RpcServer(
        [
            Service(
                "shoal.kv_cache.v1.KvCacheService",
                rpc.add_KvCacheServiceServicer_to_server,
                KvCacheServicer(node, config, instance_id=name),
            ),
            Service(
                "shoal.common.v1.KvTransportService",
                transport_rpc.add_KvTransportServiceServicer_to_server,
                KvTransportServicer(node.exports),
            ),
        ],
        listen_address="127.0.0.1:0",
        readiness=Readiness(),
        metrics=Metrics(),
    )
    address = await server.start()
    client = KvClient(address)
    try:
        yield ServedNode(node, client, address, server)
    finally:
        await client.close()
        await server.stop(0)
        await node.stop()


@contextlib.asynccontextmanager
async def served_cluster(names: Sequence[str], **settings: Any) -> AsyncIterator[list[ServedNode]]:
    """Nodes that know each other."""
    async with contextlib.AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(served_node(name, **settings)) for name in names]
        introduce(nodes)
        yield nodes


def introduce(nodes: Sequence[ServedNode]) -> None:
    """Each hears of all the others."""
    for one in nodes:
        for other in nodes:
            one.node.up(other.presence)
