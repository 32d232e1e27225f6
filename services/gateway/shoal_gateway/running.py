"""One request under way: placed, admitted, interrupted, placed again, until it is complete, failed or given up."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from shoal.common.v1 import sampling_pb2
from shoal.decode.v1 import decode_service_pb2 as decode_pb
from shoal.scheduler.v1 import scheduler_service_pb2 as pb
from shoal_common.draft_counts import DraftCounts
from shoal_common.errors import DeadlineExceeded, Internal, MeshError
from shoal_common.telemetry import inject

from shoal_gateway import scheduler_messages
from shoal_gateway.attempt import Workers
from shoal_gateway.encode import Prepared
from shoal_gateway.entry_sinks import DraftStep
from shoal_gateway.journal import UNFINISHED, EntriesMissing, FinishReason
from shoal_gateway.metrics import GatewayMetrics
from shoal_gateway.output_reader import OutputReader
from shoal_gateway.prefix_chains import FairShare
from shoal_gateway.refusals import ExactnessLost, NoCapacity, denied
from shoal_gateway.reserve_client import ReserveClient
from shoal_gateway.session import Lost, Phase, Refused, Session
from shoal_gateway.worker_link import WorkerLink

logger = logging.getLogger(__name__)

_CLOSING_S = 10.0
"""A worker has so long to end the call of a complete answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long a request may take."""

    start_s: float
    """Until its first output."""
    total_s: float


class WritesThrough(Protocol):
    """Who may do a waiting reader's work."""

    def __call__(self) -> bool:
        """Read what there is. False: the reader is needed."""

    def tokens(self, choice_index: int, token_ids: list[int]) -> bool:
        """Take tokens that have just come; `flush` follows. False: they are not taken."""

    def flush(self) -> None:
        """Write what the tokens taken have led to."""


