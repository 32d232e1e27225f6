"""A whole service process with no work of its own: health, admin port, ready line, drain. Run with -m."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass

from shoal_common import process, settings
from shoal_common.bus import Bus
from shoal_common.bus_joining import join_bus
from shoal_common.rpc import Readiness, serve


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyConfig:
    listen_address: str = "127.0.0.1:0"
    admin_address: str = "127.0.0.1:0"
    drain_grace_s: float = 5.0
    drain_takes_s: float = 0.0


async def main(this: process.Process, loaded: settings.Loaded[TinyConfig]) -> None:
    config = loaded.service
    readiness = Readiness("nats")
    bus = Bus(loaded.shared.nats_url, name=this.instance_id)
    await join_bus(bus, readiness=readiness, metrics=this.metrics)

    async def drain() -> None:
        print("drain begun", flush=True)
        await asyncio.sleep(config.drain_takes_s)
        print("drain done", flush=True)

    await serve(
        [],
        service="tiny",
        listen_address=config.listen_address,
        admin_address=config.admin_address,
        readiness=readiness,
        metrics=this.metrics,
        drain_grace_s=config.drain_grace_s,
        drain=drain,
    )
    await bus.close()


if __name__ == "__main__":
    settings_in_force = settings.load_or_exit(TinyConfig, service="tiny", environ=os.environ, argv=sys.argv[1:])
    started = process.begin("tiny", settings_in_force)
    process.run(started, main(started, settings_in_force))
