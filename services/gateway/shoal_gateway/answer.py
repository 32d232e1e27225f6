"""What every API shape calls: open an answer, read it batch by batch, close it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence

from deepseek_recipe import Tokenizer
from shoal.common.v1 import sampling_pb2
from shoal_common import request_scope
from shoal_common.errors import Draining

from shoal_gateway.answer_group import AnswerGroup
from shoal_gateway.attempt import Workers
from shoal_gateway.encode import Prepared
from shoal_gateway.intake import WritesThrough
from shoal_gateway.metrics import GatewayMetrics
from shoal_gateway.output_reader import ChoiceOutput, OutputReader
from shoal_gateway.output_shape import Chunk
from shoal_gateway.prefix_chains import PrefixChains
from shoal_gateway.refusals import Overloaded
from shoal_gateway.reserve_client import ReserveClient
from shoal_gateway.running import Running, Timeouts
from shoal_gateway.turns import Turns
from shoal_gateway.waiting import Waiting


class Answer:
    """One answer for one reader. Use as `async with`: leaving the block ends the request wherever it is."""

    def __init__(self, request_id: str, prepared: Prepared, waiting: Waiting) -> None:
        self.request_id, self.prepared = request_id, prepared
        self._waiting = waiting
        self._reader: OutputReader
        self._running: Running
        self._unacknowledged: dict[int, int] = {}
        self._write_through: WritesThrough | None = None

    def bind(self, reader: OutputReader, running: Running) -> None:
        """Where the output comes from."""
        self._reader, self._running = reader, running

    def wake(self) -> None:
        """There is something to read, or an error."""
        write_through = self._write_through
        if write_through is not None and self._waiting.is_waiting and write_through() and not self._running.error:
            return
        self._waiting.wake()

    def on_news(self, write_through: WritesThrough) -> None:
        """Ask `write_through` first from now on, while the reader waits in `read`: it may do the reader's work.

        It returns False where the reader is needed. A task that is woken for every step costs more than what it does.
        """
        self._write_through = write_through
        self._running.intake.through = write_through

    def plain(self, choice_index: int, token_ids: list[int]) -> list[Chunk] | None:
        """What tokens that come right now mean, if the reader waits in `read` and nothing else has to be read before
        or with them. Else None, and they are not taken.
        """
        return self._reader.plain(choice_index, token_ids) if self._waiting.is_waiting else None

    @property
    def is_finished(self) -> bool:
        """All choices have been read to their end."""
        return self._reader.is_finished

    @property
    def is_admitted(self) -> bool:
        """A worker has taken it at least once."""
        return self._running.session.was_admitted

    @property
    def queue_position(self) -> int | None:
        """How many wait before it, as last heard; None where it waits for no placement or nothing was heard."""
        return self._running.queue_position if self._running.waits else None

    @property
    def attempts(self) -> int:
        """Workers that it was given to, one after the other."""
        return self._running.session.attempt

    @property
    def outcome(self) -> str:
        """`ok`, `cancelled`, or the reason of the error that ended it; while it runs, what it would be now."""
        return self._running.outcome or ("ok" if self.is_finished else "cancelled")

    @property
    def is_complete(self) -> bool:
        """All output is here, read or not."""
        return self._running.session.journal.is_finished

    @property
    def is_exact(self) -> bool:
        """False if a move to other numerics may have changed tokens."""
        return self._running.session.is_exact

    def usage(self) -> sampling_pb2.Usage:
        """What it used, up to what was read."""
        return self._running.intake.usage()

    async def read(self, timeout_s: float) -> list[ChoiceOutput]:
        """The next batch; empty if nothing came in `timeout_s`. Calling again says that the last one was delivered.

        Call until `is_finished`. Raises the MeshError that ended the request, once everything before it is read.
        """
        self.acknowledge()
        if not self.has_news and not await self._waiting.wait(timeout_s):
            return []
        return self.take()

    @property
    def has_news(self) -> bool:
        """There is output to read, or an error."""
        return self._reader.has_arrived or self._running.error is not None

    def take(self) -> list[ChoiceOutput]:
        """What is there, without waiting; else as `read`."""
        reader = self._reader
        outputs, ends = reader.read()
        if ends:
            reasons = {output.choice_index: output.finish_reason for output in outputs}
            for choice_index, end_index in ends:
                self._running.intake.finish_choice(choice_index, end_index, reasons[choice_index])
        for output in outputs:
            self._unacknowledged[output.choice_index] = reader.count(output.choice_index)
        if not outputs and self._running.error is not None:
            raise self._running.error
        return outputs

    def close(self) -> None:
        """The reader leaves. Safe to repeat."""
        self._waiting.close()
        self.acknowledge()
        # A circle is garbage that only a collection finds.
        self._write_through = self._running.intake.through = None
        self._running.give_up()

    def acknowledge(self) -> None:
        """What was read is delivered."""
        if self._unacknowledged:
            for choice_index, next_index in self._unacknowledged.items():
                self._running.intake.taken(choice_index, next_index)
            self._unacknowledged.clear()

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class Accepting:
    """A place that is held inside of the block."""

    def __init__(self, count: Callable[[int], None]) -> None:
        self._count = count

    def __enter__(self) -> None:
        self._count(1)

    def __exit__(self, *_: object) -> None:
        self._count(-1)


class Answers:
    """Opens answers. Invariant: at most `max_in_flight` requests are held; none is accepted while draining."""

    def __init__(
        self,
        *,
        model_name: str,
        tokenizer: Tokenizer,
        chains: PrefixChains,
        reserve: ReserveClient,
        workers: Workers,
        timeouts: Timeouts,
        metrics: GatewayMetrics,
        max_in_flight: int,
    ) -> None:
        self._model_name, self._tokenizer, self._chains = model_name, tokenizer, chains
        self._reserve, self._workers = reserve, workers
        self._timeouts, self._metrics, self._max_in_flight = timeouts, metrics, max_in_flight
        self._held: dict[str, Running] = {}
        self._preparing = 0
        self._turns = Turns()
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        metrics.in_flight.set_function(lambda: self.in_flight)

    @property
    def in_flight(self) -> int:
        """Requests held now, from the moment they are accepted."""
        return len(self._held) + self._preparing

    def accepting(self) -> Accepting:
        """Holds a place while the body is read, encoded and opened. Raises Overloaded or Draining before any of it."""
        if self._is_draining:
            raise Draining("the gateway is leaving", retry_after_s=1.0)
        if self.in_flight >= self._max_in_flight:
            raise self._overloaded()
        return Accepting(self._count_preparing)

    def _count_preparing(self, change: int) -> None:
        self._preparing += change
        self._idle.clear()
        self._tell_idle()

    async def turn(self) -> None:
        """Wait until it is the caller's turn to prepare its request, which takes the event loop for a while."""
        await self._turns.take()

    async def open(self, prepared: Prepared) -> Answer:
        """Begin to answer an accepted request."""
        return await self._open(prepared, Waiting())

    async def open_group(self, requests: Sequence[Prepared]) -> AnswerGroup:
        """Begin to answer the requests of one accepted body, all or none. Raises Overloaded."""
        if self.in_flight + len(requests) - 1 > self._max_in_flight:
            raise self._overloaded()
        waiting = Waiting()
        opened: list[Answer] = []
        try:
            for prepared in requests:
                opened.append(await self._open(prepared, waiting))
        except BaseException:
            for answer in opened:
                answer.close()
            raise
        request_scope.request_id.set(opened[0].request_id)
        return AnswerGroup(opened, waiting)

    async def _open(self, prepared: Prepared, waiting: Waiting) -> Answer:
        chains = await self._chains.of_prompt(prepared.prompt_ids, tenant=prepared.tenant, user_id=prepared.user_id)
        request_id = secrets.token_hex(16)
        request_scope.request_id.set(request_id)
        answer = Answer(request_id, prepared, waiting)
        reader = OutputReader(
            prepared.choice_count,
            prepared.output,
            self._tokenizer,
            request_id=request_id,
            prompt_tokens=len(prepared.prompt_ids),
        )
        running = Running(
            request_id=request_id,
            model=self._model_name,
            prepared=prepared,
            share=self._chains.fair_share(prepared.tenant, prepared.user_id),
            chains=chains,
            reader=reader,
            reserve=self._reserve,
            workers=self._workers,
            timeouts=self._timeouts,
            metrics=self._metrics,
            on_change=answer.wake,
            on_ended=lambda: self._ended(request_id),
        )
        answer.bind(reader, running)
        self._held[request_id] = running
        self._metrics.prompt_tokens.observe(len(prepared.prompt_ids))
        running.start()
        return answer

    def set_draining(self, is_draining: bool) -> None:
        """Refuse new requests, or take them again."""
        self._is_draining = is_draining

    async def wait_idle(self) -> None:
        """Return when no request is held."""
        await self._idle.wait()

    def fail_all(self) -> None:
        """End what is left: its clients hear why."""
        for running in list(self._held.values()):
            running.fail(Draining("the gateway is leaving", retry_after_s=1.0))

    def _overloaded(self) -> Overloaded:
        return Overloaded(
            f"{self.in_flight} requests are in flight here", retry_after_s=1.0, max_in_flight=self._max_in_flight
        )

    def _ended(self, request_id: str) -> None:
        self._held.pop(request_id, None)
        self._tell_idle()

    def _tell_idle(self) -> None:
        if not self.in_flight:
            self._idle.set()
