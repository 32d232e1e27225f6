"""The sink of the offline LLM: gathers what each request says until it ends."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal_common.errors import MeshError

from shoal_engine.events import ChoiceEnd, EngineUsage, PositionLogprobs, TokenEntry
from shoal_engine.logical_rows import LogicalRows


@dataclass(slots=True)
class Gathered:
    """One request's output so far. `error` or `usage` is set when it has left the engine."""

    tokens: list[list[int]]
    logprobs: list[list[PositionLogprobs]]
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    ends: list[ChoiceEnd] = field(default_factory=list)
    usage: EngineUsage | None = None
    error: MeshError | None = None


class Collector:
    """An `EngineSink`. Requests are opened by the caller's thread before the engine knows them."""

    def __init__(self) -> None:
        self._open: dict[str, Gathered] = {}
        self._done: queue.SimpleQueue[str] = queue.SimpleQueue()

    def open(self, request_id: str, choices: int) -> None:
        """Expect events of this request."""
        self._open[request_id] = Gathered([[] for _ in range(choices)], [[] for _ in range(choices)])

    def clear(self) -> None:
        """Forget every request. To be called when none of them is in the engine."""
        self._open.clear()
        self._done = queue.SimpleQueue()

    def take_done(self) -> tuple[str, Gathered]:
        """Block until a request has left the engine; it is forgotten here."""
        request_id = self._done.get()
        return request_id, self._open.pop(request_id)

    def on_tokens(self, step: int, entries: Sequence[TokenEntry]) -> None:
        for entry in entries:
            gathered = self._open[entry.request_id]
            gathered.tokens[entry.choice] += entry.token_ids
            gathered.logprobs[entry.choice] += entry.logprobs
            gathered.prompt_logprobs = gathered.prompt_logprobs or entry.prompt_logprobs

    def on_ended(self, request_id: str, attempt: int, ends: Sequence[ChoiceEnd], usage: EngineUsage) -> None:
        gathered = self._open[request_id]
        gathered.ends, gathered.usage = list(ends), usage
        self._done.put(request_id)

    def on_failed(self, request_id: str, attempt: int, error: MeshError, next_indices: Sequence[int]) -> None:
        self._open[request_id].error = error
        self._done.put(request_id)

    def on_full_blocks(
        self, request_id: str, choice: int | None, first_block_index: int, blocks: Sequence[bytes]
    ) -> None:
        """Nothing is kept offline."""

    def on_snapshot(self, request_id: str, choice: int | None, position: int, rows: bytes) -> None:
        """Nothing is kept offline."""

    def on_prefill_rows(self, request_id: str, rows: Sequence[LogicalRows]) -> None:
        """Offline requests are prefilled where they are decoded."""

    def on_prefilled(self, request_id: str, hidden_row: bytes, computed_tokens: int) -> None:
        """Offline requests are prefilled where they are decoded."""
