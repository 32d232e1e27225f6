"""One worker process in the mesh: readiness, operator, presence, load, drain, around the services it offers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from shoal_common.admin import Operator, Work, admin_service
from shoal_common.announcer import Announcer
from shoal_common.bus import Bus
from shoal_common.control import ControlServer
from shoal_common.load import LoadReport
from shoal_common.presence import Presence
from shoal_common.process import Process
from shoal_common.rpc import Readiness, Service, serve
from shoal_common.settings import SharedSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Where an instance listens, and what it tells others; empty advertise: the address it listens on."""

    listen: str
    admin: str
    advertise: str


class Instance:
    """An instance that must prepare (load a model) before it can serve. Belongs to the running event loop.

    It is alive at once, ready when NATS was reached and `prepare` is done, and announced from then on.

    describe      what to announce, from the instance id and the address; called after `prepare`
    sample_load   called once a second on the announcer's thread
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
    ) -> None:
        self._process, self._shared, self._bus, self._role = process, shared, bus, role
        self._addresses, self._work = addresses, work
        self._describe, self._sample_load = describe, sample_load
        self._readiness = Readiness("nats", "engine")
        self._operator = Operator(
            instance_id=process.instance_id,
            role=role,
            readiness=self._readiness,
            work=Work(running_count=work.running_count, set_draining=self._set_draining, numbers=work.numbers),
        )
        self._announcer: Announcer | None = None
        self._address = ""

    async def serve(
        self,
        services: Sequence[Service],
        *,
        prepare: Callable[[], Awaitable[None]],
        drain: Callable[[], Awaitable[None]],
        drain_grace_s: float,
    ) -> None:
        """Serve until SIGTERM. An error of `prepare` ends the process and is raised."""
        control = ControlServer(
            self._bus,
            mesh=self._shared.mesh,
            instance_id=self._process.instance_id,
            commands=self._operator.commands(),
        )
        await control.start()
        self._bus.on_connect(self._reached_nats)
        await self._bus.start()
        self._readiness.set("nats", self._bus.has_connected)
        stop = asyncio.Event()
        preparing = asyncio.create_task(self._prepare(prepare))
        preparing.add_done_callback(lambda task: stop.set() if not task.cancelled() and task.exception() else None)

        async def leave() -> None:
            self._operator.stopping()
            await drain()

        try:
            await serve(
                [*services, admin_service(self._operator)],
                service=self._role,
                listen_address=self._addresses.listen,
                admin_address=self._addresses.admin,
                readiness=self._readiness,
                metrics=self._process.metrics,
                drain_grace_s=drain_grace_s,
                on_listening=self._listening,
                drain=leave,
                stop=stop,
            )
        finally:
            preparing.cancel()
            if self._announcer is not None:
                await asyncio.to_thread(self._announcer.stop)
            await self._bus.close()
            with contextlib.suppress(asyncio.CancelledError):
                await preparing

    async def _prepare(self, prepare: Callable[[], Awaitable[None]]) -> None:
        await prepare()
        self._readiness.set("engine")
        self._announce()

    async def _listening(self, address: str) -> None:
        self._address = self._addresses.advertise or address
        self._announce()

    async def _reached_nats(self) -> None:
        self._readiness.set("nats")

    def _announce(self) -> None:
        """Once there is an address and an engine, whichever came last."""
        is_due = self._address and "engine" not in self._readiness.missing
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
