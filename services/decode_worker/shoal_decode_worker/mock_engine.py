"""An engine whose model takes no time: tokens are a pure function of seed, prompt and position. For load and faults.

It keeps the promises of EngineLike, counts blocks and slots, and runs on the event loop: no torch, no thread.
"""

from __future__ import annotations

import asyncio
import hashlib
from concurrent.futures import Future
from dataclasses import dataclass, field

from shoal_common.draft_counts import DraftCounts
from shoal_common.errors import OutOfCapacity

from shoal_decode_worker.engine_like import EngineEvents, EngineStats, StepEntry
from shoal_decode_worker.entries import FinishReason, RequestUsage, TokenEntry
from shoal_decode_worker.generation import EngineFacts, ExceedsCapacity, GenerationStart
from shoal_decode_worker.ledger import MAX_UNACKNOWLEDGED

BLOCK_TOKENS = 128
HELD_TOKENS = 2048
"""Output tokens for which blocks are held at admission."""


class OutOfBlocks(OutOfCapacity):
    """Fewer blocks are free than the request holds."""

    reason = "OUT_OF_BLOCKS"


class OutOfSlots(OutOfCapacity):
    """Fewer state slots are free than the request has choices."""

    reason = "OUT_OF_SLOTS"


@dataclass(frozen=True, slots=True, kw_only=True)
class MockModel:
    """What the model says. `lowest_token_id` .. `vocab_size` - 1 come out; `eos_token_id` among them ends a choice."""

    vocab_size: int
    lowest_token_id: int
    eos_token_id: int

    def token(self, key: bytes, index: int) -> int:
        """The token at output index `index` of the choice that `key` names."""
        digest = hashlib.blake2b(index.to_bytes(8, "little"), digest_size=8, key=key).digest()
        span = self.vocab_size - self.lowest_token_id
        return self.lowest_token_id + int.from_bytes(digest, "little") % span

    @staticmethod
    def key(start: GenerationStart, choice_index: int) -> bytes:
        """Names a choice: its seed, its prompt and its index."""
        state = hashlib.blake2b(start.prompt_ids.tobytes(), digest_size=32)
        state.update(start.sampling.seed.to_bytes(8, "little") + choice_index.to_bytes(4, "little"))
        return state.digest()


@dataclass(slots=True, kw_only=True)
class _Choice:
    key: bytes
    next_index: int
    limit: int
    is_ended: bool


@dataclass(slots=True, kw_only=True)
class _Sequenced:
    start: GenerationStart
    max_tokens: int
    blocks: int
    choices: list[_Choice]
    has_begun: bool = False
    steps: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)
    is_first: bool = True


class MockEngine:
    """Implements EngineLike. Invariant: free and held blocks, and slots, add up to the facts' counts.

    step_s         pause between two steps; 0 steps as fast as the loop turns
    step_tokens    tokens per choice and step, as if that many drafts less one were accepted
    """

    def __init__(self, facts: EngineFacts, model: MockModel, *, step_s: float, step_tokens: int) -> None:
        self.facts = facts
        self.is_running = True
        self._model, self._step_s, self._step_tokens = model, step_s, step_tokens
        self._requests: dict[tuple[str, int], _Sequenced] = {}
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
        request = self._requests.get((request_id, attempt))
        if request is not None:
            request.has_begun = True
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
            self._work.set()

    def cancel(self, request_id: str, attempt: int) -> None:
        """Abort."""
        self._release(request_id, attempt)

    def stats(self) -> EngineStats:
        """Counts for the load report."""
        width = self._step_tokens - 1
        return EngineStats(
            running=sum(one.has_begun for one in self._requests.values()),
            waiting=sum(not one.has_begun for one in self._requests.values()),
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
        """Step for ever."""
        while True:
            await self._work.wait()
            self._work.clear()
            # A step at a time, and the loop turns between two of them: that is when acknowledgements come in.
            if self._run_step():
                self._work.set()
            await asyncio.sleep(self._step_s)

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
            start=start, max_tokens=max_tokens, blocks=blocks, choices=choices
        )

    def _release(self, request_id: str, attempt: int) -> _Sequenced | None:
        request = self._requests.pop((request_id, attempt), None)
        if request is not None:
            self._free_blocks += request.blocks
            self._free_slots += len(request.choices)
        return request

    def _run_step(self) -> bool:
        assert self._events is not None
        self._step += 1
        entries = [
            entry for request in self._requests.values() if request.has_begun for entry in self._advance(request)
        ]
        if entries:
            self._events.on_step(self._step, entries)
        for (request_id, attempt), request in list(self._requests.items()):
            if request.has_begun and all(choice.is_ended for choice in request.choices):
                self._release(request_id, attempt)
                self._events.on_ended(request_id, attempt, _usage(request))
        return bool(entries)

    def _advance(self, request: _Sequenced) -> list[StepEntry]:
        entries = []
        for index, choice in enumerate(request.choices):
            entry = None if choice.is_ended else self._emit(request, index, choice)
            if entry is not None:
                start = request.start
                entries.append(StepEntry(request_id=start.request_id, attempt=start.attempt, entry=entry))
        request.steps += bool(entries)
        return entries

    def _emit(self, request: _Sequenced, index: int, choice: _Choice) -> TokenEntry | None:
        first, sampling = choice.next_index, request.start.sampling
        tokens: list[int] = []
        reason = FinishReason.LENGTH if first >= request.max_tokens else None
        while reason is None and len(tokens) < self._step_tokens and first + len(tokens) < choice.limit:
            token = self._model.token(choice.key, first + len(tokens))
            tokens.append(token)
            is_eos = token == self._model.eos_token_id and not sampling.ignore_eos
            count = first + len(tokens)
            if (is_eos or token in sampling.stop_token_ids) and count > sampling.min_tokens:
                reason = FinishReason.STOP
            elif count >= request.max_tokens:
                reason = FinishReason.LENGTH
        if not tokens and reason is None:
            return None
        choice.next_index = first + len(tokens)
        choice.is_ended = reason is not None
        accepted = max(0, len(tokens) - 1)
        request.drafts.add(accepted, accepted, accepted)
        self._drafted += accepted
        cached, request.is_first = (0 if request.is_first else None), False
        return TokenEntry(
            choice_index=index,
            output_index=first,
            token_ids=tuple(tokens),
            drafted_count=accepted,
            verified_count=accepted,
            accepted_count=accepted,
            finish_reason=reason,
            cached_tokens=cached,
        )


def _usage(request: _Sequenced) -> RequestUsage:
    return RequestUsage(
        prompt_tokens=len(request.start.prompt_ids),
        draft_tokens=sum(request.drafts.verified),
        accepted_draft_tokens=sum(request.drafts.accepted),
        decode_step_count=request.steps,
        drafts=request.drafts,
    )
