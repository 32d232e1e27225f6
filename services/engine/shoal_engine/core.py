"""The engine without its thread: requests come in, steps run, events go out. Everything here belongs to one thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Generic

from shoal_common.errors import AlreadyExists, Draining, Internal, MeshError, Superseded

from shoal_engine.admission import Growth
from shoal_engine.batcher import StepBudget
from shoal_engine.block_pool import BLOCK_TOKENS
from shoal_engine.errors import BadRows, HitNotUsable, NothingAllowed, OutOfBlocks
from shoal_engine.events import AdmitInfo, EngineSink, EngineStats, FinishReason, TokenEntry
from shoal_engine.handover import Exporter, Importer
from shoal_engine.holdings import Holdings
from shoal_engine.logical_rows import HandoverRows, LogicalRows, PrefixRows
from shoal_engine.model_port import Hidden, StepModel
from shoal_engine.planner import StepTimes, WidthPlanner
from shoal_engine.prompts import Prompts
from shoal_engine.request_states import check_prompt_logprobs, entries_of_ended, new_state
from shoal_engine.requests import GenerationRequest, PrefillRequest
from shoal_engine.roster import Roster, moved
from shoal_engine.sequence import Phase, RequestState, Sequence
from shoal_engine.snapshots import snapshot_position
from shoal_engine.step import ChunkRows, DecodeRows, FirstRow, Stepper, chunk_outputs
from shoal_engine.step_figures import StepFigures
from shoal_engine.step_plan import StepPlan, is_runnable
from shoal_engine.write_back import WriteBack

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine.

    replay_length   K; at least W + B of the model
    max_context     positions of prompt + output; None takes the model's
    budget          rows of a step
    growth          how many blocks are held ahead
    """

    replay_length: int
    max_context: int | None = None
    budget: StepBudget = field(default_factory=StepBudget)
    growth: Growth = field(default_factory=Growth)


