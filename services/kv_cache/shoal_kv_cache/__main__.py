"""Runs one KV cache node."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from pathlib import Path

from shoal.common.v1 import kv_transport_service_pb2_grpc as transport_pb_grpc
from shoal.kv_cache.v1 import kv_cache_service_pb2 as pb
from shoal.kv_cache.v1 import kv_cache_service_pb2_grpc as pb_grpc
from shoal_common.admin import Work
from shoal_common.bus import Bus
from shoal_common.errors import MeshError, Unavailable
from shoal_common.instance import Addresses, Instance
from shoal_common.kv_transport import KvTransportServicer, StreamCall, StreamServer, host_id, host_of, open_engines
from shoal_common.load import LoadReport
from shoal_common.presence import Presence
from shoal_common.presence_bucket import PresenceBucket
from shoal_common.process import Process, begin, run
from shoal_common.rpc import AddressInUse, Readiness, Service, refused
from shoal_common.settings import SharedSettings, load_or_exit
from shoal_common.watcher import Watcher

from shoal_kv_cache.cluster.members import NODE_LABEL, ROLE, Peer, peer_of
from shoal_kv_cache.config import KvCacheConfig
from shoal_kv_cache.node import Node
from shoal_kv_cache.node_id import stable_node_id
from shoal_kv_cache.node_metrics import observe_node
from shoal_kv_cache.servicer import KvCacheServicer
from shoal_kv_cache.tiers.remote import RemoteStore, open_remote
from shoal_kv_cache.tiers.ssd import Fsync, SsdTier

SERVICE = ROLE

_CONNECT_LOOK_S = 60.0

logger = logging.getLogger(__name__)


async def main(process: Process, config: KvCacheConfig, shared: SharedSettings) -> None:
    """Serve until told to stop."""
    bus = Bus(shared.nats_url, name=process.instance_id)
    stream: StreamServer | None = None
    try:
        ssd = _open_ssd(config)
        node_id = stable_node_id(
            configured=config.node_id,
            ssd_directory=Path(config.ssd_directory) if ssd is not None else None,
            instance_id=process.instance_id,
        )
        node = Node(
            config,
            bus,
            mesh=shared.mesh,
            instance_id=process.instance_id,
            node_id=node_id,
            ssd=ssd,
            remote=_open_remote(config),
            engines=open_engines(
                shared.transfer_engine_names, host=host_of(config.advertised_address or config.listen_address)
            ),
            stream_address=lambda: config.stream_advertised_address or (stream.address if stream is not None else ""),
            call_socket=lambda: stream.call_socket if stream is not None else "",
        )
        recovered = await node.recover()
    except (MeshError, ValueError) as error:
        raise refused(SERVICE, error) from error
    logger.info("node", extra={"node_id": node_id, "recovered": recovered})
    servicer = KvCacheServicer(node, config, instance_id=process.instance_id)
    if config.stream_listen_address != "off":
        stream = StreamServer(
            node.exports,
            listen_address=config.stream_listen_address,
            calls={
                "Acquire": StreamCall(pb.AcquireRequest, servicer.acquire, servicer.acquire_at_once),
                "Release": StreamCall(pb.ReleaseRequest, servicer.release),
            },
        )
        try:
            stream.start()
        except AddressInUse as error:
            raise refused(SERVICE, error) from error

    watcher = Watcher(bus, mesh=shared.mesh, on_up=node.up, on_down=node.down)

    async def prepare() -> None:
        # Without NATS it is not ready: it may be away, with flushes that it does not know of.
        while not await bus.wait_connected(_CONNECT_LOOK_S):
            pass
        await node.flushes.catch_up(lambda: _live_peers(bus, shared.mesh, process.instance_id))

    instance = Instance(
        process=process,
        shared=shared,
        bus=bus,
        role=SERVICE,
        addresses=Addresses(
            listen=config.listen_address, admin=config.admin_address, advertise=config.advertised_address
        ),
        work=Work(running_count=lambda: len(node.store.index.leases), numbers=node.stats.numbers),
        describe=lambda instance_id, address: Presence(
            instance_id=instance_id,
            role=SERVICE,
            address=address,
            capacity={"bytes": config.ram_bytes, "ssd_bytes": config.ssd_bytes if ssd is not None else 0},
            labels={"host_id": host_id(), NODE_LABEL: node_id},
        ),
        sample_load=lambda: LoadReport(running=len(node.store.index.leases)),
        readiness=Readiness("nats", "engine"),
        is_healthy=lambda: node.is_healthy,
    )
    observe_node(process.metrics, node)
    node.start()
    await watcher.start()
    try:
        await instance.serve(
            [
                Service("shoal.kv_cache.v1.KvCacheService", pb_grpc.add_KvCacheServiceServicer_to_server, servicer),
                Service(
                    "shoal.common.v1.KvTransportService",
                    transport_pb_grpc.add_KvTransportServiceServicer_to_server,
                    KvTransportServicer(node.exports),
                ),
            ],
            drain_grace_s=config.drain_grace_s,
            prepare=prepare,
            drain=node.write_out,
        )
    finally:
        await watcher.stop()
        if stream is not None:
            await asyncio.to_thread(stream.close)
        await node.stop()


async def _live_peers(bus: Bus, mesh: str, instance_id: str) -> list[Peer]:
    """Other nodes than this instance, as far as the bus tells. Who it does not tell of now is asked when heard of."""
    if bus.is_off:
        return []
    try:
        entries = await PresenceBucket(bus, mesh).read_all()
    except Unavailable as error:
        logger.info("no snapshot of the fleet", extra={"error": error.message})
        return []
    peers = []
    for raw in entries.values():
        with contextlib.suppress(ValueError):
            presence = Presence.from_json(raw)
            if presence.role == ROLE and presence.instance_id != instance_id:
                peers.append(peer_of(presence))
    return peers


def _open_ssd(config: KvCacheConfig) -> SsdTier | None:
    if not config.ssd_directory:
        return None
    return SsdTier(
        Path(config.ssd_directory),
        capacity_bytes=config.ssd_bytes,
        segment_file_bytes=config.ssd_segment_file_bytes,
        fsync=Fsync(config.ssd_fsync),
        read_threads=config.ssd_threads,
    )


def _open_remote(config: KvCacheConfig) -> RemoteStore | None:
    return open_remote(config.remote_url) if config.remote_url else None


if __name__ == "__main__":
    loaded = load_or_exit(KvCacheConfig, service=SERVICE, environ=os.environ, argv=sys.argv[1:])
    this = begin(SERVICE, loaded)
    run(this, main(this, loaded.service, loaded.shared))
