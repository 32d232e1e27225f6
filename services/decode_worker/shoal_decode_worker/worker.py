"""The process around an engine: service, readiness, presence, load, control, drain."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence

from shoal.decode.v1 import decode_service_pb2_grpc as rpc
from shoal_common.admin import Operator, Work, admin_service
from shoal_common.announcer import Announcer
from shoal_common.bus import OFF, Bus
from shoal_common.control import ControlServer
from shoal_common.load import LoadReport
from shoal_common.presence import Presence
from shoal_common.process import Process
from shoal_common.rpc import Readiness, Service, serve
from shoal_common.settings import SharedSettings

from shoal_decode_worker.config import ServingConfig
from shoal_decode_worker.core import DecodeCore
from shoal_decode_worker.engine_like import STEP_TOKENS, EngineLike, EngineStats, PromptLoader
from shoal_decode_worker.frames import Frames
from shoal_decode_worker.generation import EngineFacts
from shoal_decode_worker.servicer import DecodeServicer
from shoal_decode_worker.sessions import Sessions

ROLE = "decode_worker"
SERVICE_NAME = "shoal.decode.v1.DecodeService"
_SWEEP_S = 1.0


class DecodeWorker:
    """One decode worker on the running event loop: an engine, its sessions, and its place in the mesh."""

    def __init__(
        self,
        *,
        process: Process,
        shared: SharedSettings,
        config: ServingConfig,
        engine: EngineLike,
        loader: PromptLoader,
        labels: Mapping[str, str],
    ) -> None:
        self._process, self._shared, self._config, self._engine = process, shared, config, engine
        self._labels = labels
        frames = Frames(expiry_s=config.gateway_expiry_s, max_gateways=config.max_gateways, step_tokens=STEP_TOKENS)
        self._core = DecodeCore(frames=frames, max_requests=config.max_requests)
        self._sessions = Sessions(core=self._core, frames=frames, engine=engine)
        self._servicer = DecodeServicer(
            engine=engine, loader=loader, sessions=self._sessions, frames=frames, beat_s=config.beat_s
        )
        self.readiness = Readiness("nats", "engine")
        work = Work(running_count=lambda: self._core.live_count, set_draining=self._set_draining, numbers=self._numbers)
        self._operator = Operator(instance_id=process.instance_id, role=ROLE, readiness=self.readiness, work=work)
        self._bus = Bus(shared.nats_url, name=process.instance_id)
        self._announcer: Announcer | None = None
        self._address = ""

    async def serve(self, prepare: Callable[[], Awaitable[None]], more_services: Sequence[Service] = ()) -> None:
        """Serve until SIGTERM. `prepare` makes the engine ready in the background; the mesh hears of us after it.

        An error of `prepare` ends the process.
        """
        control = ControlServer(
            self._bus,
            mesh=self._shared.mesh,
            instance_id=self._process.instance_id,
            commands=self._operator.commands(),
        )
        await control.start()
        self._bus.on_connect(self._reached_nats)
        await self._bus.start()
        self.readiness.set("nats", self._bus.has_connected)
        stop = asyncio.Event()
        sweeping = asyncio.create_task(self._sweep())
        preparing = asyncio.create_task(self._prepare(prepare))
        preparing.add_done_callback(lambda task: stop.set() if not task.cancelled() and task.exception() else None)
        try:
            await serve(
                [
                    Service(SERVICE_NAME, rpc.add_DecodeServiceServicer_to_server, self._servicer),
                    admin_service(self._operator),
                    *more_services,
                ],
                service=ROLE,
                listen_address=self._config.listen_address,
                admin_address=self._config.admin_address,
                readiness=self.readiness,
                metrics=self._process.metrics,
                drain_grace_s=self._config.drain_grace_s,
                on_listening=self._listening,
                drain=self._drain,
                stop=stop,
            )
        finally:
            sweeping.cancel()
            preparing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await preparing
            if self._announcer is not None:
                await asyncio.to_thread(self._announcer.stop)
            await self._bus.close()

    async def _prepare(self, prepare: Callable[[], Awaitable[None]]) -> None:
        await prepare()
        self.readiness.set("engine")
        self._announce()

    async def _listening(self, address: str) -> None:
        self._address = self._config.advertise_address or address
        self._announce()

    def _announce(self) -> None:
        """Once there is an address and an engine, whichever came last."""
        if self._announcer is not None or not self._address or "engine" in self.readiness.missing:
            return
        if self._shared.nats_url == OFF:
            return
        self._announcer = Announcer(
            nats_url=self._shared.nats_url,
            mesh=self._shared.mesh,
            presence=_presence(self._process.instance_id, self._address, self._engine.facts, self._labels),
            sample_load=lambda: _report(self._engine.stats(), self._engine.facts),
        )
        self._announcer.start()

    async def _reached_nats(self) -> None:
        self.readiness.set("nats")

    def _set_draining(self, is_draining: bool) -> None:
        if is_draining:
            self._core.is_draining = True
        else:
            self._sessions.resume()
        if self._announcer is not None:
            self._announcer.update(is_draining=is_draining)

    async def _drain(self) -> None:
        self._operator.stopping()
        await self._sessions.drain(self._config.drain_grace_s - self._config.drain_move_s)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(_SWEEP_S, self._config.gateway_expiry_s))
            self._sessions.expire()

    def _numbers(self) -> Mapping[str, float]:
        stats = self._engine.stats()
        return {
            "running": stats.running,
            "waiting": stats.waiting,
            "free_blocks": stats.free_blocks,
            "free_slots": stats.free_slots,
            "step_count": stats.step_count,
            "step_time_s": stats.step_time_s,
            "verify_width": stats.verify_width,
            "accept_length": stats.accept_length,
            "open_requests": self._core.live_count,
        }


def _presence(instance_id: str, address: str, facts: EngineFacts, labels: Mapping[str, str]) -> Presence:
    return Presence(
        instance_id=instance_id,
        role=ROLE,
        address=address,
        model=facts.model,
        kv_id=facts.kv_id,
        numerics_id=facts.numerics_id,
        draft_id=facts.draft_id,
        capacity={
            "blocks": facts.block_count,
            "slots": facts.slot_count,
            "max_context": facts.max_context,
        },
        labels=labels,
    )


def _report(stats: EngineStats, facts: EngineFacts) -> LoadReport:
    return LoadReport(
        running=stats.running,
        waiting=stats.waiting,
        free_blocks=stats.free_blocks,
        total_blocks=facts.block_count,
        free_slots=stats.free_slots,
        total_slots=facts.slot_count,
        step_time_us=round(stats.step_time_s * 1e6),
        step_count=stats.step_count,
        verify_width=stats.verify_width,
        draft_tokens=stats.draft_tokens,
        accepted_tokens=stats.accepted_tokens,
    )
