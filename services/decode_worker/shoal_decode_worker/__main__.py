"""Runs one decode worker."""

from __future__ import annotations

import asyncio
import os
import sys

from shoal_common import process as processes
from shoal_common import settings
from shoal_common.bus import Bus
from shoal_common.detached import run_detached
from shoal_common.kv_cache_client import CacheNodes, CacheWriter, PrefixCache
from shoal_common.kv_transport import KvPuller, host_id, host_of, open_engines
from shoal_common.process import Process
from shoal_common.rpc import Channels, refused
from shoal_common.settings import Loaded
from shoal_common.watcher import Watcher

from shoal_decode_worker.config import DecodeWorkerConfig
from shoal_decode_worker.engine_adapter import EngineAdapter
from shoal_decode_worker.mesh_prompt import MeshPrompt
from shoal_decode_worker.model import check, load
from shoal_decode_worker.prefill_client import PrefillClient, PrefillTimeouts
from shoal_decode_worker.worker import ROLE, DecodeWorker
from shoal_decode_worker.write_back import WriteBack


async def serve(process: Process, loaded: Loaded[DecodeWorkerConfig]) -> None:
    """Serve until SIGTERM."""
    config, shared, metrics = loaded.service, loaded.shared, process.metrics
    host = host_of(config.advertised_address or config.listen_address)
    engines = open_engines(shared.transfer_engine_names, host=host)
    bus = Bus(shared.nats_url, name=process.instance_id)
    channels = Channels(is_direct=shared.direct_calls)
    puller = KvPuller(engines=engines)
    watcher = Watcher(bus, mesh=shared.mesh)
    nodes = CacheNodes(address=config.kv_cache_address, watcher=watcher)
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
    writer = CacheWriter(
        channels=channels,
        nodes=nodes,
        metrics=metrics,
        owner_id=process.instance_id,
        max_queued_bytes=config.write_queue_bytes,
        put_timeout_s=config.put_timeout_s,
    )
    engine = EngineAdapter(WriteBack(writer))
    client = PrefillClient(
        channels=channels,
        puller=puller,
        cache=cache,
        engine=engine,
        timeouts=PrefillTimeouts(
            hit_s=config.prefill_hit_timeout_s,
            idle_s=config.prefill_idle_timeout_s,
            pull_s=config.pull_timeout_s,
            total_s=config.prefill_timeout_s,
        ),
    )
    worker = DecodeWorker(
        process=process,
        shared=shared,
        bus=bus,
        config=config,
        engine=engine,
        loader=MeshPrompt(
            engine=engine, cache=cache, client=client, metrics=metrics, local_tokens=config.local_prefill_tokens
        ),
        labels={"host_id": host_id()},
    )

    async def prepare() -> None:
        engine.ready(await run_detached(lambda: load(config, engine), name="model-loader"))

    await watcher.start()
    writing = asyncio.create_task(writer.run())
    try:
        await worker.serve(prepare)
    finally:
        await asyncio.to_thread(engine.close)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        writer.close()
        await watcher.stop()
        await cache.close()
        puller.close()
        await channels.close()


def main() -> None:
    """Console script."""
    loaded = settings.load_or_exit(DecodeWorkerConfig, service=ROLE, environ=os.environ, argv=sys.argv[1:])
    try:
        check(loaded.service)
    except ValueError as error:
        raise refused(ROLE, error) from error
    process = processes.begin(ROLE, loaded)
    processes.run(process, serve(process, loaded))


if __name__ == "__main__":
    main()
