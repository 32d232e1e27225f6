"""One process in the mesh: bus, readiness, operator, presence, load, drain, around the services it offers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from shoal_common.admin import Operator, Work, admin_service
from shoal_common.announcer import Announcer
from shoal_common.bus import Bus
from shoal_common.bus_joining import join_bus
from shoal_common.control import ControlServer
from shoal_common.load import LoadReport
from shoal_common.presence import Presence
from shoal_common.process import Process
from shoal_common.rhythm import until_next
from shoal_common.rpc import Readiness, Service, serve
from shoal_common.settings import SharedSettings

_HEALTH_PERIOD_S = 1.0


class EngineStopped(RuntimeError):
    """What this instance serves with has ended; only a new process can go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Where an instance listens, and what it tells others; empty advertise: the address it listens on."""

    listen: str
    admin: str
    advertise: str


class Instance:
    """What every service's `main` builds its own objects into. Belongs to the running event loop.

    It is alive at once; ready when NATS was reached, all other conditions of `readiness` hold and `prepare` is done;
    announced once it has an address and `prepare` is done.

    describe      what to announce, from the instance id and the address; called after `prepare`
    sample_load   called once a second on the announcer's thread
    readiness     has the condition "nats", and "engine" if there is something to prepare
    is_healthy    asked once a second after `prepare`; the process ends when it says no
    """

    def __init__(
        self,
        *,
        process: Process,
        shared: SharedSettings,
        bus: Bus,
        role: str,
        addresses: Addresses,
        work: Work,
        describe: Callable[[str, str], Presence],
        sample_load: Callable[[], LoadReport],
        readiness: Readiness,
        is_healthy: Callable[[], bool] = lambda: True,
    ) -> None:
        self._process, self._shared, self._bus, self._role = process, shared, bus, role
        self._addresses, self._work = addresses, work
        self._describe, self._sample_load, self._is_healthy = describe, sample_load, is_healthy
        self._readiness = readiness
        self._operator = Operator(
            instance_id=process.instance_id,
            role=role,
            readiness=self._readiness,
            work=Work(running_count=work.running_count, set_draining=self._set_draining, numbers=work.numbers),
        )
        self._announcer: Announcer | None = None
        self._address = ""
        self._is_prepared = False

    async def serve(
        self,
        services: Sequence[Service],
        *,
        drain_grace_s: float,
        prepare: Callable[[], Awaitable[None]] | None = None,
        on_listening: Callable[[], Awaitable[None]] | None = None,
        drain: Callable[[], Awaitable[None]] | None = None,
        has_reflection: bool = True,
        is_edge: bool = False,
        has_admin_service: bool = True,
        ready_fields: Mapping[str, str] | None = None,
    ) -> None:
        """Serve until SIGTERM. `prepare` runs beside; raises what it raised, or EngineStopped.

        on_listening   called when the ports are open, before the announcement
        drain          finishes or moves what runs, within `drain_grace_s`
        is_edge        callers are outside of the mesh, see ServerInterceptor
        has_admin_service   whoever reaches the port may drain this instance; without it only the bus can
        ready_fields   more for the ready line
        """
        control = ControlServer(
            self._bus,
            mesh=self._shared.mesh,
            instance_id=self._process.instance_id,
            commands=self._operator.commands(),
        )
        await control.start()
        await join_bus(self._bus, readiness=self._readiness, metrics=self._process.metrics)
        stop = asyncio.Event()
        preparing = asyncio.create_task(self._prepare(prepare))
        preparing.add_done_callback(lambda task: stop.set() if not task.cancelled() and task.exception() else None)

        async def leave() -> None:
            self._operator.stopping()
            if drain is not None:
                await drain()

        async def listening(address: str) -> None:
            if on_listening is not None:
                await on_listening()
            self._address = self._addresses.advertise or address
            self._announce()

        try:
            await serve(
                [*services, admin_service(self._operator)] if has_admin_service else services,
                service=self._role,
                listen_address=self._addresses.listen,
                admin_address=self._addresses.admin,
                readiness=self._readiness,
                metrics=self._process.metrics,
                drain_grace_s=drain_grace_s,
                on_listening=listening,
                drain=leave,
                stop=stop,
                has_reflection=has_reflection,
                is_edge=is_edge,
                has_direct=self._shared.direct_calls and not is_edge,
                ready_fields=ready_fields,
            )
        finally:
            preparing.cancel()
            if self._announcer is not None:
                await asyncio.to_thread(self._announcer.stop)
            await self._bus.close()
            with contextlib.suppress(asyncio.CancelledError):
                await preparing

    async def _prepare(self, prepare: Callable[[], Awaitable[None]] | None) -> None:
        if prepare is not None:
            await prepare()
            self._readiness.set("engine")
        self._is_prepared = True
        self._announce()
        # The end of a thread sets no event that a loop could wait for.
        while self._is_healthy():  # noqa: ASYNC110
            await asyncio.sleep(until_next(_HEALTH_PERIOD_S))
        self._readiness.set("engine", False)
        raise EngineStopped("the engine has stopped; its log says why")

    def _announce(self) -> None:
        """Once there is an address and all is prepared, whichever came last."""
        is_due = self._address and self._is_prepared
        if self._bus.is_off or self._announcer is not None or not is_due:
            return
        self._announcer = Announcer(
            nats_url=self._shared.nats_url,
            mesh=self._shared.mesh,
            presence=self._describe(self._process.instance_id, self._address),
            sample_load=self._sample_load,
        )
        self._announcer.start()

    def _set_draining(self, is_draining: bool) -> None:
        self._work.set_draining(is_draining)
        if self._announcer is not None:
            self._announcer.update(is_draining=is_draining)
