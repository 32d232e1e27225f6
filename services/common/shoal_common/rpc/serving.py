"""From start to stop of one service process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence

from shoal_common.rpc.admin_http import AdminServer
from shoal_common.rpc.readiness import Readiness
from shoal_common.rpc.server import AddressInUse, RpcServer, Service
from shoal_common.telemetry import Metrics

logger = logging.getLogger(__name__)

EXIT_USAGE = 2
"""Exit status where the start was refused: a bad setting, an occupied port."""


async def serve(
    services: Sequence[Service],
    *,
    service: str,
    listen_address: str,
    admin_address: str,
    readiness: Readiness,
    metrics: Metrics,
    drain_grace_s: float,
    on_listening: Callable[[str], Awaitable[None]] | None = None,
    drain: Callable[[], Awaitable[None]] | None = None,
    stop: asyncio.Event | None = None,
    has_reflection: bool = True,
    is_edge: bool = False,
    has_direct: bool = False,
    ready_fields: Mapping[str, str] | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT or `stop`; then NOT_SERVING, `drain` within the grace, and the end.

    on_listening   called with the real address before the ready line: the time to announce oneself
    drain          finishes or moves what runs; cancelled when `drain_grace_s` is over
    is_edge        callers are outside of the mesh, see ServerInterceptor
    has_direct     see RpcServer
    ready_fields   more of the ready line, e.g. the address of an HTTP edge
    The ready line goes to standard output once the ports are open: {"event": "ready", "service", "address", "admin"}.
    Raises SystemExit(2) with one line on standard error if a port is occupied.
    """
    stop = stop or asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = RpcServer(
        services,
        listen_address=listen_address,
        readiness=readiness,
        metrics=metrics,
        has_reflection=has_reflection,
        is_edge=is_edge,
        has_direct=has_direct,
    )
    try:
        admin = AdminServer(listen_address=admin_address, readiness=readiness, render_metrics=metrics.render)
    except AddressInUse as error:
        raise refused(service, error) from error
    try:
        address = await server.start()
    except AddressInUse as error:
        admin.stop()
        raise refused(service, error) from error
    try:
        admin.start()
        if on_listening is not None:
            await on_listening(address)
        line = {"event": "ready", "service": service, "address": address, "admin": admin.address}
        line.update(ready_fields or {})
        print(json.dumps(line), flush=True)
        logger.info("started", extra={"address": address, "admin": admin.address})
        await stop.wait()
        await _leave(readiness, drain, drain_grace_s)
    finally:
        await server.stop(min(1.0, drain_grace_s))
        admin.stop()
        logger.info("stopped")


async def _leave(readiness: Readiness, drain: Callable[[], Awaitable[None]] | None, grace_s: float) -> None:
    readiness.begin_drain()
    # Lets the health watchers hear of it before the first call is refused.
    await asyncio.sleep(0)
    logger.info("draining", extra={"grace_s": grace_s})
    if drain is None:
        return
    try:
        await asyncio.wait_for(drain(), grace_s)
    except TimeoutError:
        logger.warning("drain did not end within its grace", extra={"grace_s": grace_s})


def refused(service: str, error: Exception) -> SystemExit:
    """Say in one line why the process does not start; the SystemExit to raise."""
    with contextlib.suppress(BrokenPipeError):
        print(f"shoal {service}: {error}", file=sys.stderr, flush=True)
    return SystemExit(EXIT_USAGE)
