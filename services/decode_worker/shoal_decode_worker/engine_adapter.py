"""shoal_engine's engine as an EngineLike: names, values and threads translated."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from shoal_common.constraints import OutputConstraint
from shoal_common.draft_counts import DraftCounts
from shoal_common.errors import MeshError, Unavailable
from shoal_engine import events as engine_events
from shoal_engine.constraint import Constraint
from shoal_engine.logical_rows import HandoverRows, LogicalRows, PrefixRows
from shoal_engine.requests import GenerationRequest

from shoal_decode_worker.engine_like import EngineEvents, EngineStats
from shoal_decode_worker.engine_values import attempt_of, engine_key, engine_request, step_entry
from shoal_decode_worker.entries import RequestUsage
from shoal_decode_worker.flow import Flow
from shoal_decode_worker.generation import EngineFacts, GenerationStart
from shoal_decode_worker.write_back import StoredModel, WriteBack

logger = logging.getLogger(__name__)


class StepEngine(Protocol):
    """The part of `shoal_engine.engine.Engine` used here; its methods may be called from any thread."""

    def admit(self, request: GenerationRequest) -> Future[engine_events.AdmitInfo]: ...

    def load_prefix(self, request_id: str, prefix: PrefixRows) -> Future[None]: ...

    def load_rows(self, request_id: str, rows: Sequence[LogicalRows]) -> Future[None]: ...

    def load_prompt(self, request_id: str, handover: HandoverRows) -> Future[None]: ...

    def start(self, request_id: str) -> Future[None]: ...

    def finish(self, request_id: str, choice: int, end_index: int) -> Future[bool]: ...

    def cancel(self, request_id: str) -> Future[bool]: ...

    def pause(self, request_id: str, choice: int) -> Future[None]: ...

    def resume(self, request_id: str, choice: int) -> Future[None]: ...

    def stats(self) -> engine_events.EngineStats: ...

    def close(self) -> bool: ...

    @property
    def is_running(self) -> bool: ...


class Compiler(Protocol):
    """The part of `shoal_engine.constraints.ConstraintCompiler` used here."""

    def compile(self, source: OutputConstraint) -> Future[Constraint]:
        """Answered from another thread."""
        ...

    @property
    def kept_bytes(self) -> int: ...

    @property
    def waiting_count(self) -> int: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """An engine that is ready, what compiles its constraints, and what must be known of its model."""

    engine: StepEngine
    compiler: Compiler
    facts: EngineFacts
    replay_length: int
    encoder_layers: int
    window: int


class EngineAdapter:
    """Implements EngineLike and LoadingEngine towards the service, EngineSink towards the engine.

    Made before the model is loaded; until `ready` everything is refused. Each attempt has a name of its own in the
    engine, so that a late call for an older attempt cannot reach a newer one.
    """

    def __init__(self, write_back: WriteBack) -> None:
        self._loop = asyncio.get_running_loop()
        self._write_back = write_back
        self._events: EngineEvents | None = None
        self._loaded: Loaded | None = None
        self._flow = Flow(self._set_paused)
        # Written by the step thread alone.
        self._draft_tokens = self._accepted_tokens = 0
        self._compiling: set[str] = set()  # belongs to the loop

    def ready(self, loaded: Loaded) -> None:
        """The model is loaded."""
        self._loaded = loaded

    def close(self) -> None:
        """Stop the engine, if there is one. Blocking, ten seconds at most."""
        if self._loaded is not None:
            self._loaded.compiler.close()
            self._loaded.engine.close()

    # EngineLike

    @property
    def facts(self) -> EngineFacts:
        """What the engine is. Raises Unavailable while the model loads."""
        return self._ready.facts

    @property
    def is_running(self) -> bool:
        """True once the model is loaded, until its step thread ends."""
        return self._loaded is not None and self._loaded.engine.is_running

    @property
    def replay_length(self) -> int:
        """K."""
        return self._ready.replay_length

    @property
    def encoder_reach(self) -> int:
        """E * W."""
        return self._ready.encoder_layers * self._ready.window

    def attach(self, events: EngineEvents) -> None:
        """Where to report."""
        self._events = events

    def admit(self, start: GenerationStart) -> Future[None]:
        """Compile the constraint, then hold blocks and slots. On the loop."""
        key = engine_key(start.request_id, start.attempt)
        self._flow.opened(key, start)
        self._write_back.opened(key, start)
        answer: Future[None] = Future()
        if start.constraint is None:
            self._admit(key, start, None, answer)
        else:
            self._compiling.add(key)
            compiled = self._ready.compiler.compile(start.constraint)
            compiled.add_done_callback(lambda done: self._post(self._compiled, key, start, done, answer))
        return answer

    def begin(self, request_id: str, attempt: int) -> Future[None]:
        """Prefill what is not loaded, then decode."""
        return self._ready.engine.start(engine_key(request_id, attempt))

    def grant(self, request_id: str, attempt: int, choice_index: int, limit: int) -> None:
        """Raise the limit of a choice."""
        self._flow.grant(engine_key(request_id, attempt), choice_index, limit)

    def finish(self, request_id: str, attempt: int, choice_index: int, end_index: int) -> None:
        """End a choice."""
        self._ready.engine.finish(engine_key(request_id, attempt), choice_index, end_index)

    def cancel(self, request_id: str, attempt: int) -> None:
        """Abort."""
        key = engine_key(request_id, attempt)
        self._closed(key)
        self._compiling.discard(key)
        if self._loaded is not None:
            self._loaded.engine.cancel(key)

    def stats(self) -> EngineStats:
        """Counts for the load report."""
        if self._loaded is None:
            return EngineStats()
        now = self._loaded.engine.stats()
        return EngineStats(
            running=now.running,
            waiting=now.waiting,
            free_blocks=now.free_blocks,
            free_slots=now.free_slots,
            step_count=now.step_count,
            step_time_s=now.step_time_ema_s,
            verify_width=now.verify_width,
            accept_length=now.accept_length_ema,
            draft_tokens=self._draft_tokens,
            accepted_tokens=self._accepted_tokens,
            constraint_cache_bytes=self._loaded.compiler.kept_bytes,
            constraints_waiting=self._loaded.compiler.waiting_count,
            planner=now.planner,
        )

    # LoadingEngine

    @property
    def prefill_tokens_per_s(self) -> float:
        """How fast prompts run here, by the last steps that held any; 0 before the first."""
        return self._ready.engine.stats().prefill_tokens_per_s_ema

    def load_prefix(self, start: GenerationStart, prefix: PrefixRows) -> Future[None]:
        """Blocks, and the snapshot or None, below a hit."""
        return self._ready.engine.load_prefix(engine_key(start.request_id, start.attempt), prefix)

    def load_rows(self, start: GenerationStart, rows: list[LogicalRows]) -> Future[None]:
        """Rows of a prompt prefilled elsewhere."""
        return self._ready.engine.load_rows(engine_key(start.request_id, start.attempt), rows)

    def load_prompt(self, start: GenerationStart, handover: HandoverRows) -> Future[None]:
        """The end of a prompt prefilled elsewhere; decode begins."""
        return self._ready.engine.load_prompt(engine_key(start.request_id, start.attempt), handover)

    # EngineSink, on the step thread

    def on_tokens(self, step: int, entries: Sequence[engine_events.TokenEntry]) -> None:
        """Pause who must be paused before the next step, then hand over."""
        for one in entries:
            self._draft_tokens += one.verified
            self._accepted_tokens += one.accepted
            self._flow.emitted(one.request_id, one.choice, one.output_index + len(one.token_ids))
            self._post(self._write_back.tokens, one.request_id, one.choice, one.token_ids)
        self._reporting.on_step(step, [step_entry(one) for one in entries])

    def on_ended(
        self,
        request_id: str,
        attempt: int,
        ends: Sequence[engine_events.ChoiceEnd],
        usage: engine_events.EngineUsage,
    ) -> None:
        """Hand over."""
        self._flow.closed(request_id)
        self._post(self._write_back.closed, request_id)
        self._reporting.on_ended(
            *attempt_of(request_id),
            RequestUsage(
                prompt_tokens=usage.prompt_tokens,
                cached_prompt_tokens=usage.cached_tokens,
                draft_tokens=usage.draft_tokens,
                accepted_draft_tokens=usage.accepted_draft_tokens,
                decode_step_count=usage.decode_steps,
                drafts=DraftCounts(
                    [*usage.drafted_by_position], [*usage.verified_by_position], [*usage.accepted_by_position]
                ),
            ),
        )

    def on_failed(self, request_id: str, attempt: int, error: MeshError, next_indices: Sequence[int]) -> None:
        """Hand over; the indices are those of the entries handed over before."""
        self._flow.closed(request_id)
        self._post(self._write_back.closed, request_id)
        self._reporting.on_failed(*attempt_of(request_id), error)

    def on_full_blocks(
        self, request_id: str, choice: int | None, first_block_index: int, blocks: Sequence[bytes]
    ) -> None:
        """To kv_cache."""
        self._post(self._write_back.blocks, request_id, choice, first_block_index, blocks, self._stored_model)

    def on_snapshot(self, request_id: str, choice: int | None, position: int, rows: bytes) -> None:
        """To kv_cache."""
        self._post(self._write_back.snapshot, request_id, choice, position, rows, self._stored_model)

    def on_prefill_rows(self, request_id: str, rows: Sequence[LogicalRows]) -> None:
        """This worker prefills for nobody else."""

    def on_prefilled(self, request_id: str, hidden_row: bytes, computed_tokens: int) -> None:
        """This worker prefills for nobody else."""

    def _compiled(self, key: str, start: GenerationStart, done: Future[Constraint], answer: Future[None]) -> None:
        if key not in self._compiling:
            # Cancelled meanwhile: nobody asks for the answer any more.
            answer.set_result(None)
            return
        self._compiling.discard(key)
        error = done.exception()
        if error is None:
            self._admit(key, start, done.result(), answer)
        else:
            self._closed(key)
            answer.set_exception(error)

    def _admit(self, key: str, start: GenerationStart, constraint: Constraint | None, answer: Future[None]) -> None:
        try:
            admitted = self._ready.engine.admit(engine_request(key, start, constraint))
        except MeshError as error:
            self._closed(key)
            answer.set_exception(error)
        else:
            admitted.add_done_callback(lambda done: _pass_on(done, answer))

    @property
    def _ready(self) -> Loaded:
        if self._loaded is None:
            raise Unavailable("the model is being loaded", reason="LOADING")
        return self._loaded

    @property
    def _reporting(self) -> EngineEvents:
        assert self._events is not None, "attached before the first request"
        return self._events

    @property
    def _stored_model(self) -> StoredModel:
        loaded = self._ready
        return StoredModel(
            kv_id=loaded.facts.kv_id,
            numerics_id=loaded.facts.numerics_id,
            encoder_layers=loaded.encoder_layers,
            window=loaded.window,
        )

    def _set_paused(self, key: str, choice_index: int, is_paused: bool) -> None:
        engine = self._ready.engine
        (engine.pause if is_paused else engine.resume)(key, choice_index)

    def _closed(self, key: str) -> None:
        self._flow.closed(key)
        self._write_back.closed(key)

    def _post(self, callback: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            # The loop is closed: the process ends.
            logger.debug("engine event after the end", extra={"callback": callback.__name__})


def _pass_on(admitted: Future[engine_events.AdmitInfo], answer: Future[None]) -> None:
    error = admitted.exception()
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(None)
