"""How a service joins the bus: ready once NATS was reached, losses exposed as metrics."""

from __future__ import annotations

import time

from shoal_common.bus import Bus
from shoal_common.rpc.readiness import Readiness
from shoal_common.telemetry import Metrics

CONDITION = "nats"


async def join_bus(bus: Bus, *, readiness: Readiness, metrics: Metrics) -> None:
    """Start a bus. `readiness` must have the condition "nats", which holds from the first connection on for ever.

    A service that loses NATS later stays ready on its last view; `shoal_bus_cut_seconds` shows the view's age.
    """

    async def reached() -> None:
        readiness.set(CONDITION)

    bus.on_connect(reached)
    if bus.has_connected:
        readiness.set(CONDITION)
    counters = bus.counters
    metrics.observe("bus_connected", "1 while messages flow", lambda: float(bus.is_connected))
    metrics.observe("bus_cut_seconds", "Time since NATS was lost", lambda: bus.cut_for_s(time.monotonic()))
    metrics.observe("bus_connects", "Connections made", lambda: counters.connects, kind="counter")
    metrics.observe("bus_dropped", "Messages not sent", lambda: counters.dropped, kind="counter")
    metrics.observe("bus_slow_consumer", "Messages not delivered", lambda: counters.slow_consumer, kind="counter")
    metrics.observe("bus_handler_errors", "Handlers that failed", lambda: counters.handler_errors, kind="counter")
    await bus.start()
