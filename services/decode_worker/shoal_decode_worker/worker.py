"""A decode worker around an engine: its sessions, its service, its figures."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from shoal.decode.v1 import decode_service_pb2_grpc as rpc
from shoal_common.admin import Work
from shoal_common.bus import Bus
from shoal_common.instance import Addresses, Instance
from shoal_common.load import LoadReport
from shoal_common.presence import Presence
from shoal_common.process import Process
from shoal_common.rpc import Readiness, Service
from shoal_common.settings import SharedSettings

from shoal_decode_worker.config import ServingConfig
from shoal_decode_worker.core import DecodeCore
from shoal_decode_worker.draft_metrics import DraftMetrics
from shoal_decode_worker.engine_like import STEP_TOKENS, EngineLike, EngineStats, PromptLoader
from shoal_decode_worker.frames import Frames
from shoal_decode_worker.generation import EngineFacts
from shoal_decode_worker.planner_metrics import register_planner_metrics
from shoal_decode_worker.servicer import DecodeServicer
from shoal_decode_worker.sessions import Sessions

ROLE = "decode_worker"
SERVICE_NAME = "shoal.decode.v1.DecodeService"
_SWEEP_S = 1.0


class DecodeWorker:
    """One decode worker on the running event loop."""

    def __init__(
        self,
        *,
        process: Process,
        shared: SharedSettings,
        bus: Bus,
        config: ServingConfig,
        engine: EngineLike,
        loader: PromptLoader,
        labels: Mapping[str, str],
    ) -> None:
        self._config, self._engine, self._labels = config, engine, labels
        frames = Frames(expiry_s=config.gateway_expiry_s, max_gateways=config.max_gateways, step_tokens=STEP_TOKENS)
        self._core = DecodeCore(frames=frames, max_requests=config.max_requests)
        self._sessions = Sessions(
            core=self._core, frames=frames, engine=engine, on_drafted=DraftMetrics(process.metrics).count
        )
        self._servicer = DecodeServicer(
            engine=engine, loader=loader, sessions=self._sessions, frames=frames, beat_s=config.beat_s
        )
        _register_metrics(process, engine, self._core)
        self._instance = Instance(
            process=process,
            shared=shared,
            bus=bus,
            role=ROLE,
            addresses=Addresses(
                listen=config.listen_address, admin=config.admin_address, advertise=config.advertised_address
            ),
            work=Work(
                running_count=lambda: self._core.live_count,
                set_draining=self._set_draining,
                numbers=lambda: _numbers(engine.stats(), self._core.live_count),
            ),
            describe=lambda instance_id, address: _presence(instance_id, address, engine.facts, labels),
            sample_load=lambda: _report(engine.stats(), engine.facts),
            readiness=Readiness("nats", "engine"),
            is_healthy=lambda: engine.is_running,
        )

    async def serve(self, prepare: Callable[[], Awaitable[None]]) -> None:
        """Serve until SIGTERM; `prepare` makes the engine ready in the background."""
        sweeping = asyncio.create_task(self._sweep())
        try:
            await self._instance.serve(
                [Service(SERVICE_NAME, rpc.add_DecodeServiceServicer_to_server, self._servicer)],
                prepare=prepare,
                drain=self._drain,
                drain_grace_s=self._config.drain_grace_s,
            )
        finally:
            sweeping.cancel()

    def _set_draining(self, is_draining: bool) -> None:
        self._core.is_draining = is_draining

    async def _drain(self) -> None:
        await self._sessions.drain(self._config.drain_grace_s - self._config.drain_move_s)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(_SWEEP_S, self._config.gateway_expiry_s))
            self._sessions.expire()


def _register_metrics(process: Process, engine: EngineLike, core: DecodeCore) -> None:
    figures: dict[str, tuple[str, Callable[[], float]]] = {
        "decode_running_requests": ("Requests that hold blocks", lambda: engine.stats().running),
        "decode_waiting_requests": ("Requests that wait for blocks", lambda: engine.stats().waiting),
        "decode_open_requests": ("Generate calls open", lambda: core.live_count),
        "decode_free_blocks": ("KV blocks free", lambda: engine.stats().free_blocks),
        "decode_free_slots": ("State slots free", lambda: engine.stats().free_slots),
        "decode_steps": ("Steps since the start", lambda: engine.stats().step_count),
        "decode_step_seconds": ("Moving average of the time of a step", lambda: engine.stats().step_time_s),
        "decode_constraint_cache_bytes": (
            "Estimated size of compiled constraints",
            lambda: engine.stats().constraint_cache_bytes,
        ),
        "decode_constraints_waiting": (
            "Constraints that wait or are being compiled",
            lambda: engine.stats().constraints_waiting,
        ),
        "decode_accept_length": ("Moving average of accepted drafts per step", lambda: engine.stats().accept_length),
        "decode_verify_width": ("Moving average of verified drafts per choice", lambda: engine.stats().verify_width),
    }
    for name, (text, sample) in figures.items():
        process.metrics.gauge(name, text).set_function(sample)
    register_planner_metrics(process.metrics, lambda: engine.stats().planner)


def _numbers(stats: EngineStats, open_requests: int) -> Mapping[str, float]:
    return {
        "running": stats.running,
        "waiting": stats.waiting,
        "free_blocks": stats.free_blocks,
        "free_slots": stats.free_slots,
        "step_count": stats.step_count,
        "step_time_s": stats.step_time_s,
        "verify_width": stats.verify_width,
        "accept_length": stats.accept_length,
        "open_requests": open_requests,
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
        constraint_id=facts.constraint_id,
        capacity={"blocks": facts.block_count, "slots": facts.slot_count, "max_context": facts.max_context},
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
