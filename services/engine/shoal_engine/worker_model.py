"""A checkpoint as a running engine of a worker: loaded, named, and warm."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from shoal_common.errors import DeadlineExceeded, InvalidArgument
from shoal_kernels.threads import set_num_threads
from shoal_model.checkpoint import Checkpoint
from shoal_model.device import DeviceUnavailable, open_device
from shoal_model.errors import CheckpointError
from torch import Tensor

from shoal_engine.batcher import StepBudget
from shoal_engine.compile_ahead import compile_ahead
from shoal_engine.core import EngineConfig
from shoal_engine.engine import Engine
from shoal_engine.events import EngineSink
from shoal_engine.llm import model_directory
from shoal_engine.model_identity import ModelIdentity, drafter, identify
from shoal_engine.model_port import ModelShape
from shoal_engine.replay import default_replay_length
from shoal_engine.requests import GenerationRequest, PrefillRequest, SamplingSpec
from shoal_engine.served_model import ServedModel
from shoal_engine.verify.calibration import CalibrationError
from shoal_engine.verify.setup import VerifySettings, check_named_files, open_planner

NANO, NANO_NAME = "nano", "shoal-nano"
_WARM_UP_TIMEOUT_S = 600.0
_POLL_S = 0.01


class BadModel(ValueError):
    """The model asked for cannot be served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerModelSettings:
    """What to load and how large.

    model           checkpoint folder, or "nano" for the one that comes with Shoal
    name            what clients call it; empty takes the folder's, for nano "shoal-nano"
    device          cpu, cuda or cuda:N
    replay_length   K; 0: window + 2 * backtrack
    max_context     positions of prompt + output; 0 takes the model's
    step_tokens     rows of one step
    verify          how drafts are verified
    threads         threads of one step; 0 leaves it to the kernels
    compile_s       seconds after which an accelerator's kernels are no longer compiled ahead, see `compile_ahead`
    is_prefill_only    nothing is sampled or drafted
    """

    model: str
    name: str
    device: str
    block_count: int
    slot_count: int
    replay_length: int
    max_context: int
    step_tokens: int
    verify: VerifySettings
    threads: int
    compile_s: float
    is_prefill_only: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerModel:
    """A running engine. `replay_length` and `max_context` as in force."""

    engine: Engine[Tensor]
    shape: ModelShape
    identity: ModelIdentity
    replay_length: int
    max_context: int


def check_model(model: str) -> None:
    """Raise BadModel, in one line, unless `model` names a checkpoint whose files are all there and fit together."""
    try:
        Checkpoint.open(model_directory(model))
    except (CheckpointError, InvalidArgument) as error:
        raise BadModel(str(error)) from error


def check_drafts(model: str, verify: VerifySettings) -> None:
    """Raise BadModel, in one line, for a calibration or a round log that was named and that this model cannot use."""
    if verify.calibration is None and verify.round_log is None:
        return
    directory = model_directory(model)
    try:
        dspark = Checkpoint.open(directory).config.dspark
        identity = identify(directory, name="", replay_length=1)
        check_named_files(verify, draft_id=identity.draft_id, width=dspark.block_size if dspark else 0)
    except (CalibrationError, CheckpointError) as error:
        raise BadModel(str(error)) from error


def check_device(device: str, setting: str) -> None:
    """Raise BadModel, in one line that begins with the setting's name, unless a model can run there."""
    try:
        open_device(device)
    except (ValueError, DeviceUnavailable) as error:
        raise BadModel(f"{setting}: {error}") from error


def open_worker_model(settings: WorkerModelSettings, sink: EngineSink) -> WorkerModel:
    """Load a checkpoint, compile an accelerator's kernels and start its step thread. Blocking.

    raises   CheckpointError; BadModel for a calibration or a log that cannot be used; InvalidArgument for no model;
             NotEnoughMemory where blocks and slots do not fit the device
    """
    directory = model_directory(settings.model)
    if settings.threads:
        set_num_threads(settings.threads)
    served = ServedModel.load(
        directory,
        block_count=settings.block_count,
        slot_count=settings.slot_count,
        device=settings.device,
    )
    shape = served.shape
    replay_length = settings.replay_length or default_replay_length(shape.window, shape.backtrack)
    max_context = min(settings.max_context or shape.max_context, shape.max_context)
    identity = identify(directory, name=_name(settings), replay_length=replay_length, device=served.device)
    if served.device.type != "cpu":
        compile_ahead(
            served,
            step_rows=settings.step_tokens,
            verify_width=min(settings.verify.width, shape.draft_size),
            is_prefill_only=settings.is_prefill_only,
            limit_s=settings.compile_s,
        )
    try:
        planner = open_planner(
            served, drafter(directory, identity, served.device), settings.verify, step_rows=settings.step_tokens
        )
    except CalibrationError as error:
        raise BadModel(str(error)) from error
    engine = Engine(
        served,
        EngineConfig(
            replay_length=replay_length,
            max_context=max_context,
            budget=StepBudget(rows=settings.step_tokens, chunk=settings.step_tokens),
        ),
        sink,
        planner,
    )
    engine.open()
    return WorkerModel(
        engine=engine,
        shape=shape,
        identity=identity,
        replay_length=replay_length,
        max_context=max_context,
    )


def _name(settings: WorkerModelSettings) -> str:
    return settings.name or (NANO_NAME if settings.model == NANO else "")


def warm_up(model: WorkerModel, *, is_prefill_only: bool) -> None:
    """Run one request through everything that compiles at its first use. Blocking. The sink sees a request `warm-up#0`.

    raises   DeadlineExceeded after ten minutes
    """
    shape = model.shape
    length = max(1, min(model.replay_length + shape.window, model.max_context // 2, shape.block_count * 64))
    prompt = np.arange(length, dtype=np.int64) % shape.vocab_size
    name = "warm-up#0"
    request: GenerationRequest | PrefillRequest
    if is_prefill_only:
        request = PrefillRequest(request_id=name, prompt_ids=prompt)
    else:
        params = SamplingSpec(max_tokens=2 * (shape.draft_size + 1), ignore_eos=True)
        request = GenerationRequest(request_id=name, prompt_ids=prompt, params=params, seed=0, recover_in_place=True)
    model.engine.admit(request).result(_WARM_UP_TIMEOUT_S)
    model.engine.start(name).result(_WARM_UP_TIMEOUT_S)
    give_up_s = time.monotonic() + _WARM_UP_TIMEOUT_S
    while model.engine.stats().running or not model.engine.stats().step_count:
        if time.monotonic() > give_up_s:
            raise DeadlineExceeded(f"the first request took more than {_WARM_UP_TIMEOUT_S} s")
        time.sleep(_POLL_S)
