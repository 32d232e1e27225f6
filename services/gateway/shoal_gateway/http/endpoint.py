"""Runs one request of any API: prepare, open, then a stream or a whole answer, with signs of life on the wall clock."""

from __future__ import annotations

import logging
import time

from shoal_common.errors import Internal, MeshError, SlowReader

from shoal_gateway.answer import Answers
from shoal_gateway.edge.caller import Caller
from shoal_gateway.edge.edge import Edge
from shoal_gateway.http.exchange import ClientGone, Exchange, request_id_headers
from shoal_gateway.http.form import AnswerForm, OpenAnswer, Prepare, PreparedAnswer
from shoal_gateway.http.write_through import WriteThrough
from shoal_gateway.metrics import GatewayMetrics

logger = logging.getLogger(__name__)

_BLANK_LINE = b"\n"
"""JSON may begin with any number of them."""
_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_JSON = [(b"content-type", b"application/json")]


class Endpoint:
    """One path that generates.

    prepare      what makes a request and the form of its answer out of a body
    keep_alive_s wall clock between two signs of life, counted from acceptance
    admission_s  how long the status waits for a worker's word on the request
    """

    def __init__(
        self,
        answers: Answers,
        edge: Edge,
        metrics: GatewayMetrics,
        prepare: Prepare,
        *,
        keep_alive_s: float,
        admission_s: float,
    ) -> None:
        self._answers, self._edge, self._metrics, self._prepare = answers, edge, metrics, prepare
        self._keep_alive_s, self._admission_s = keep_alive_s, admission_s

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request."""
        with self._edge.enter(exchange.key, api=exchange.route, tell=exchange.tell_limits) as caller:
            await self._answer(exchange, caller)

    async def _answer(self, exchange: Exchange, caller: Caller) -> None:
        pace = _Pace(keep_alive_s=self._keep_alive_s, admission_s=self._admission_s)
        with self._answers.accepting():
            body, size_bytes = await exchange.json_object()
            await self._answers.turn()
            prepared = await self._prepare(body, size_bytes)
            answer = await self._open(prepared, caller)
        caller.follow(answer)
        async with answer:
            with exchange.while_connected():
                await self._respond(exchange, caller, prepared, answer, pace)

    async def _respond(
        self, exchange: Exchange, caller: Caller, prepared: PreparedAnswer, answer: OpenAnswer, pace: _Pace
    ) -> None:
        form = prepared.form(answer)
        run = self._stream if prepared.is_stream else self._whole
        try:
            await run(exchange, answer, form, pace)
        except SlowReader:
            self._metrics.slow_readers.inc()
            raise
        except ClientGone:
            raise
        except Exception as error:
            # Before the first byte an error has a status of its own.
            if not exchange.has_begun:
                raise
            known = _known(error, answer.request_id)
            caller.failed(known)
            last = form.error(known) if prepared.is_stream else exchange.error_body(known)
            await exchange.write(last, is_last=True)

    async def _open(self, prepared: PreparedAnswer, caller: Caller) -> OpenAnswer:
        requests = caller.admit_all(prepared.requests)
        if len(requests) > 1:
            return await self._answers.open_group(requests)
        return await self._answers.open(requests[0])

    async def _stream(self, exchange: Exchange, answer: OpenAnswer, form: AnswerForm, pace: _Pace) -> None:
        events = b""

        def wrote_through() -> None:
            pace.wrote()
            if not pace.had_output:
                self._saw_output(pace)

        through = WriteThrough(exchange.write_now, answer, form, wrote_through)
        while not answer.is_finished:
            left, outputs = await through.read(pace.left_s(answer))
            # Output that is held back (half a character, a possible stop string) leaves a batch without events.
            events = left + (form.events(outputs) if outputs else b"")
            # Judged once: what is written below must have been begun here.
            is_due = not events and pace.is_due(answer)
            if (outputs or events) and not pace.had_output:
                self._saw_output(pace)
            if answer.is_finished:
                break
            if not exchange.has_begun and (outputs or is_due):
                first = events or (form.keep_alive if is_due else b"")
                await exchange.begin(_EVENTS + request_id_headers(answer.request_id), first)
                if first:
                    pace.wrote()
                answer.on_news(through)
            elif events or is_due:
                if not exchange.write_now(events or form.keep_alive):
                    await exchange.write(events or form.keep_alive)
                pace.wrote()
        if not exchange.has_begun:
            await exchange.begin(_EVENTS + request_id_headers(answer.request_id))
        await exchange.write(events + form.end(answer.usage()), is_last=True)

    async def _whole(self, exchange: Exchange, answer: OpenAnswer, form: AnswerForm, pace: _Pace) -> None:
        headers = _JSON + request_id_headers(answer.request_id)
        while not answer.is_finished:
            outputs = await answer.read(pace.left_s(answer))
            if outputs:
                if not pace.had_output:
                    self._saw_output(pace)
                form.add(outputs)
            if not answer.is_finished and pace.is_due(answer):
                if not exchange.has_begun:
                    await exchange.begin(headers)
                await exchange.write(_BLANK_LINE)
                pace.wrote()
        body = form.body(answer.usage())
        if exchange.has_begun:
            await exchange.write(body, is_last=True)
        else:
            await exchange.respond(200, body, headers)

    def _saw_output(self, pace: _Pace) -> None:
        pace.had_output = True
        self._metrics.ttft.observe(pace.age_s())


class _Pace:
    """When something has to be said. A status is final: until a worker has judged the request, silence is longer."""

    def __init__(self, *, keep_alive_s: float, admission_s: float) -> None:
        self._keep_alive_s, self._admission_s = keep_alive_s, admission_s
        self._began_s = self._written_s = time.perf_counter()
        self.had_output = False

    def left_s(self, answer: OpenAnswer) -> float:
        """How long nothing may be written from now on."""
        now_s = time.perf_counter()
        left_s = self._keep_alive_s - (now_s - self._written_s)
        if not answer.is_admitted:
            left_s = max(left_s, self._admission_s - (now_s - self._began_s))
        return max(0.0, left_s)

    def is_due(self, answer: OpenAnswer) -> bool:
        """Something has to be written now."""
        return self.left_s(answer) <= 0.0

    def wrote(self) -> None:
        """Something was."""
        self._written_s = time.perf_counter()

    def age_s(self) -> float:
        """Since acceptance."""
        return time.perf_counter() - self._began_s


def _known(error: Exception, request_id: str) -> MeshError:
    """The error as the client may see it."""
    if isinstance(error, MeshError):
        logger.info("answer ended with an error", extra={"request_id": request_id, "reason": error.reason})
        return error
    logger.error("unexpected error in an answer", extra={"request_id": request_id}, exc_info=error)
    return Internal("unexpected error")
