"""Drives an `EngineCore` without its thread: a sink that records, and requests run to their end."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from shoal_common.errors import MeshError
from shoal_engine.admission import Growth
from shoal_engine.batcher import StepBudget
from shoal_engine.core import EngineConfig, EngineCore
from shoal_engine.events import ChoiceEnd, EngineUsage, TokenEntry
from shoal_engine.logical_rows import LogicalRows
from shoal_engine.model_port import StepModel
from shoal_engine.planner import FixedWidth, PlannerStats, StepTimes, VerifiedRound, WidthPlanner, WidthView
from shoal_engine.requests import ChoiceStart, GenerationRequest, PrefillRequest, SamplingSpec
from shoal_engine.verify import CostModel, CostTable, DraftGate, PlannedWidth

MAX_STEPS = 5000
STANDARD_GROWTH = Growth()


@dataclass
class RecordingSink:
    """Keeps every event; checks that tokens come in order and once, and that nothing follows a request's last event."""

    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    entries: list[TokenEntry] = field(default_factory=list)
    ended: dict[str, tuple[list[ChoiceEnd], EngineUsage]] = field(default_factory=dict)
    failed: dict[str, tuple[MeshError, tuple[int, ...]]] = field(default_factory=dict)
    blocks: dict[tuple[str, int | None, int], bytes] = field(default_factory=dict)
    snapshots: dict[tuple[str, int | None, int], bytes] = field(default_factory=dict)
    blocks_at_snapshot: dict[int, set[int]] = field(default_factory=dict)
    """By position of a snapshot: the blocks of its request that had come before it."""
    rows: dict[str, list[LogicalRows]] = field(default_factory=dict)
    prefilled: dict[str, tuple[bytes, int]] = field(default_factory=dict)

    def begin(self, request: GenerationRequest) -> None:
        """Tokens so far count as recorded."""
        for i, choice in enumerate(request.choices):
            self.tokens[request.request_id, i] = list(choice.output_ids)

    def on_tokens(self, step: int, entries: Sequence[TokenEntry]) -> None:
        for entry in entries:
            assert entry.request_id not in self.ended, "tokens after the end"
            known = self.tokens[entry.request_id, entry.choice]
            assert entry.output_index == len(known), "tokens come in order and once"
            known += entry.token_ids
            self.entries.append(entry)

    def on_ended(self, request_id: str, attempt: int, ends: Sequence[ChoiceEnd], usage: EngineUsage) -> None:
        assert request_id not in self.ended
        self.ended[request_id] = (list(ends), usage)

    def on_failed(self, request_id: str, attempt: int, error: MeshError, next_indices: Sequence[int]) -> None:
        assert request_id not in self.ended
        self.failed[request_id] = (error, tuple(next_indices))

    def on_full_blocks(self, request_id: str, choice: int | None, first: int, blocks: Sequence[bytes]) -> None:
        for i, data in enumerate(blocks):
            assert (request_id, choice, first + i) not in self.blocks, "each block once"
            self.blocks[request_id, choice, first + i] = data

    def on_snapshot(self, request_id: str, choice: int | None, position: int, rows: bytes) -> None:
        assert (request_id, choice, position) not in self.snapshots, "each snapshot once"
        self.snapshots[request_id, choice, position] = rows
        self.blocks_at_snapshot[position] = {index for name, _, index in self.blocks if name == request_id}

    def on_prefill_rows(self, request_id: str, rows: Sequence[LogicalRows]) -> None:
        self.rows.setdefault(request_id, []).extend(rows)

    def on_prefilled(self, request_id: str, hidden_row: bytes, computed_tokens: int) -> None:
        self.prefilled[request_id] = (hidden_row, computed_tokens)


class RandomWidths:
    """Any width that the cap allows, from a reproducible stream."""

    max_width = draft_width = 5

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def widths(self, views: Sequence[WidthView]) -> list[int]:
        return [self._random.randint(0, view.cap) for view in views]

    def verified(self, rounds: Sequence[VerifiedRound]) -> None:
        pass

    def observe(self, step: StepTimes) -> None:
        pass

    def stats(self) -> PlannerStats:
        return PlannerStats()


class _KeepsItsCosts(PlannedWidth):
    """Learns nothing from the clock, so that a test plans the same on every machine."""

    def observe(self, step: StepTimes) -> None:
        pass


def planned(*, row_s: float = 1e-4, draft_s: float = 1e-4, is_delayed: bool = False) -> PlannedWidth:
    """A planner on a machine whose steps cost 1 ms, and so much per row and per draft pass."""
    table = CostTable(
        rows=(1, 1024),
        step_s=(1e-3 + row_s, 1e-3 + 1024 * row_s),
        choices=(1, 64),
        sampler_s=(0.0, 0.0),
        draft_s=(draft_s, draft_s),
    )
    return _KeepsItsCosts(5, CostModel(table, 1024), is_delayed=is_delayed, gate=DraftGate(probe_steps=4))


class Driver:
    """One core over one model with a recording sink."""

    def __init__(
        self,
        model: StepModel[Any],
        *,
        replay_length: int,
        planner: WidthPlanner | None = None,
        chunk: int = 256,
        rows: int = 512,
        max_context: int | None = None,
        growth: Growth = STANDARD_GROWTH,
    ) -> None:
        self.sink = RecordingSink()
        budget = StepBudget(rows=rows, chunk=chunk, min_chunk=min(chunk, 64))
        config = EngineConfig(replay_length=replay_length, budget=budget, max_context=max_context, growth=growth)
        self.core: EngineCore[Any] = EngineCore(model, config, self.sink, planner or FixedWidth(5))

    def admit(self, request: GenerationRequest | PrefillRequest) -> None:
        if isinstance(request, GenerationRequest):
            self.sink.begin(request)
        self.core.admit(request)

    def submit(self, *requests: GenerationRequest | PrefillRequest) -> None:
        """Admit and start."""
        for request in requests:
            self.admit(request)
            self.core.start(request.request_id)

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Step until nothing can run, or until `until` holds."""
        for _ in range(MAX_STEPS):
            if until is not None and until():
                return
            if not self.core.step():
                return
        raise AssertionError(f"still running after {MAX_STEPS} steps")

    def generate(self, *requests: GenerationRequest) -> list[list[int]]:
        """Run requests together to their end; tokens of choice 0."""
        self.submit(*requests)
        self.run()
        assert not self.sink.failed, self.sink.failed
        assert all(request.request_id in self.sink.ended for request in requests)
        return [self.sink.tokens[request.request_id, 0] for request in requests]

    def assert_at_baseline(self) -> None:
        """Nothing is held and nothing is known."""
        stats = self.core.stats()
        assert (stats.running, stats.waiting, stats.runnable) == (0, 0, 0)
        assert (stats.free_blocks, stats.free_slots) == (stats.block_count, stats.slot_count)


def request(
    prompt: Sequence[int],
    *,
    name: str = "r",
    seed: int = 7,
    choices: Sequence[ChoiceStart] = (ChoiceStart(),),
    **more: Any,
) -> GenerationRequest:
    """A request; keywords of `SamplingSpec` go there, the others to the request."""
    spec = {key: more.pop(key) for key in list(more) if key in SamplingSpec.__dataclass_fields__}
    return GenerationRequest(
        request_id=name,
        prompt_ids=np.array(prompt, dtype=np.int64),
        params=SamplingSpec(**spec),
        seed=seed,
        choices=tuple(choices),
        **more,
    )
