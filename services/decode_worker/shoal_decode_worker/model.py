"""Loads the model of a decode worker. The only module here that leads to torch, and only when called."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal_decode_worker.config import DecodeWorkerConfig
from shoal_decode_worker.engine_adapter import Loaded
from shoal_decode_worker.generation import EngineFacts

if TYPE_CHECKING:
    from shoal_engine.events import EngineSink
    from shoal_engine.verify.setup import VerifySettings


def check(config: DecodeWorkerConfig) -> None:
    """Raise ValueError, in one line, for a model that cannot be served, or not like this. Reads headers.

    Weights too, to tell the draft head, where a calibration or a round log is named.
    """
    from shoal_engine.worker_model import check_device, check_drafts, check_model

    check_model(config.model)
    check_device(config.device, "SHOAL_DECODE_WORKER_DEVICE")
    check_drafts(config.model, _verify(config))


def load(config: DecodeWorkerConfig, sink: EngineSink) -> Loaded:
    """Load, start and warm up. Blocking: seconds, or minutes where kernels are compiled for the first time."""
    from shoal_engine.constraints import CompilerLimits, ConstraintCompiler, GrammarTokenizer, announced_id
    from shoal_engine.llm import model_directory
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
            verify=_verify(config),
            threads=config.threads,
            compile_s=config.compile_s,
            is_prefill_only=False,
        ),
        sink,
    )
    tokenizer = GrammarTokenizer.from_file(
        model_directory(config.model) / "tokenizer.json", vocab_size=model.shape.vocab_size, eos_id=model.shape.eos_id
    )
    warm_up(model, is_prefill_only=False)
    return Loaded(
        engine=model.engine,
        compiler=ConstraintCompiler(
            tokenizer,
            CompilerLimits(
                compile_s=config.constraint_compile_s,
                threads=config.constraint_threads,
                cache_bytes=config.constraint_cache_bytes,
            ),
        ),
        facts=EngineFacts(
            model=model.identity.model,
            kv_id=model.identity.kv_id,
            numerics_id=model.identity.numerics_id,
            draft_id=model.identity.draft_id,
            vocab_size=model.shape.vocab_size,
            max_context=model.max_context,
            block_count=config.block_count,
            slot_count=config.slot_count,
            is_invariant=model.identity.is_invariant,
            constraint_id=announced_id(),
        ),
        replay_length=model.replay_length,
        encoder_layers=model.shape.encoder_layers,
        window=model.shape.window,
    )


def _verify(config: DecodeWorkerConfig) -> VerifySettings:
    from shoal_engine.verify.setup import VerifySettings

    return VerifySettings(
        width=config.verify_width,
        is_planned=config.verify == "planned",
        is_delayed=config.verify_delayed,
        cost_directory=Path(config.cost_directory) if config.cost_directory else None,
        cost_ttl_s=config.cost_ttl_s,
        profile_s=config.profile_s,
        calibration=Path(config.calibration) if config.calibration else None,
        round_log=Path(config.round_log) if config.round_log else None,
    )
