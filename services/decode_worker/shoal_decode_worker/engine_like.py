"""What the servicer needs from an engine. The real one steps a model; the mock rank's takes no time at all."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from shoal_common.errors import MeshError
from shoal_engine.planner import PlannerStats

from shoal_decode_worker.entries import RequestUsage, TokenEntry
from shoal_decode_worker.generation import EngineFacts, GenerationStart

STEP_TOKENS = 6
"""Most tokens that one step gives a choice: one, and five accepted drafts."""


class StepEntry(NamedTuple):
    """Tokens of one attempt of one request."""

    request_id: str
    attempt: int
    entry: TokenEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The engine now."""

    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    free_slots: int = 0
    step_count: int = 0
    step_time_s: float = 0.0
    verify_width: float = 0.0
    accept_length: float = 0.0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    constraint_cache_bytes: int = 0
    constraints_waiting: int = 0
    planner: PlannerStats = field(default_factory=PlannerStats)


class EngineEvents(Protocol):
    """Where an engine reports. Called on its own thread; must not block. Order per request: entries, then one end."""

    def on_step(self, step: int, entries: list[StepEntry]) -> None:
        """One step gave tokens."""

    def on_ended(self, request_id: str, attempt: int, usage: RequestUsage) -> None:
        """All choices have ended, by themselves or by `finish`; nothing is held any more."""

    def on_failed(self, request_id: str, attempt: int, error: MeshError) -> None:
        """The engine gave the request up; nothing is held any more."""


class EngineLike(Protocol):
    """An engine. All methods may be called from any thread and return at once.

    An attempt lives from `admit` to `on_ended`, `on_failed` or `cancel`; calls for any other are ignored.
    """

    @property
    def facts(self) -> EngineFacts:
        """What it is."""

    @property
    def is_running(self) -> bool:
        """False once it cannot step any more."""

    def attach(self, events: EngineEvents) -> None:
        """Where to report, before the first `admit`."""

    def admit(self, start: GenerationStart) -> Future[None]:
        """Compile the constraint, hold blocks and slots.

        Fails with CONSTRAINT_INVALID, CONSTRAINT_TIMEOUT, OUT_OF_BLOCKS, OUT_OF_SLOTS, EXCEEDS_CAPACITY, QUEUE_FULL;
        then holds none.

        Each choice may at first emit MAX_UNACKNOWLEDGED tokens beyond those it came with.
        """

    def begin(self, request_id: str, attempt: int) -> Future[None]:
        """Prefill what is not loaded, then decode. Fails if the attempt is over."""

    def grant(self, request_id: str, attempt: int, choice_index: int, limit: int) -> None:
        """The choice may emit output indices below `limit`; until then it is paused, keeps its slot, skips its rows."""

    def finish(self, request_id: str, attempt: int, choice_index: int, end_index: int) -> None:
        """End a choice normally with the tokens below `end_index`, which were emitted."""

    def cancel(self, request_id: str, attempt: int) -> None:
        """Abort within one step: nothing is reported for it any more, nothing stored, everything freed."""

    def stats(self) -> EngineStats:
        """Counts for the load report."""


async def answered(future: Future[None]) -> None:
    """The engine's answer, without a turn of the event loop where it is there already."""
    if not future.done():
        await asyncio.wrap_future(future)
    future.result()


async def admitted_by(admission: Future[None]) -> None:
    """As `answered`, but a caller that is cancelled leaves the engine's answer alone: whoever asked takes it back."""
    if not admission.done():
        await asyncio.shield(asyncio.wrap_future(admission))
    admission.result()


class PromptLoader(Protocol):
    """Gets the prompt of a request into the engine, from the mesh or by its own prefill, and begins it."""

    async def load(self, start: GenerationStart, admission: Future[None]) -> None:
        """Returns once the engine may run the request. Raises MeshError if it never will; safe to cancel.

        admission   the engine's answer; what does not need it may be done before
        """


class LocalPrefill:
    """Leaves all of the prompt to the engine."""

    def __init__(self, engine: EngineLike) -> None:
        self._engine = engine

    async def load(self, start: GenerationStart, admission: Future[None]) -> None:
        """Begin at once."""
        await admitted_by(admission)
        await answered(self._engine.begin(start.request_id, start.attempt))
