"""A closed loop on nano: a number of streams that all decode, each followed by the next prompt when it ends."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from bench import dspark_nano
from shoal_common.errors import MeshError
from shoal_engine import LLM
from shoal_engine.core import EngineConfig, EngineCore
from shoal_engine.events import ChoiceEnd, EngineUsage, TokenEntry
from shoal_engine.llm import model_directory
from shoal_engine.logical_rows import LogicalRows
from shoal_engine.model_identity import drafter, identify
from shoal_engine.planner import WidthPlanner
from shoal_engine.replay import default_replay_length
from shoal_engine.requests import GenerationRequest, SamplingSpec
from shoal_engine.served_model import ServedModel
from shoal_engine.verify.setup import VerifySettings, open_planner
from torch import Tensor

PROMPTS = 128
BLOCKS_PER_STREAM = 4


class _Counter:
    """Counts tokens and notes who ended."""

    def __init__(self) -> None:
        self.tokens = 0
        self.ended = 0

    def on_tokens(self, step: int, entries: Sequence[TokenEntry]) -> None:
        self.tokens += sum(len(entry.token_ids) for entry in entries)

    def on_ended(self, request_id: str, attempt: int, ends: Sequence[ChoiceEnd], usage: EngineUsage) -> None:
        self.ended += 1

    def on_failed(self, request_id: str, attempt: int, error: MeshError, next_indices: Sequence[int]) -> None:
        raise RuntimeError(f"{request_id} failed") from error

    def on_full_blocks(self, request_id: str, choice: int | None, first: int, blocks: Sequence[bytes]) -> None: ...

    def on_snapshot(self, request_id: str, choice: int | None, position: int, rows: bytes) -> None: ...

    def on_prefill_rows(self, request_id: str, rows: Sequence[LogicalRows]) -> None: ...

    def on_prefilled(self, request_id: str, hidden_row: bytes, computed_tokens: int) -> None: ...


class ClosedLoop:
    """One engine without its thread."""

    def __init__(
        self, model: ServedModel, planner: WidthPlanner, prompts: Sequence[dspark_nano.Prompt], streams: int
    ) -> None:
        self._sink, self._streams = _Counter(), streams
        replay = default_replay_length(model.shape.window, model.shape.backtrack)
        self._core: EngineCore[Tensor] = EngineCore(model, EngineConfig(replay_length=replay), self._sink, planner)
        self._prompts = prompts
        self._numbers = itertools.count()
        self._running: list[str] = []

    def run(self, tokens: int) -> float:
        """Tokens per second over so many tokens, once all streams decode; the same requests in every run."""
        self._numbers = itertools.count()
        self._sink.ended = 0
        self._fill()
        for _ in range(2 + self._streams * dspark_nano.SHORT_TOKENS // 128):
            self._step()
        before, began = self._sink.tokens, time.perf_counter()
        while self._sink.tokens - before < tokens:
            self._step()
        rate = (self._sink.tokens - before) / (time.perf_counter() - began)
        for name in self._running:
            self._core.cancel(name)
        self._running = []
        return rate

    def _step(self) -> None:
        self._core.step()
        self._fill()

    def _fill(self) -> None:
        missing = self._streams - (len(self._running) - self._sink.ended)
        for _ in range(missing):
            number = next(self._numbers)
            prompt = self._prompts[number % len(self._prompts)]
            spec = SamplingSpec(temperature=float(number % 4 > 1), max_tokens=prompt.room)
            name = f"r{number}"
            self._core.admit(
                GenerationRequest(request_id=name, prompt_ids=np.array(prompt.ids), params=spec, seed=number)
            )
            self._core.start(name)
            self._running.append(name)


def loops(streams: int, folder: Path, *, seed: int, output_tokens: int) -> dict[str, ClosedLoop]:
    """Planned, all drafts, none: each with an engine of its own over one model. `folder` holds measured costs."""
    directory = model_directory("nano")
    model = ServedModel.load(directory, block_count=streams * BLOCKS_PER_STREAM, slot_count=streams)
    replay = default_replay_length(model.shape.window, model.shape.backtrack)
    head = drafter(directory, identify(directory, name="", replay_length=replay, device=model.device), model.device)
    with LLM("nano", max_num_seqs=1) as llm:
        prompts = dspark_nano.short_prompts(llm, seed, PROMPTS, output_tokens)
    ways = {
        "planned": VerifySettings(width=5, is_planned=True, cost_directory=folder),
        "fixed 5": VerifySettings(width=5),
        "none": VerifySettings(width=0),
    }
    return {
        name: ClosedLoop(model, open_planner(model, head, verify, step_rows=512), prompts, streams)
        for name, verify in ways.items()
    }
