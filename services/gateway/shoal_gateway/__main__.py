"""`shoal-gateway`: read the settings, build the objects, serve."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from shoal.inference.v1 import inference_service_pb2_grpc as rpc
from shoal_common import process as processes
from shoal_common import settings
from shoal_common.admin import Work
from shoal_common.bus import Bus
from shoal_common.instance import Addresses, Instance
from shoal_common.load import LoadReport
from shoal_common.presence import Presence
from shoal_common.process import Process
from shoal_common.rpc import AddressInUse, Service, refused
from shoal_common.settings import Loaded
from shoal_common.watcher import Watcher

from shoal_gateway.config import GatewayConfig
from shoal_gateway.edge import rule
from shoal_gateway.edge.keys import BadKeys
from shoal_gateway.gateway import Gateway
from shoal_gateway.http.server import HttpServer
from shoal_gateway.served_model import BadModelFiles, packaged_model_dir, read_served_model

ROLE = "gateway"
SERVICE_NAME = "shoal.inference.v1.InferenceService"


async def run(
    process: Process, loaded: Loaded[GatewayConfig], gateway: Gateway, http: HttpServer, address: str
) -> None:
    """Serve until SIGTERM."""
    config, shared = loaded.service, loaded.shared
    bus = Bus(shared.nats_url, name=process.instance_id)
    watcher = Watcher(bus, mesh=shared.mesh, on_up=gateway.fleet.on_up, on_down=gateway.fleet.on_down)
    instance = Instance(
        process=process,
        shared=shared,
        bus=bus,
        role=ROLE,
        addresses=Addresses(
            listen=config.listen_address, admin=config.admin_address, advertise=config.advertised_address
        ),
        work=Work(
            running_count=lambda: gateway.answers.in_flight,
            set_draining=gateway.answers.set_draining,
            numbers=lambda: {"running": gateway.answers.in_flight},
        ),
        describe=lambda instance_id, grpc_address: Presence(
            instance_id=instance_id,
            role=ROLE,
            address=grpc_address,
            model=config.model_name,
            labels={"http": address},
        ),
        sample_load=lambda: LoadReport(running=gateway.answers.in_flight),
        readiness=gateway.readiness,
    )

    async def listening() -> None:
        gateway.start()
        await http.start()

    await watcher.start()
    try:
        await instance.serve(
            [Service(SERVICE_NAME, rpc.add_InferenceServiceServicer_to_server, gateway.servicer)],
            drain_grace_s=config.drain_grace_s,
            on_listening=listening,
            drain=gateway.answers.wait_idle,
            has_reflection=config.reflection,
            is_edge=True,
            has_admin_service=rule.is_loopback(config.listen_address),
            ready_fields={"http": address},
        )
    finally:
        gateway.answers.fail_all()
        await http.stop()
        await gateway.close()
        await watcher.stop()


async def start(process: Process, loaded: Loaded[GatewayConfig]) -> None:
    """Build and run. SystemExit(2) with one line for an occupied port, unusable model files or keys."""
    config = loaded.service
    try:
        model, tokenizer = read_served_model(
            Path(config.model) if config.model else packaged_model_dir(),
            name=config.model_name,
            aliases=config.model_aliases,
            created_s=int(time.time()),
        )
        gateway = Gateway(
            instance_id=process.instance_id,
            config=config,
            cache_secret=loaded.shared.cache_secret,
            model=model,
            tokenizer=tokenizer,
            metrics=process.metrics,
            direct_calls=loaded.shared.direct_calls,
        )
        http = HttpServer(
            gateway.app,
            listen_address=config.http_address,
            head_timeout_s=config.head_timeout_s,
            stop_grace_s=1.0,
        )
        address = http.bind()
    except (AddressInUse, BadKeys, BadModelFiles) as error:
        raise refused(ROLE, error) from error
    await run(process, loaded, gateway, http, address)


def main() -> None:
    """Console script."""
    # Of the recipe's tokenizer: its threads cost more than they save, at every length of a prompt.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    loaded = settings.load_or_exit(GatewayConfig, service=ROLE, environ=os.environ, argv=sys.argv[1:])
    process = processes.begin(ROLE, loaded)
    processes.run(process, start(process, loaded))


if __name__ == "__main__":
    main()
