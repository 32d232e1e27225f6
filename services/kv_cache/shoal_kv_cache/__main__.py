"""Runs one KV cache node."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Mapping

from shoal.common.v1 import kv_transport_service_pb2_grpc as transport_pb_grpc
from shoal.kv_cache.v1 import kv_cache_service_pb2_grpc as pb_grpc
from shoal_common.admin import Operator, Work, admin_service
from shoal_common.announcer import Announcer
from shoal_common.bus import Bus
from shoal_common.control import ControlServer
from shoal_common.errors import FailedPrecondition
from shoal_common.kv_transport import ExportTable, KvTransportServicer, SharedArena, host_id
from shoal_common.load import LoadReport
from shoal_common.presence import Presence
from shoal_common.process import Process, begin, run
from shoal_common.rpc.readiness import Readiness
from shoal_common.rpc.server import Service
from shoal_common.rpc.serving import serve
from shoal_common.settings import SharedSettings, load_or_exit
from shoal_common.watcher import Watcher

from shoal_kv_cache.config import KvCacheConfig
from shoal_kv_cache.core.index import Index
from shoal_kv_cache.core.leases import Leases
from shoal_kv_cache.events import EventStream
from shoal_kv_cache.servicer import KvCacheServicer
from shoal_kv_cache.store import Store
from shoal_kv_cache.tiers.ram import RamTier

SERVICE = "kv_cache"
_ARENA_OVERHEAD_BYTES = 1 << 20
_EXPIRY_PERIOD_S = 1.0

logger = logging.getLogger(__name__)


async def main(process: Process, config: KvCacheConfig, shared: SharedSettings) -> None:
    """Serve until told to stop."""
    bus = Bus(shared.nats_url, name=process.instance_id)
    arena = _arena(config)
    try:
        exports = ExportTable(arena, max_exports=config.max_leases)
        events = EventStream(bus, mesh=shared.mesh, instance_id=process.instance_id)
        store = Store(Index(Leases(max_leases=config.max_leases)), RamTier(config.ram_bytes, arena), exports, events)
        readiness = Readiness("bus")
        watcher = Watcher(bus, mesh=shared.mesh, on_down=store.release_owner)
        announcers: list[Announcer] = []

        async def announce(address: str) -> None:
            presence = Presence(
                instance_id=process.instance_id,
                role=SERVICE,
                address=config.advertised_address or address,
                capacity={"bytes": config.ram_bytes},
                labels={"host_id": host_id()},
            )
            if shared.nats_url != "off":
                announcers.append(
                    Announcer(
                        nats_url=shared.nats_url,
                        mesh=shared.mesh,
                        presence=presence,
                        sample_load=lambda: LoadReport(running=len(store.index.leases)),
                    )
                )
                announcers[0].start()

        def set_draining(is_draining: bool) -> None:
            for announcer in announcers:
                announcer.update(is_draining=is_draining)

        operator = Operator(
            instance_id=process.instance_id,
            role=SERVICE,
            readiness=readiness,
            work=Work(
                running_count=lambda: len(store.index.leases),
                set_draining=set_draining,
                numbers=lambda: _numbers(store),
            ),
        )

        async def drain() -> None:
            operator.stopping()

        async def became_ready() -> None:
            readiness.set("bus")

        control = ControlServer(bus, mesh=shared.mesh, instance_id=process.instance_id, commands=operator.commands())
        await control.start()
        bus.on_connect(became_ready)
        if bus.is_off:
            readiness.set("bus")
        await bus.start()
        await watcher.start()
        _register_metrics(process, store)
        background = [asyncio.create_task(events.run()), asyncio.create_task(_expire_for_ever(store))]
        try:
            await serve(
                [
                    Service(
                        "shoal.kv_cache.v1.KvCacheService",
                        pb_grpc.add_KvCacheServiceServicer_to_server,
                        KvCacheServicer(store, config, instance_id=process.instance_id),
                    ),
                    Service(
                        "shoal.common.v1.KvTransportService",
                        transport_pb_grpc.add_KvTransportServiceServicer_to_server,
                        KvTransportServicer(exports),
                    ),
                    admin_service(operator),
                ],
                service=SERVICE,
                listen_address=config.listen_address,
                admin_address=config.admin_address,
                readiness=readiness,
                metrics=process.metrics,
                drain_grace_s=config.drain_grace_s,
                on_listening=announce,
                drain=drain,
            )
        finally:
            for announcer in announcers:
                await asyncio.to_thread(announcer.stop)
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            await watcher.stop()
            await bus.close()
    finally:
        if arena is not None:
            arena.close()


def _arena(config: KvCacheConfig) -> SharedArena | None:
    try:
        return SharedArena(config.ram_bytes + _ARENA_OVERHEAD_BYTES)
    except FailedPrecondition as error:
        logger.warning("no shared memory, blocks travel by gRPC", extra={"error": error.message})
        return None


def _numbers(store: Store) -> Mapping[str, float]:
    return {
        "leases": len(store.index.leases),
        "entries": len(store.index),
        "used_bytes": store.tier.used_bytes,
        "capacity_bytes": store.tier.capacity_bytes,
    }


async def _expire_for_ever(store: Store) -> None:
    while True:
        await asyncio.sleep(_EXPIRY_PERIOD_S)
        store.expire(time.monotonic())


def _register_metrics(process: Process, store: Store) -> None:
    metrics = process.metrics
    metrics.gauge("kv_cache_used_bytes", "Payload bytes held").set_function(lambda: store.tier.used_bytes)
    metrics.gauge("kv_cache_entries", "Blocks and snapshots held").set_function(lambda: len(store.index))
    metrics.gauge("kv_cache_leases", "Open leases").set_function(lambda: len(store.index.leases))
    metrics.gauge("kv_cache_queried_tokens", "Tokens asked for since the start").set_function(
        lambda: store.counts.queried_tokens
    )
    metrics.gauge("kv_cache_hit_tokens", "Tokens found usable since the start").set_function(
        lambda: store.counts.hit_tokens
    )
    metrics.gauge("kv_cache_corrupt_entries", "Entries dropped as damaged").set_function(
        lambda: store.counts.corrupt_count
    )


if __name__ == "__main__":
    loaded = load_or_exit(KvCacheConfig, service=SERVICE, environ=os.environ, argv=sys.argv[1:])
    this = begin(SERVICE, loaded)
    run(this, main(this, loaded.service, loaded.shared))
