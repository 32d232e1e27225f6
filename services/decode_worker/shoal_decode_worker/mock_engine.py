"""An engine whose model takes no time: tokens are a pure function of seed, prompt and position. For load and faults.

It keeps the promises of EngineLike, counts blocks and slots, and runs on the event loop: no torch, no thread.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import dataclass, field

from shoal_common.draft_counts import DraftCounts
from shoal_common.errors import OutOfCapacity

from shoal_decode_worker.engine_like import EngineEvents, EngineStats, StepEntry
from shoal_decode_worker.entries import FinishReason, RequestUsage, TokenEntry
from shoal_decode_worker.generation import EngineFacts, ExceedsCapacity, GenerationStart, SamplingSpec
from shoal_decode_worker.ledger import MAX_UNACKNOWLEDGED
from shoal_decode_worker.mock_model import RUN_TOKENS, MockModel

_Key = tuple[str, int]
BLOCK_TOKENS = 128
_STEPS_A_TURN = 8
"""Of a model that takes no time."""
HELD_TOKENS = 2048
"""Output tokens for which blocks are held at admission."""


class OutOfBlocks(OutOfCapacity):
    """Fewer blocks are free than the request holds."""

    reason = "OUT_OF_BLOCKS"


class OutOfSlots(OutOfCapacity):
    """Fewer state slots are free than the request has choices."""

    reason = "OUT_OF_SLOTS"


@dataclass(slots=True, kw_only=True)
class _Choice:
    key: bytes
    next_index: int
    limit: int
    is_ended: bool
    run: tuple[int, ...] = ()
    run_index: int | None = None


@dataclass(slots=True, kw_only=True)
class _Sequenced:
    start: GenerationStart
    max_tokens: int
    blocks: int
    choices: list[_Choice]
    stop_ids: frozenset[int]
    steps: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)
    is_first: bool = True


class MockEngine:
    """Implements EngineLike. Invariant: free and held blocks, and slots, add up to the facts' counts; a running request
    whose choices have all ended is named in `_maybe_over` until the end of the next step.

    step_s         pause between two steps; 0 steps as fast as the loop turns
    step_tokens    tokens per choice and step, as if that many drafts less one were accepted
    """

    def __init__(self, facts: EngineFacts, model: MockModel, *, step_s: float, step_tokens: int) -> None:
        self.facts = facts
        self.is_running = True
        self._model, self._step_s, self._step_tokens = model, step_s, step_tokens
        self._requests: dict[_Key, _Sequenced] = {}
        self._running: dict[_Key, _Sequenced] = {}
        self._maybe_over: list[_Key] = []
        self._free_blocks, self._free_slots = facts.block_count, facts.slot_count
        self._step = 0
        self._drafted = 0
        self._work = asyncio.Event()
        self._events: EngineEvents | None = None

    def attach(self, events: EngineEvents) -> None:
        """Where to report."""
        self._events = events

    def admit(self, start: GenerationStart) -> Future[None]:
        """Hold blocks and slots."""
        answer: Future[None] = Future()
        try:
            self._admit(start)
        except (OutOfCapacity, ExceedsCapacity) as error:
            answer.set_exception(error)
        else:
            answer.set_result(None)
        return answer

    def begin(self, request_id: str, attempt: int) -> Future[None]:
        """Run from the next step on."""
        key = (request_id, attempt)
        request = self._requests.get(key)
        if request is not None:
            self._running[key] = request
            self._maybe_over.append(key)
            self._work.set()
        answer: Future[None] = Future()
        answer.set_result(None)
        return answer

    def grant(self, request_id: str, attempt: int, choice_index: int, limit: int) -> None:
        """Raise a limit."""
        request = self._requests.get((request_id, attempt))
        if request is not None:
            request.choices[choice_index].limit = limit
            self._work.set()

    def finish(self, request_id: str, attempt: int, choice_index: int, end_index: int) -> None:
        """End a choice."""
        request = self._requests.get((request_id, attempt))
        if request is not None:
            request.choices[choice_index].is_ended = True
            self._maybe_over.append((request_id, attempt))
            self._work.set()

    def cancel(self, request_id: str, attempt: int) -> None:
        """Abort."""
        self._release(request_id, attempt)

    def stats(self) -> EngineStats:
        """Counts for the load report."""
        width = self._step_tokens - 1
        return EngineStats(
            running=len(self._running),
            waiting=len(self._requests) - len(self._running),
            free_blocks=self._free_blocks,
            free_slots=self._free_slots,
            step_count=self._step,
            step_time_s=self._step_s,
            verify_width=width,
            accept_length=width,
            draft_tokens=self._drafted,
            accepted_tokens=self._drafted,
        )

    async def run(self) -> None:
        """Step for ever. Raises what a step does; the engine does not run any more then."""
        try:
            while True:
                await self._work.wait()
                self._work.clear()
                # The loop turns between steps: that is when acknowledgements come in. It need not for each that takes
                # no time: a turn costs as much as a step.
                for _ in range(1 if self._step_s else _STEPS_A_TURN):
                    if not self._run_step():
                        break
                else:
                    self._work.set()
                await asyncio.sleep(self._step_s)
        finally:
            self.is_running = False

    def _admit(self, start: GenerationStart) -> None:
        max_tokens = start.max_tokens(self.facts.max_context)
        ahead = [min(max_tokens, len(one.output_ids) + HELD_TOKENS) for one in start.choices if not one.is_finished]
        blocks = sum(-(-(len(start.prompt_ids) + tokens) // BLOCK_TOKENS) for tokens in ahead)
        slots = len(start.choices)
        if blocks > self.facts.block_count:
            raise ExceedsCapacity(
                f"{blocks} blocks wanted, this worker has {self.facts.block_count}",
                wanted=blocks,
                block_count=self.facts.block_count,
            )
        if blocks > self._free_blocks:
            raise OutOfBlocks(
                f"{blocks} blocks wanted, {self._free_blocks} free", wanted=blocks, free=self._free_blocks
            )
        if slots > self._free_slots:
            raise OutOfSlots(f"{slots} slots wanted, {self._free_slots} free", wanted=slots, free=self._free_slots)
        self._free_blocks -= blocks
        self._free_slots -= slots
        choices = [
            _Choice(
                key=self._model.key(start, index),
                next_index=len(one.output_ids),
                limit=len(one.output_ids) + MAX_UNACKNOWLEDGED,
                is_ended=one.is_finished,
            )
            for index, one in enumerate(start.choices)
        ]
        self._requests[(start.request_id, start.attempt)] = _Sequenced(
            start=start, max_tokens=max_tokens, blocks=blocks, choices=choices, stop_ids=self._stop_ids(start.sampling)
        )

    def _stop_ids(self, sampling: SamplingSpec) -> frozenset[int]:
        eos = () if sampling.ignore_eos else (self._model.eos_token_id,)
        return frozenset((*eos, *sampling.stop_token_ids))

    def _release(self, request_id: str, attempt: int) -> _Sequenced | None:
        request = self._requests.pop((request_id, attempt), None)
        self._running.pop((request_id, attempt), None)
        if request is not None:
            self._free_blocks += request.blocks
            self._free_slots += len(request.choices)
        return request

    def _run_step(self) -> bool:
        assert self._events is not None
        self._step += 1
        entries: list[StepEntry] = []
        for request in self._running.values():
            self._advance(request, entries)
        if entries:
            self._events.on_step(self._step, entries)
        maybe_over, self._maybe_over = self._maybe_over, []
        for key in maybe_over:
            over = self._running.get(key)
            if over is not None and all(choice.is_ended for choice in over.choices):
                self._release(*key)
                self._events.on_ended(*key, _usage(over))
        return bool(entries)

    def _advance(self, request: _Sequenced, entries: list[StepEntry]) -> None:
        start, before = request.start, len(entries)
        for index, choice in enumerate(request.choices):
            if not choice.is_ended:
                entry = self._emit(request, index, choice)
                if entry is not None:
                    entries.append(StepEntry(start.request_id, start.attempt, entry))
        request.steps += len(entries) > before

    def _emit(self, request: _Sequenced, index: int, choice: _Choice) -> TokenEntry | None:
        first = choice.next_index
        tokens: tuple[int, ...] = ()
        reason = FinishReason.LENGTH if first >= request.max_tokens else None
        if reason is None:
            count = min(self._step_tokens, choice.limit - first, request.max_tokens - first)
            if count <= 0:
                return None
            tokens, reason = self._stopped(request, first, self._tokens(choice, first, count))
        choice.next_index = first + len(tokens)
        if reason is not None:
            choice.is_ended = True
            self._maybe_over.append((request.start.request_id, request.start.attempt))
        accepted = max(0, len(tokens) - 1)
        if accepted:
            request.drafts.add(accepted, accepted, accepted)
            self._drafted += accepted
        cached, request.is_first = (0 if request.is_first else None), False
        return TokenEntry(
            choice_index=index,
            output_index=first,
            token_ids=tokens,
            drafted_count=accepted,
            verified_count=accepted,
            accepted_count=accepted,
            finish_reason=reason,
            cached_tokens=cached,
        )

    def _tokens(self, choice: _Choice, first: int, count: int) -> tuple[int, ...]:
        tokens: tuple[int, ...] = ()
        while len(tokens) < count:
            run_index, place = divmod(first + len(tokens), RUN_TOKENS)
            if run_index != choice.run_index:
                choice.run, choice.run_index = self._model.run(choice.key, run_index), run_index
            tokens += choice.run[place : place + count - len(tokens)]
        return tokens

    @staticmethod
    def _stopped(
        request: _Sequenced, first: int, tokens: tuple[int, ...]
    ) -> tuple[tuple[int, ...], FinishReason | None]:
        """The tokens up to one that ends the choice, and why it ends, if it does."""
        if not request.stop_ids.isdisjoint(tokens):
            for count, token in enumerate(tokens, 1):
                if token in request.stop_ids and first + count > request.start.sampling.min_tokens:
                    return tokens[:count], FinishReason.STOP
        return tokens, FinishReason.LENGTH if first + len(tokens) >= request.max_tokens else None


def _usage(request: _Sequenced) -> RequestUsage:
    return RequestUsage(
        prompt_tokens=len(request.start.prompt_ids),
        draft_tokens=sum(request.drafts.verified),
        accepted_draft_tokens=sum(request.drafts.accepted),
        decode_step_count=request.steps,
        drafts=request.drafts,
    )