class Running:
    """Drives one Session. Reserving and AttemptListener at once; belongs to the event loop.

    share       whose share of the queue it takes, as the scheduler may know it
    on_change   called when there is output to read or the request has failed
    on_ended    called once, when nothing is held for the request any more
    """

    def __init__(
        self,
        *,
        request_id: str,
        model: str,
        prepared: Prepared,
        share: FairShare,
        chains: list[pb.HashChain],
        reader: OutputReader,
        reserve: ReserveClient,
        workers: Workers,
        timeouts: Timeouts,
        metrics: GatewayMetrics,
        on_change: Callable[[], None],
        on_ended: Callable[[], None],
    ) -> None:
        self._request_id, self._model, self._prepared, self._chains = request_id, model, prepared, chains
        self._share = share
        self._reader, self._reserve, self._workers, self._metrics = reader, reserve, workers, metrics
        self._on_change, self._on_ended = on_change, on_ended
        self._loop = asyncio.get_running_loop()
        # Placements arrive in the context of the scheduler's stream; attempts belong into the request's own.
        self._context = contextvars.copy_context()
        self._traceparent = inject().get("traceparent", "")
        self._began_s = self._loop.time()
        self._deadline_s = self._began_s + timeouts.total_s
        self._timers = [
            self._loop.call_later(timeouts.start_s, self._start_expired, timeouts.start_s),
            self._loop.call_at(self._deadline_s, self._expired, timeouts.total_s),
        ]
        self._task: asyncio.Task[None] | None = None
        self._link: WorkerLink | None = None
        self._worker_id = ""
        self._received = [0] * prepared.choice_count
        self._last_step = -1
        self._is_over = False
        self.session = Session(prepared.choice_count)
        self.error: MeshError | None = None
        self.outcome = ""
        self.queue_position: int | None = None
        self.cached_tokens = 0
        self.drafts = DraftCounts()
        self.step_count = 0
        self.through: WritesThrough | None = None
        """Takes tokens past the reader where it can."""

    @property
    def request_id(self) -> str:
        """Its name."""
        return self._request_id

    @property
    def waits(self) -> bool:
        """It waits for a placement."""
        return not self.session.is_running

    def usage(self) -> sampling_pb2.Usage:
        """What it used up to now; output counts what was read, up to the end of each choice."""
        return sampling_pb2.Usage(
            prompt_tokens=len(self._prepared.prompt_ids),
            completion_tokens=sum(self._reader.counts),
            cached_prompt_tokens=self.cached_tokens,
            reasoning_tokens=min(self._reader.reasoning_tokens, sum(self._reader.counts)),
            draft_tokens=sum(self.drafts.verified),
            accepted_draft_tokens=sum(self.drafts.accepted),
            decode_step_count=self.step_count,
            drafted_by_position=self.drafts.drafted,
            verified_by_position=self.drafts.verified,
            accepted_by_position=self.drafts.accepted,
        )

    def start(self) -> None:
        """Ask for a placement."""
        self._reserve.submit(self)

    def introduction(self) -> pb.ReserveRequest:
        """Submit while it waits, Adopt while it runs."""
        now_s = self._loop.time()
        submit = scheduler_messages.submit(
            self._prepared,
            model=self._model,
            share=self._share,
            chains=self._chains,
            remaining_s=max(0.0, self._deadline_s - now_s),
            waited_s=now_s - self._began_s,
            traceparent=self._traceparent,
        )
        return scheduler_messages.introduction(
            self._request_id, self.session, submit, "" if self.waits else self._worker_id
        )

    def on_queued(self, position: int) -> None:
        """It waits behind so many others."""
        self.queue_position = position

    def on_placement(self, placement: pb.Placement) -> None:
        """Where to run: open the next attempt there."""
        if self.waits and self._prepared.is_exact and not self.session.keeps_exact(placement.numerics_id):
            self.fail(ExactnessLost("no worker is left that would go on with the same bits", retry_after_s=1.0))
            return
        attempt = self.session.place(placement.numerics_id, placement.constraint_id)
        if attempt is not None:
            self._worker_id = placement.decode.instance_id
            self._received = self.session.journal.counts()
            self._task = self._loop.create_task(self._attempt(attempt, placement), context=self._context)

    @property
    def has_output(self) -> bool:
        """Some choice has said something."""
        return self.session.journal.has_output

    def on_denied(self, reason: str, retry_after_s: float | None) -> None:
        """It will not run, unless it does already."""
        if self.waits:
            self.fail(denied(reason, retry_after_s))

    def on_link(self, link: WorkerLink) -> None:
        """Acknowledgements go here from now on."""
        self._link = link

    def on_admitted(self, numerics_id: str) -> None:
        """The worker holds the request."""
        attempt = self.session.attempt
        if self.session.admitted(attempt):
            message = pb.ReserveRequest(request_id=self._request_id, admitted=pb.Admitted(attempt=attempt))
            self._reserve.tell(message, can_wait=True)

    def on_entry(self, entry: decode_pb.Entry, step: int) -> None:
        """Tokens of the current attempt; entries of any other are dropped."""
        session = self.session
        # Entries may come before the admission does; they prove it.
        if not session.admitted(entry.attempt):
            return
        index, first = entry.choice_index, entry.output_index
        token_ids = list(entry.token_ids)
        finish_reason = entry.finish_reason
        journal = session.journal
        try:
            was_finished = index < len(self._received) and journal.choices[index].is_finished
            known = journal.take(index, first, token_ids, finish_reason)
        except EntriesMissing as error:
            self._attempt_failed(entry.attempt, error)
            return
        end = first + len(token_ids)
        if end > self._received[index]:
            self._received[index] = end
        if was_finished:
            self._acknowledge(index, self._received[index], is_end=True)
            return
        if not known:
            # What is sent once more was counted the first time.
            self._count(entry, step)
        self._reader.add(
            index,
            token_ids[known:] if known else token_ids,
            entry.logprobs[known:],
            finish_reason,
            prompt_logprobs=() if known else entry.prompt_logprobs,
        )

    def on_tokens(
        self, attempt: int, choice_index: int, output_index: int, token_ids: list[int], step: int, drafts: DraftStep
    ) -> bool:
        """The short way of an entry that says nothing else, which most are; see on_entry."""
        session = self.session
        if (attempt != session.attempt or session.phase is not Phase.RUNNING) and not session.admitted(attempt):
            return False
        choice = session.journal.choices[choice_index]
        if output_index != len(choice.output_ids) or choice.finish_reason != UNFINISHED:
            entry = decode_pb.Entry(
                attempt=attempt, choice_index=choice_index, output_index=output_index, token_ids=token_ids
            )
            entry.drafted_count, entry.verified_count, entry.accepted_count = drafts
            self.on_entry(entry, step)
            return False
        choice.output_ids.extend(token_ids)
        self._received[choice_index] = output_index + len(token_ids)
        if drafts[0]:
            self.drafts.add(*drafts)
        if step != self._last_step and output_index:
            self.step_count += 1
            self._last_step = step
        through = self.through
        if through is not None and through.tokens(choice_index, token_ids):
            return True
        self._reader.add(choice_index, token_ids, (), UNFINISHED)
        return False

    def on_frame_end(self) -> None:
        """There is something to read, unless all of it was known."""
        if self.through is not None:
            self.through.flush()
        if self._reader.has_arrived:
            self._on_change()

    def on_worker_lost(self, error: MeshError) -> None:
        """The stream of the worker is gone: so is the attempt."""
        self._attempt_failed(self.session.attempt, error)

    def next_indices(self) -> list[int]:
        """The next output index wanted, per choice."""
        return list(self._received)

    def taken(self, choice_index: int, next_index: int) -> None:
        """The client has everything below `next_index` of a choice."""
        is_end = self.session.journal.choices[choice_index].is_finished
        if is_end:
            next_index = max(next_index, self._received[choice_index])
        self._acknowledge(choice_index, next_index, is_end=is_end)

    def finish_choice(self, choice_index: int, end_index: int, reason: FinishReason) -> None:
        """The text of a choice ended: the worker is to stop there."""
        self.session.journal.finish(choice_index, end_index, reason)
        if self._link is not None:
            self._link.finish((self._request_id, self.session.attempt), choice_index, end_index)

    def give_up(self) -> None:
        """Nobody wants the answer any more. What is complete already ends in its own time."""
        if not self.session.journal.is_finished:
            self._stop(None, "cancelled")
        elif self._task is not None and not self._task.done():
            # The worker ends the call once it knows that nothing is missing any more.
            for choice_index, next_index in enumerate(self._received):
                self._acknowledge(choice_index, next_index, is_end=True)
            self._timers.append(self._loop.call_later(_CLOSING_S, self._task.cancel))

    def fail(self, error: MeshError) -> None:
        """The request is over without an answer."""
        self._stop(error, error.reason.lower())

    async def _attempt(self, attempt: int, placement: pb.Placement) -> None:
        request = self._workers.request(
            request_id=self._request_id,
            attempt=attempt,
            prepared=self._prepared,
            placement=placement,
            choices=self.session.journal.choices,
        )
        try:
            left_s = max(0.001, self._deadline_s - self._loop.time())
            await self._workers.run(request, placement.decode, self, timeout_s=left_s)
            if not self.session.journal.is_finished:
                raise EntriesMissing("the worker ended the request before all of its choices")
        except asyncio.CancelledError:
            if self.session.is_current(attempt) and self.session.journal.is_finished:
                self._complete()
            raise
        except MeshError as error:
            self._attempt_failed(attempt, error)
        except Exception as error:
            logger.error("an attempt failed unexpectedly", extra={"request_id": self._request_id}, exc_info=error)
            self.fail(Internal("internal error; the server's log has the details"))
        else:
            self._complete()

    def _attempt_failed(self, attempt: int, error: MeshError) -> None:
        error = self._prepared.as_asked(error)
        was_current = self.session.is_current(attempt)
        verdict = self.session.failed(attempt, error)
        if not was_current:
            return
        self._link = None
        task, self._task = self._task, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        if isinstance(verdict, Refused):
            self._metrics.refused_attempts.labels(verdict.reason).inc()
            self._tell(refused=pb.Refused(attempt=attempt, reason=verdict.reason))
        elif isinstance(verdict, Lost):
            logger.warning("attempt lost", extra={"request_id": self._request_id, "reason": error.reason})
            self._metrics.moves.labels(error.reason.lower()).inc()
            lost = pb.Lost(attempt=attempt, cause=verdict.cause, output_counts=verdict.output_counts)
            self._tell(lost=lost)
        elif verdict is not None:
            self._over(verdict.error, verdict.error.reason.lower())
        else:
            self._over(None, "ok")

    def _tell(self, **message: object) -> None:
        self._reserve.tell(pb.ReserveRequest(request_id=self._request_id, **message))  # type: ignore[arg-type]

    def _complete(self) -> None:
        if self.session.end():
            self._over(None, "ok")

    def _stop(self, error: MeshError | None, outcome: str) -> None:
        if not self.session.end():
            return
        task, self._task = self._task, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        self._over(error, outcome)

    def _over(self, error: MeshError | None, outcome: str) -> None:
        """The one way out: books closed, timers off, whoever waits is told."""
        if self._is_over:
            return
        self._is_over = True
        for timer in self._timers:
            timer.cancel()
        usage = self.usage()
        last_word = scheduler_messages.last_word(self._request_id, usage, is_complete=outcome == "ok")
        self._reserve.forget(self._request_id, last_word)
        self._metrics.requests.labels(outcome).inc()
        self._metrics.output_tokens.inc(usage.completion_tokens)
        self._metrics.cached_tokens.inc(usage.cached_prompt_tokens)
        self._metrics.duration.observe(self._loop.time() - self._began_s)
        self.error, self.outcome = error, outcome
        self._on_change()
        self._on_ended()

    def _acknowledge(self, choice_index: int, next_index: int, *, is_end: bool) -> None:
        if self._link is not None:
            self._link.acknowledge((self._request_id, self.session.attempt), choice_index, next_index, is_end=is_end)

    def _count(self, entry: decode_pb.Entry, step: int) -> None:
        if entry.HasField("cached_tokens") and not self.cached_tokens:
            self.cached_tokens = min(entry.cached_tokens, len(self._prepared.prompt_ids))
            self._reader.cached_tokens = self.cached_tokens
        if drafted := entry.drafted_count:
            self.drafts.add(drafted, entry.verified_count, entry.accepted_count)
        if entry.output_index and step != self._last_step:
            self.step_count += 1
            self._last_step = step

    def _start_expired(self, start_s: float) -> None:
        if not self.session.journal.has_output:
            self.fail(NoCapacity(f"inference has not begun in {start_s:g} s", reason="DEADLINE", retry_after_s=5.0))

    def _expired(self, total_s: float) -> None:
        self.fail(DeadlineExceeded(f"the answer took longer than {total_s:g} s", timeout_s=total_s))
