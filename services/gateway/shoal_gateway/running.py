"""One request under way: placed, admitted, interrupted, placed again, until it is complete, failed or given up."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable
from dataclasses import dataclass

from shoal.scheduler.v1 import scheduler_service_pb2 as pb
from shoal_common.errors import DeadlineExceeded, Internal, MeshError
from shoal_common.telemetry import inject

from shoal_gateway import scheduler_messages
from shoal_gateway.attempt import Workers
from shoal_gateway.encode import Prepared
from shoal_gateway.intake import Intake
from shoal_gateway.journal import EntriesMissing
from shoal_gateway.metrics import GatewayMetrics
from shoal_gateway.output_reader import OutputReader
from shoal_gateway.prefix_chains import FairShare
from shoal_gateway.refusals import ExactnessLost, NoCapacity, denied
from shoal_gateway.reserve_client import ReserveClient
from shoal_gateway.session import Lost, Refused, Session

logger = logging.getLogger(__name__)

_CLOSING_S = 10.0
"""A worker has so long to end the call of a complete answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long a request may take."""

    start_s: float
    """Until its first output."""
    total_s: float


def _nobody() -> None:
    """Listens no more."""


class Running:
    """Drives one Session. Reserving and AttemptListener at once; belongs to the event loop. What comes is its intake's.

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
        self._reserve, self._workers, self._metrics = reserve, workers, metrics
        self._on_change, self._on_ended = on_change, on_ended
        self._loop = asyncio.get_running_loop()
        # Placements arrive in the context of the scheduler's stream; attempts belong into the request's own.
        self._context = contextvars.copy_context()
        self._traceparent = inject().get("traceparent", "")
        self._began_s = self._loop.time()
        self._timeouts = timeouts
        self._deadline_s = self._began_s + timeouts.total_s
        self._timer = self._loop.call_later(min(timeouts.start_s, timeouts.total_s), self._start_expired)
        self._task: asyncio.Task[None] | None = None
        self._worker_id = ""
        self._is_over = False
        self.session = Session(prepared.choice_count)
        self.intake = Intake(
            request_id=request_id,
            session=self.session,
            reader=reader,
            prompt_tokens=len(prepared.prompt_ids),
            on_change=on_change,
            on_failed=self._attempt_failed,
        )
        self.error: MeshError | None = None
        self.outcome = ""
        self.queue_position: int | None = None

    @property
    def request_id(self) -> str:
        """Its name."""
        return self._request_id

    @property
    def waits(self) -> bool:
        """It waits for a placement."""
        return not self.session.is_running

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
            self.intake.begin()
            self._task = self._loop.create_task(self._attempt(attempt, placement), context=self._context)

    @property
    def has_output(self) -> bool:
        """Some choice has said something."""
        return self.session.journal.has_output

    def on_denied(self, reason: str, retry_after_s: float | None) -> None:
        """It will not run, unless it does already."""
        if self.waits:
            self.fail(denied(reason, retry_after_s))

    def on_admitted(self, numerics_id: str) -> None:
        """The worker holds the request."""
        attempt = self.session.attempt
        if self.session.admitted(attempt):
            message = pb.ReserveRequest(request_id=self._request_id, admitted=pb.Admitted(attempt=attempt))
            self._reserve.tell(message, can_wait=True)

    def give_up(self) -> None:
        """Nobody wants the answer any more. What is complete already ends in its own time."""
        if not self.session.journal.is_finished:
            self._stop(None, "cancelled")
        elif self._task is not None and not self._task.done():
            # The worker ends the call once it knows that nothing is missing any more.
            self.intake.acknowledge_all()
            self._timer.cancel()
            self._timer = self._loop.call_later(_CLOSING_S, self._task.cancel)

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
        self.intake.link = None
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
        self._timer.cancel()
        usage = self.intake.usage()
        last_word = scheduler_messages.last_word(self._request_id, usage, is_complete=outcome == "ok")
        self._reserve.forget(self._request_id, last_word)
        self._metrics.requests.of(outcome).inc()
        self._metrics.output_tokens.inc(usage.completion_tokens)
        self._metrics.cached_tokens.inc(usage.cached_prompt_tokens)
        self._metrics.duration.observe(self._loop.time() - self._began_s)
        self.error, self.outcome = error, outcome
        self._on_change()
        self._on_ended()
        # Nothing more is told; whoever listened may go, without the circle that only a collection would find.
        self._on_change = self._on_ended = _nobody
        self.intake.leave()

    def _start_expired(self) -> None:
        """No later than this an answer has begun. One that has gets the rest of its time."""
        if not self.session.journal.has_output and self._timeouts.start_s <= self._timeouts.total_s:
            start_s = self._timeouts.start_s
            self.fail(NoCapacity(f"inference has not begun in {start_s:g} s", reason="DEADLINE", retry_after_s=5.0))
        else:
            self._timer = self._loop.call_at(self._deadline_s, self._expired)

    def _expired(self) -> None:
        total_s = self._timeouts.total_s
        self.fail(DeadlineExceeded(f"the answer took longer than {total_s:g} s", timeout_s=total_s))
