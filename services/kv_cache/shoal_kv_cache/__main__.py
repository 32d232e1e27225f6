"""Runs one KV cache node."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import sys
import time

from shoal.common.v1 import kv_transport_service_pb2_grpc as transport_pb_grpc
from shoal.kv_cache.v1 import kv_cache_service_pb2_grpc as pb_grpc
from shoal_common.admin import Work
from shoal_common.bus import Bus
from shoal_common.errors import FailedPrecondition
from shoal_common.instance import Addresses, Instance
from shoal_common.kv_transport import ExportTable, KvTransportServicer, SharedArena, host_id
from shoal_common.load import LoadReport
from shoal_common.presence import Presence
from shoal_common.process import Process, begin, run
from shoal_common.rpc import Readiness, Service
from shoal_common.settings import SharedSettings, load_or_exit
from shoal_common.watcher import Watcher

from shoal_kv_cache.config import KvCacheConfig
from shoal_kv_cache.core.index import Index
from shoal_kv_cache.core.leases import Leases
from shoal_kv_cache.events import EventStream
from shoal_kv_cache.servicer import KvCacheServicer
from shoal_kv_cache.store import Counts, Store
from shoal_kv_cache.tiers.ram import RamTier

SERVICE = "kv_cache"
_ARENA_OVERHEAD_BYTES = 1 << 20
_EXPIRY_PERIOD_S = 1.0
_MEANINGS = {
    "used_bytes": "Payload bytes held",
    "entries": "Blocks and snapshots held",
    "leases": "Open leases",
    "acquire_count": "Acquires since the start",
    "hit_count": "Acquires that found a usable prefix",
    "queried_tokens": "Tokens asked for, in full blocks",
    "hit_tokens": "Tokens found usable",
    "evicted_count": "Payloads evicted",
    "corrupt_count": "Payloads dropped as damaged",
}

logger = logging.getLogger(__name__)


async def main(process: Process, config: KvCacheConfig, shared: SharedSettings) -> None:
    """Serve until told to stop."""
    bus = Bus(shared.nats_url, name=process.instance_id)
    arena = _arena(config)
    exports = ExportTable(arena, max_exports=config.max_leases)
    events = EventStream(bus, mesh=shared.mesh, instance_id=process.instance_id)
    store = Store(Index(Leases(max_leases=config.max_leases)), RamTier(config.ram_bytes, arena), exports, events)
    watcher = Watcher(bus, mesh=shared.mesh, on_down=store.release_owner)
    instance = Instance(
        process=process,
        shared=shared,
        bus=bus,
        role=SERVICE,
        addresses=Addresses(
            listen=config.listen_address, admin=config.admin_address, advertise=config.advertised_address
        ),
        work=Work(running_count=lambda: len(store.index.leases), numbers=lambda: _numbers(store)),
        describe=lambda instance_id, address: Presence(
            instance_id=instance_id,
            role=SERVICE,
            address=address,
            capacity={"bytes": config.ram_bytes},
            labels={"host_id": host_id()},
        ),
        sample_load=lambda: LoadReport(running=len(store.index.leases)),
        readiness=Readiness("nats"),
    )
    for name, meaning in _MEANINGS.items():
        process.metrics.observe(f"kv_cache_{name}", meaning, functools.partial(_number, store, name))
    background = [asyncio.create_task(events.run()), asyncio.create_task(_expire_for_ever(store))]
    await watcher.start()
    try:
        await instance.serve(
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
            ],
            drain_grace_s=config.drain_grace_s,
        )
    finally:
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await watcher.stop()
        if arena is not None:
            arena.close()


def _numbers(store: Store) -> dict[str, float]:
    return {
        "used_bytes": store.tier.used_bytes,
        "entries": len(store.index),
        "leases": len(store.index.leases),
        **{name: getattr(store.counts, name) for name in Counts.__dataclass_fields__},
    }


def _arena(config: KvCacheConfig) -> SharedArena | None:
    try:
        return SharedArena(config.ram_bytes + _ARENA_OVERHEAD_BYTES)
    except FailedPrecondition as error:
        logger.warning("no shared memory, blocks travel by gRPC", extra={"error": error.message})
        return None


def _number(store: Store, name: str) -> float:
    return _numbers(store)[name]


async def _expire_for_ever(store: Store) -> None:
    while True:
        await asyncio.sleep(_EXPIRY_PERIOD_S)
        store.expire(time.monotonic())


if __name__ == "__main__":
    loaded = load_or_exit(KvCacheConfig, service=SERVICE, environ=os.environ, argv=sys.argv[1:])
    this = begin(SERVICE, loaded)
    run(this, main(this, loaded.service, loaded.shared))