class EngineCore(Generic[Hidden]):
    """Commands and steps over the requests of one model instance."""

    def __init__(
        self,
        model: StepModel[Hidden],
        config: EngineConfig,
        sink: EngineSink,
        planner: WidthPlanner,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        shape = model.shape
        least = shape.window + shape.backtrack
        if config.replay_length < least:
            raise ValueError(f"replay_length must be at least {least} (window + backtrack), got {config.replay_length}")
        self._model = model
        self._shape = shape
        self._replay_length = config.replay_length
        self._max_context = min(config.max_context or shape.max_context, shape.max_context)
        self._sink = sink
        self._planner = planner
        self._clock = clock
        self._holdings = Holdings(shape.block_count, shape.slot_count, config.growth)
        self._importer = Importer(model, config.replay_length)
        self._exporter = Exporter(model, config.replay_length)
        self._write_back = WriteBack(self._exporter, sink)
        self._stepper = Stepper(model, self._write_back.choice_advanced)
        self._prompts = Prompts(model, config.replay_length)
        self._roster = Roster(self._holdings, self._prompts, self._write_back, sink)
        self._plan = StepPlan(self._roster, planner, config.budget, self._roster.cover)
        self._handed_over: list[FirstRow[Hidden]] = []
        self._admitted_count = 0
        self._step_count = 0
        self._figures = StepFigures()
        self._is_draining = False

    # Commands

    def admit(self, request: GenerationRequest | PrefillRequest) -> AdmitInfo:
        """Take a request in; it holds its blocks and slots and waits for `start`.

        raises   PromptTooLong, TokenOutOfRange, InvalidArgument, ExceedsCapacity; OutOfBlocks, OutOfSlots, Draining;
                 AlreadyExists unless its attempt is greater than that of the running one, which then ends (Superseded)
        """
        older = self._roster.states.get(request.request_id)
        if older is not None:
            if request.attempt <= older.request.attempt:
                raise AlreadyExists(
                    f"attempt {older.request.attempt} of request {request.request_id} runs here",
                    reason="ATTEMPT_NOT_NEWER",
                    attempt=older.request.attempt,
                )
            self._roster.fail(
                older, Superseded(f"attempt {request.attempt} replaces this one", attempt=request.attempt)
            )
        if self._is_draining:
            raise Draining("the engine takes no new requests")
        state = new_state(
            request,
            number=self._admitted_count,
            shape=self._shape,
            max_context=self._max_context,
            choice_seed=self._model.choice_seed,
        )
        check_prompt_logprobs(state, self._replay_length)
        waiting = [other for other in self._roster if other.phase is Phase.WAITING]
        if any(other.request.priority >= request.priority for other in waiting):
            raise OutOfBlocks(f"{len(waiting)} requests wait for blocks", waiting=len(waiting))
        self._roster.add(state)
        self._admitted_count += 1
        ends = entries_of_ended(state)
        if ends:
            self._sink.on_tokens(self._step_count, ends)
        slots = len(state.live)
        return AdmitInfo(blocks=sum(len(s.blocks) for s in state.live), slots=slots)

    def load_prefix(self, request_id: str, prefix: PrefixRows) -> None:
        """Load a prefix hit into an admitted request. Raises UnknownRequest, WrongPhase, HitNotUsable, BadRows."""
        state = self._roster.admitted(request_id)
        if state is not None and state.live:
            _check_runs_here(state)
            self._importer.prefix(state, prefix)

    def load_rows(self, request_id: str, rows: SequenceOf[LogicalRows]) -> None:
        """Load some rows of a prompt prefilled elsewhere. Raises UnknownRequest, WrongPhase, BadRows, HitNotUsable."""
        state = self._roster.admitted(request_id)
        if state is not None and state.live:
            _check_runs_here(state)
            self._importer.rows(state, rows)

    def load_prompt(self, request_id: str, handover: HandoverRows) -> None:
        """Load what is left of a prompt prefilled elsewhere; its choices run from the next step on.

        raises   UnknownRequest, WrongPhase; BadRows, HitNotUsable: the request is as it was and `start` can run the
                 prompt here
        """
        state = self._roster.admitted(request_id)
        if state is None or not state.live:
            return self.start(request_id)
        _check_runs_here(state)
        if len(handover.hidden_row) != self._shape.hidden_bytes:
            raise BadRows(f"a hidden row has {self._shape.hidden_bytes} bytes, got {len(handover.hidden_row)}")
        self._importer.rows(state, handover.rows)
        self._importer.check_complete(state)
        state.is_started = True
        self._prompts.plan(state)
        state.cached_tokens = max(state.hit_tokens, handover.cached_tokens)
        # The other side stores what belongs to the prompt alone.
        state.exported_blocks = state.prompt_length // BLOCK_TOKENS
        state.exported_snapshots.add(snapshot_position(state.prompt_length, self._replay_length))
        state.phase = Phase.LOADED
        self._handed_over.append(FirstRow(state, self._model.hidden_from_bytes(handover.hidden_row), 0))

    def start(self, request_id: str) -> None:
        """Run the prompt here from what is loaded. Raises UnknownRequest, WrongPhase."""
        state = self._roster.admitted(request_id)
        if state is None:
            self._roster.known(request_id).is_started = True
            return
        state.is_started = True
        if not state.live:
            return self._roster.end(state)
        self._prompts.start(state)

    def finish(self, request_id: str, choice: int, end_index: int) -> bool:
        """End a choice normally after `end_index` output tokens; later ones are dropped.

        returns  False when it had ended already, or has fewer tokens
        raises   UnknownRequest
        """
        state, sequence = self._roster.choice(request_id, choice)
        if end_index > len(sequence.output):
            return False
        del sequence.output[end_index:]
        if sequence.is_done:
            return False
        self._roster.end_choice(state, sequence, FinishReason.STOP)
        return True

    def cancel(self, request_id: str) -> bool:
        """Drop a request in any phase; nothing of it is stored and no event comes. False: it is not here."""
        state = self._roster.states.get(request_id)
        if state is None:
            return False
        self._roster.remove(state)
        return True

    def pause(self, request_id: str, choice: int) -> None:
        """Skip the rows of a choice from the next step on; it keeps what it holds. Raises UnknownRequest."""
        self._roster.choice(request_id, choice)[1].is_paused = True

    def resume(self, request_id: str, choice: int) -> None:
        """Undo `pause`. Raises UnknownRequest."""
        self._roster.choice(request_id, choice)[1].is_paused = False

    def move(self, request_id: str) -> None:
        """End a request with Moved: it goes on elsewhere from its next indices. Raises UnknownRequest."""
        self._roster.fail(self._roster.known(request_id), moved())

    def drain(self) -> None:
        """Take no new requests."""
        self._is_draining = True

    def undrain(self) -> None:
        """Take new requests again."""
        self._is_draining = False

    def fail_all(self, error: MeshError) -> None:
        """End every request with `error`."""
        for state in list(self._roster):
            self._roster.fail(state, error)

    # Steps

    def step(self) -> bool:
        """Run one step. False: nothing could run."""
        self._roster.take_back_waiting()
        decodes = self._plan.decodes()
        chunks = self._plan.chunks(sum(rows.width + 1 for rows in decodes))
        handed_over = [start for start in self._handed_over if start.state.phase is Phase.LOADED]
        self._handed_over = []
        if not (decodes or chunks or handed_over):
            return False
        rows = sum(row.width + 1 for row in decodes)
        prompt_rows = sum(chunk.count for chunk in chunks)
        context = sum(row.sequence.frontier for row in decodes)
        began = self._clock()
        self._step_count += 1
        try:
            going_on = self._run(decodes, chunks, handed_over)
            drafting_since = self._clock()
            drafted = self._stepper.draft(going_on, self._planner.draft_width)
        except Exception:
            involved = [r.state for r in decodes] + [r.state for r in chunks] + [r.state for r in handed_over]
            logger.exception("step failed", extra={"step": self._step_count, "requests": len(involved)})
            for state in involved:
                self._roster.fail(state, Internal("a step of this request failed"))
            self._figures.note(rows + prompt_rows, self._clock() - began, has_prompt_rows=bool(chunks))
            return True
        ended = self._clock()
        self._figures.note(rows + prompt_rows, ended - began, has_prompt_rows=bool(chunks))
        self._planner.observe(
            StepTimes(
                rows=rows + prompt_rows,
                choices=len(decodes),
                context=context,
                prompt_rows=prompt_rows,
                drafted=drafted,
                step_s=drafting_since - began,
                draft_s=ended - drafting_since,
            )
        )
        return True

    def stats(self) -> EngineStats:
        """This moment's numbers."""
        states = list(self._roster)
        waiting = sum(state.phase is Phase.WAITING for state in states)
        return EngineStats(
            running=len(states) - waiting,
            waiting=waiting,
            runnable=sum(is_runnable(state) for state in states),
            block_count=self._holdings.blocks.block_count,
            free_blocks=self._holdings.blocks.free_count,
            slot_count=self._holdings.slots.slot_count,
            free_slots=self._holdings.slots.free_count,
            step_count=self._step_count,
            step_time_ema_s=self._figures.step_time_s,
            prefill_tokens_per_s_ema=self._figures.prefill_tokens_per_s,
            accept_length_ema=self._figures.accept_length,
            verify_width=self._figures.verify_width,
            planner=self._planner.stats(),
        )

    def _run(
        self, decodes: list[DecodeRows], chunks: list[ChunkRows], handed_over: list[FirstRow[Hidden]]
    ) -> list[tuple[RequestState, Sequence]]:
        """Forward, sample and tell; the choices that got tokens and go on."""
        starts = list(handed_over)
        made: list[tuple[RequestState, Sequence, TokenEntry | None]] = []
        if decodes or chunks:
            hidden = self._stepper.forward(decodes, chunks)
            made += [(rows.state, rows.sequence, entry) for rows, entry in self._stepper.verify(decodes, hidden)]
            self._planner.verified(self._stepper.take_rounds())
            told = [entry for _, _, entry in made if entry is not None]
            self._figures.note_drafts([entry.verified for entry in told], [entry.accepted for entry in told])
            starts += self._advance(chunks, hidden, sum(rows.width + 1 for rows in decodes))
        for start in starts:
            made += self._begin_choices(start)
        entries = [entry for _, _, entry in made if entry is not None]
        if entries:
            self._sink.on_tokens(self._step_count, entries)
        for state, sequence, entry in made:
            if sequence.is_stuck:
                self._roster.fail(state, sequence.failure or nothing_allowed(sequence))
            elif state.phase is not Phase.GONE and entry is not None and entry.finish_reason is not None:
                self._roster.end_choice(state, sequence, entry.finish_reason)
        return [(state, s) for state, s, _ in made if state.phase is not Phase.GONE and _goes_on(s)]

    def _advance(self, chunks: list[ChunkRows], hidden: Hidden, first_row: int) -> list[FirstRow[Hidden]]:
        starts: list[FirstRow[Hidden]] = []
        for rows in chunks:
            state, sequence, old = rows.state, rows.sequence, rows.sequence.frontier
            is_prompt, completes = rows.is_prompt, rows.completes_prompt
            self._stepper.report_prompt(rows, hidden, first_row)
            first_row += len(chunk_outputs(rows))
            sequence.frontier += rows.count
            if is_prompt:
                self._write_back.prompt_advanced(state, sequence)
            else:
                self._write_back.choice_advanced(state, sequence, old)
            if completes:
                starts.append(FirstRow(state, hidden, first_row - 1))
        return starts

    def _begin_choices(self, start: FirstRow[Hidden]) -> list[tuple[RequestState, Sequence, TokenEntry | None]]:
        """The prompt is complete: share it among the choices and sample where nothing has been emitted yet."""
        state = start.state
        if state.is_prefill_only:
            self._hand_over(start)
            return []
        fresh = self._prompts.share(state)
        for sequence in state.sequences:
            if sequence.is_done:
                self._holdings.give_back_sequence(sequence)
        return [(state, sequence, entry) for sequence, entry in self._stepper.first_tokens(start, fresh)]

    def _hand_over(self, start: FirstRow[Hidden]) -> None:
        state, run = start.state, start.state.run
        assert run is not None, "a complete prompt was planned"
        request_id = state.request.request_id
        self._sink.on_prefill_rows(request_id, self._exporter.final_rows(state))
        hidden_row = self._model.hidden_to_bytes(start.hidden, start.row)
        self._roster.remove(state)
        self._sink.on_prefilled(request_id, hidden_row, state.prompt_length - run.run_start)


def nothing_allowed(sequence: Sequence) -> NothingAllowed:
    """The error of a request one of whose choices cannot go on."""
    return NothingAllowed(
        f"no token may come at output index {len(sequence.output)} of choice {sequence.index}: bans, forced tokens and "
        "the constraint leave none",
        choice_index=sequence.index,
        output_index=len(sequence.output),
    )


def _goes_on(sequence: Sequence) -> bool:
    return not (sequence.is_done or sequence.is_paused or sequence.is_stuck)


def _check_runs_here(state: RequestState) -> None:
    """Raises HitNotUsable where every row of the prompt is wanted."""
    if state.prompt_logprobs_wanted is not None:
        raise HitNotUsable("log-probabilities of a prompt need all its rows to run here")
