"""Loads the model of a prefill worker. The only module here that leads to torch, and only when called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal_prefill_worker.call import PrefillModel
from shoal_prefill_worker.config import PrefillWorkerConfig
from shoal_prefill_worker.core import PrefillFacts
from shoal_prefill_worker.engine_like import PrefillEngine

if TYPE_CHECKING:
    from shoal_engine.events import EngineSink


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """An engine that is ready, and what must be known of its model."""

    engine: PrefillEngine
    facts: PrefillFacts
    model: PrefillModel


def check(config: PrefillWorkerConfig) -> None:
    """Raise ValueError, in one line, for a model that cannot be served, or not on this device. Reads headers only."""
    from shoal_engine.worker_model import check_device, check_model

    check_model(config.model)
    check_device(config.device, "SHOAL_PREFILL_WORKER_DEVICE")


def load(config: PrefillWorkerConfig, sink: EngineSink) -> Loaded:
    """Load, start and warm up. Blocking: seconds, or minutes where kernels are compiled for the first time."""
    from shoal_engine.verify.setup import VerifySettings
    from shoal_engine.worker_model import WorkerModelSettings, open_worker_model, warm_up

    model = open_worker_model(
        WorkerModelSettings(
            model=config.model,
            name=config.model_name,
            device=config.device,
            block_count=config.block_count,
            slot_count=config.slot_count,
            replay_length=config.replay_length,
            max_context=config.max_context,
            step_tokens=config.step_tokens,
            verify=VerifySettings(width=0),
            threads=config.threads,
            compile_s=config.compile_s,
            is_prefill_only=True,
        ),
        sink,
    )
    warm_up(model, is_prefill_only=True)
    return Loaded(
        engine=model.engine,
        facts=PrefillFacts(
            model=model.identity.model,
            kv_id=model.identity.kv_id,
            numerics_id=model.identity.numerics_id,
            draft_id=model.identity.draft_id,
            vocab_size=model.shape.vocab_size,
            max_context=model.max_context,
            block_count=config.block_count,
            slot_count=config.slot_count,
        ),
        model=PrefillModel(
            replay_length=model.replay_length,
            encoder_layers=model.shape.encoder_layers,
            window=model.shape.window,
        ),
    )
