"""Runs one prefill worker."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

from shoal_common import process as processes
from shoal_common import settings
from shoal_common.bus import Bus
from shoal_common.detached import run_detached
from shoal_common.errors import FailedPrecondition
from shoal_common.kv_cache_client import CacheNodes, CacheWriter, PrefixCache
from shoal_common.kv_transport import (
    ExportTable,
    KvPuller,
    SharedArena,
    StreamServer,
    host_id,
    host_of,
    open_engines,
)
from shoal_common.process import Process
from shoal_common.rpc import AddressInUse, Channels, refused
from shoal_common.settings import Loaded as LoadedSettings
from shoal_common.watcher import Watcher

from shoal_prefill_worker.call import Tools
from shoal_prefill_worker.config import PrefillWorkerConfig
from shoal_prefill_worker.core import Jobs
from shoal_prefill_worker.model import Loaded, check, load
from shoal_prefill_worker.outbox import Outbox
from shoal_prefill_worker.servicer import PrefillServicer
from shoal_prefill_worker.worker import ROLE, PrefillWorker

logger = logging.getLogger(__name__)


async def serve(process: Process, settings_in_force: LoadedSettings[PrefillWorkerConfig]) -> None:
    """Serve until SIGTERM."""
    config, shared, metrics = settings_in_force.service, settings_in_force.shared, process.metrics
    host = host_of(config.advertised_address or config.listen_address)
    engines = open_engines(shared.transfer_engine_names, host=host)
    bus, channels = Bus(shared.nats_url, name=process.instance_id), Channels()
    puller = KvPuller(engines=engines)
    watcher = Watcher(bus, mesh=shared.mesh)
    nodes = CacheNodes(address=config.kv_cache_address, watcher=watcher)
    arena = _arena(config)
    exports = ExportTable(
        arena, stream_address=lambda: config.stream_advertised_address or stream.address, engines=engines
    )
    stream = StreamServer(exports, listen_address=config.stream_listen_address)
    writer = CacheWriter(
        channels=channels,
        nodes=nodes,
        metrics=metrics,
        owner_id=process.instance_id,
        max_queued_bytes=config.write_queue_bytes,
        put_timeout_s=config.put_timeout_s,
    )
    cache = PrefixCache(
        channels=channels,
        puller=puller,
        nodes=nodes,
        metrics=metrics,
        owner_id=process.instance_id,
        acquire_timeout_s=config.acquire_timeout_s,
        pull_timeout_s=config.pull_timeout_s,
        lease_s=config.lease_s,
    )
    outbox, jobs = Outbox(), Jobs(config.max_jobs)
    servicer = PrefillServicer(jobs, start_timeout_s=config.start_timeout_s)
    model: list[Loaded] = []
    worker = PrefillWorker(
        process=process,
        shared=shared,
        bus=bus,
        config=config,
        jobs=jobs,
        servicer=servicer,
        exports=exports,
        loaded=lambda: model[0] if model else None,
        labels={"host_id": host_id()},
    )

    async def prepare() -> None:
        loaded = await run_detached(lambda: load(config, outbox), name="model-loader")
        model.append(loaded)
        servicer.ready(
            Tools(
                facts=loaded.facts,
                model=loaded.model,
                engine=loaded.engine,
                outbox=outbox,
                cache=cache,
                writer=writer,
                exports=exports,
                slots=asyncio.Semaphore(config.slot_count),
                pulled_timeout_s=config.pulled_timeout_s,
            )
        )

    await watcher.start()
    if config.stream_listen_address != "off":
        try:
            stream.start()
        except AddressInUse as error:
            raise refused(ROLE, error) from error
    writing = asyncio.create_task(writer.run())
    try:
        await worker.serve(prepare)
    finally:
        if model:
            await asyncio.to_thread(model[0].engine.close)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        await watcher.stop()
        writer.close()
        await cache.close()
        puller.close()
        await channels.close()
        stream.close()
        if arena is not None:
            arena.close()


def _arena(config: PrefillWorkerConfig) -> SharedArena | None:
    if not config.arena_bytes:
        return None
    try:
        return SharedArena(config.arena_bytes)
    except FailedPrecondition as error:
        logger.warning("no shared memory, rows travel by gRPC", extra={"error": error.message})
        return None


def main() -> None:
    """Console script."""
    loaded = settings.load_or_exit(PrefillWorkerConfig, service=ROLE, environ=os.environ, argv=sys.argv[1:])
    try:
        check(loaded.service)
    except ValueError as error:
        raise refused(ROLE, error) from error
    process = processes.begin(ROLE, loaded)
    processes.run(process, serve(process, loaded))


if __name__ == "__main__":
    main()
