"""POST /v1/chat/completions, streamed and not."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from shoal_common.errors import Internal, MeshError, SlowReader

from shoal_gateway.answer import Answer, Answers
from shoal_gateway.encode import Encoder, PreparedChat
from shoal_gateway.http.chat_chunks import DONE, KEEP_ALIVE, ChunkWriter, WholeAnswer, error_event, usage_object
from shoal_gateway.http.errors import error_body
from shoal_gateway.http.exchange import Exchange
from shoal_gateway.http.positions import position_objects
from shoal_gateway.metrics import GatewayMetrics
from shoal_gateway.output_reader import ChoiceOutput
from shoal_gateway.sampling import applied

logger = logging.getLogger(__name__)


class ChatCompletions:
    """The endpoint. `keep_alive_s` is wall clock between two signs of life on a stream, counted from acceptance;
    `admission_s` is how long a stream's status waits for a worker's word on the request.
    """

    def __init__(
        self,
        encoder: Encoder,
        answers: Answers,
        *,
        metrics: GatewayMetrics,
        keep_alive_s: float,
        admission_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._encoder, self._answers, self._metrics = encoder, answers, metrics
        self._keep_alive_s, self._admission_s, self._clock = keep_alive_s, admission_s, clock

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request."""
        began_s = time.perf_counter()
        with self._answers.accepting():
            body, size_bytes = await exchange.json_object()
            prepared = await self._encoder.chat(body, size_bytes)
            answer = await self._answers.open(prepared.request)
        async with answer, exchange.while_connected():
            shape = _Shape(answer, prepared, created_s=int(self._clock()))
            if prepared.is_stream:
                await self._stream(exchange, answer, shape, began_s)
            else:
                await self._whole(exchange, answer, shape, began_s)

    async def _whole(self, exchange: Exchange, answer: Answer, shape: _Shape, began_s: float) -> None:
        whole = WholeAnswer(answer.prepared.choice_count)
        reported: dict[str, Any] = {}
        is_first = True
        while not answer.is_finished:
            for output in await answer.read(self._keep_alive_s):
                if is_first:
                    self._metrics.ttft.observe(time.perf_counter() - began_s)
                    is_first = False
                whole.add(output.choice_index, output.chunks)
                reported |= self._prompt_report(output)
        await exchange.respond(
            200,
            whole.body(
                answer_id=shape.answer_id,
                model=shape.model,
                created_s=shape.created_s,
                usage=shape.usage(answer),
                extension={**shape.extension, **reported},
            ),
            [(b"content-type", b"application/json"), (b"x-request-id", answer.request_id.encode())],
        )

    async def _stream(self, exchange: Exchange, answer: Answer, shape: _Shape, began_s: float) -> None:
        writer = ChunkWriter(
            answer_id=shape.answer_id, model=shape.model, created_s=shape.created_s, extension=shape.extension
        )
        is_first = True
        events = b""
        written_s = began_s
        try:
            while not answer.is_finished:
                outputs = await answer.read(self._patience_s(answer, began_s, written_s))
                # Judged once: what is written below must have been begun here.
                is_silent = self._patience_s(answer, began_s, written_s) <= 0.0
                if not exchange.has_begun and (outputs or is_silent):
                    # Not before there is something to say: an error until then has a status of its own.
                    await exchange.begin_events([(b"x-request-id", answer.request_id.encode())])
                for output in outputs:
                    if report := self._prompt_report(output):
                        writer.extend(report)
                events = b"".join(writer.chunks(output.choice_index, output.chunks) for output in outputs)
                if outputs and is_first:
                    self._metrics.ttft.observe(time.perf_counter() - began_s)
                    is_first = False
                if answer.is_finished:
                    break
                # Output that is held back (half a character, a possible stop string) leaves a batch without events.
                if events or is_silent:
                    await exchange.write(events or KEEP_ALIVE)
                    written_s = time.perf_counter()
            if shape.include_usage:
                events += writer.usage(shape.usage(answer))
            await exchange.write(events + DONE, is_last=True)
        except SlowReader:
            self._metrics.slow_readers.inc()
            raise
        except MeshError as error:
            if not exchange.has_begun:
                raise
            logger.info("stream ended with an error", extra={"request_id": answer.request_id, "reason": error.reason})
            await exchange.write(error_event(error_body(error)), is_last=True)
        except Exception as error:
            if not exchange.has_begun:
                raise
            logger.error("unexpected error in a stream", extra={"request_id": answer.request_id}, exc_info=error)
            await exchange.write(error_event(error_body(Internal("unexpected error"))), is_last=True)

    def _prompt_report(self, output: ChoiceOutput) -> dict[str, Any]:
        """What the extension says of the prompt's tokens, once."""
        if not output.prompt_logprobs:
            return {}
        return {"prompt_logprobs": position_objects(output.prompt_logprobs, self._encoder.tokenizer)}

    def _patience_s(self, answer: Answer, began_s: float, written_s: float) -> float:
        """How long nothing may be written from now on. A status is final: until a worker has judged, it waits."""
        now_s = time.perf_counter()
        left_s = self._keep_alive_s - (now_s - written_s)
        if not answer.is_admitted:
            left_s = max(left_s, self._admission_s - (now_s - began_s))
        return max(0.0, left_s)


class _Shape:
    """What all parts of one answer say alike."""

    def __init__(self, answer: Answer, prepared: PreparedChat, *, created_s: int) -> None:
        self.answer_id = f"chatcmpl-{answer.request_id}"
        self.model, self.created_s = prepared.model, created_s
        self.include_usage = prepared.include_usage
        params = prepared.request.params
        self.extension: dict[str, Any] = {"seed": params.seed, "applied": applied(params)}
        output = prepared.request.output
        self._is_thinking = output is not None and output.converted.conversation.thinking_mode

    def usage(self, answer: Answer) -> dict[str, Any]:
        """Exact once all has been read."""
        return usage_object(answer.usage(), is_thinking=self._is_thinking)
