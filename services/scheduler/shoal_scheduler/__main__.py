"""Runs one scheduler replica."""

from __future__ import annotations

import asyncio
import os
import sys

from shoal.scheduler.v1 import scheduler_service_pb2_grpc as pb_grpc
from shoal_common.admin import Work
from shoal_common.bus import Bus
from shoal_common.instance import Addresses, Instance
from shoal_common.presence import Presence
from shoal_common.process import Process, begin, run
from shoal_common.rpc import Channels, Readiness, Service
from shoal_common.settings import SharedSettings, load_or_exit

from shoal_scheduler.config import SchedulerConfig
from shoal_scheduler.core.fleet import SCHEDULER, Fleet
from shoal_scheduler.core.kv_view import KvView
from shoal_scheduler.core.placement import Placer
from shoal_scheduler.core.scheduler import Scheduler
from shoal_scheduler.desk import Desk
from shoal_scheduler.kv_lister import KvLister
from shoal_scheduler.metrics import SchedulerMetrics
from shoal_scheduler.servicer import SchedulerServicer
from shoal_scheduler.watch import FleetWatch

_MAX_WAITING_EVENTS = 1024


async def main(process: Process, config: SchedulerConfig, shared: SharedSettings) -> None:
    """Serve until told to stop."""
    limits = config.limits()
    fleet = Fleet(stale_s=limits.stale_s)
    kv = KvView(
        max_entries=config.max_index_entries,
        max_waiting_events=_MAX_WAITING_EVENTS,
        replay_tokens=config.replay_tokens,
    )
    placer = Placer(fleet, kv, config.cost_model(), remote_prefill_tokens=config.remote_prefill_tokens)
    scheduler = Scheduler(fleet=fleet, kv=kv, placer=placer, limits=limits, replica_id=process.instance_id)
    desk = Desk(
        scheduler,
        SchedulerMetrics(process.metrics, scheduler),
        max_streams=config.max_gateways,
        max_outbox=config.max_outbox,
    )
    bus = Bus(shared.nats_url, name=process.instance_id)
    watch = FleetWatch(bus, desk, kv, mesh=shared.mesh, instance_id=process.instance_id)
    channels = Channels()
    lister = KvLister(kv, channels, fleet.address_of, limit=config.max_index_entries)
    servicer = SchedulerServicer(
        desk, scheduler, default_remaining_s=config.default_remaining_s, view_age_s=bus.cut_for_s
    )
    instance = Instance(
        process=process,
        shared=shared,
        bus=bus,
        role=SCHEDULER,
        addresses=Addresses(
            listen=config.listen_address, admin=config.admin_address, advertise=config.advertised_address
        ),
        work=Work(
            running_count=lambda: len(scheduler.leases),
            numbers=lambda: {"queued": len(scheduler.queue), "leases": len(scheduler.leases), "fleet": len(fleet)},
        ),
        describe=lambda instance_id, address: Presence(instance_id=instance_id, role=SCHEDULER, address=address),
        sample_load=lambda: desk.load,
        readiness=Readiness("nats"),
    )

    async def drain() -> None:
        servicer.close()

    await watch.start()
    background = [asyncio.create_task(desk.run()), asyncio.create_task(lister.run())]
    try:
        await instance.serve(
            [
                Service(
                    "shoal.scheduler.v1.SchedulerService",
                    pb_grpc.add_SchedulerServiceServicer_to_server,
                    servicer,
                ),
            ],
            drain_grace_s=config.drain_grace_s,
            drain=drain,
        )
    finally:
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await watch.stop()
        await channels.close()


if __name__ == "__main__":
    loaded = load_or_exit(SchedulerConfig, service=SCHEDULER, environ=os.environ, argv=sys.argv[1:])
    this = begin(SCHEDULER, loaded)
    run(this, main(this, loaded.service, loaded.shared))
