"""A prefill worker: its service, its place in the mesh, its drain."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from shoal.common.v1 import kv_transport_service_pb2_grpc as transport_rpc
from shoal.prefill.v1 import prefill_service_pb2_grpc as rpc
from shoal_common.admin import Work
from shoal_common.bus import Bus
from shoal_common.instance import Addresses, Instance
from shoal_common.kv_transport import ExportTable, KvTransportServicer
from shoal_common.load import LoadReport
from shoal_common.presence import Presence
from shoal_common.process import Process
from shoal_common.rpc import Readiness, Service
from shoal_common.settings import SharedSettings
from shoal_engine.events import EngineStats

from shoal_prefill_worker.config import PrefillWorkerConfig
from shoal_prefill_worker.core import Jobs, PrefillFacts
from shoal_prefill_worker.model import Loaded
from shoal_prefill_worker.servicer import PrefillServicer

ROLE = "prefill_worker"
SERVICE_NAME = "shoal.prefill.v1.PrefillService"


class PrefillWorker:
    """One prefill worker on the running event loop. Its servicer refuses everything until the model is loaded."""

    def __init__(
        self,
        *,
        process: Process,
        shared: SharedSettings,
        bus: Bus,
        config: PrefillWorkerConfig,
        jobs: Jobs,
        servicer: PrefillServicer,
        exports: ExportTable,
        loaded: Callable[[], Loaded | None],
        labels: Mapping[str, str],
    ) -> None:
        self._config, self._jobs, self._servicer, self._exports = config, jobs, servicer, exports
        self._loaded, self._labels = loaded, labels
        metrics = process.metrics
        metrics.gauge("prefill_open_requests", "Prefill calls open").set_function(lambda: jobs.live_count)
        metrics.gauge("prefill_open_exports", "Exports that are not pulled yet").set_function(lambda: len(exports))
        metrics.gauge("prefill_free_blocks", "KV blocks free").set_function(lambda: self._stats.free_blocks)
        metrics.gauge("prefill_steps", "Steps since the start").set_function(lambda: self._stats.step_count)
        self._instance = Instance(
            process=process,
            shared=shared,
            bus=bus,
            role=ROLE,
            addresses=Addresses(
                listen=config.listen_address, admin=config.admin_address, advertise=config.advertised_address
            ),
            work=Work(running_count=lambda: jobs.live_count, set_draining=self._set_draining, numbers=self._numbers),
            describe=self._describe,
            sample_load=self._sample_load,
            readiness=Readiness("nats", "engine"),
            is_healthy=self._is_healthy,
        )

    async def serve(self, prepare: Callable[[], Awaitable[None]]) -> None:
        """Serve until SIGTERM; `prepare` loads the model in the background."""
        await self._instance.serve(
            [
                Service(SERVICE_NAME, rpc.add_PrefillServiceServicer_to_server, self._servicer),
                Service(
                    "shoal.common.v1.KvTransportService",
                    transport_rpc.add_KvTransportServiceServicer_to_server,
                    KvTransportServicer(self._exports),
                ),
            ],
            prepare=prepare,
            drain=self._drain,
            drain_grace_s=self._config.drain_grace_s,
        )

    def _set_draining(self, is_draining: bool) -> None:
        self._jobs.is_draining = is_draining

    async def _drain(self) -> None:
        # A prefill is short; its caller tries the next worker if the grace is over first.
        await self._servicer.idle()

    def _is_healthy(self) -> bool:
        loaded = self._loaded()
        return loaded is not None and loaded.engine.is_running

    @property
    def _stats(self) -> EngineStats:
        loaded = self._loaded()
        return loaded.engine.stats() if loaded is not None else EngineStats()

    def _numbers(self) -> Mapping[str, float]:
        stats = self._stats
        return {
            "running": stats.running,
            "free_blocks": stats.free_blocks,
            "free_slots": stats.free_slots,
            "step_count": stats.step_count,
            "step_time_s": stats.step_time_ema_s,
            "open_requests": self._jobs.live_count,
            "open_exports": len(self._exports),
        }

    def _describe(self, instance_id: str, address: str) -> Presence:
        loaded = self._loaded()
        assert loaded is not None, "described after the model is loaded"
        facts: PrefillFacts = loaded.facts
        return Presence(
            instance_id=instance_id,
            role=ROLE,
            address=address,
            model=facts.model,
            kv_id=facts.kv_id,
            numerics_id=facts.numerics_id,
            draft_id=facts.draft_id,
            capacity={"blocks": facts.block_count, "slots": facts.slot_count, "max_context": facts.max_context},
            labels=self._labels,
        )

    def _sample_load(self) -> LoadReport:
        stats = self._stats
        return LoadReport(
            running=stats.running,
            waiting=max(0, self._jobs.live_count - stats.running),
            free_blocks=stats.free_blocks,
            total_blocks=stats.block_count,
            free_slots=stats.free_slots,
            total_slots=stats.slot_count,
            step_time_us=round(stats.step_time_ema_s * 1e6),
            step_count=stats.step_count,
            waiting_tokens=self._jobs.waiting_tokens,
        )
