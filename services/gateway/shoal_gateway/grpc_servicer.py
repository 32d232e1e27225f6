"""shoal.inference.v1: the same answers by gRPC, in text or in tokens."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import grpc
from google.protobuf.timestamp_pb2 import Timestamp
from shoal.inference.v1 import generation_pb2
from shoal.inference.v1 import inference_service_pb2 as pb
from shoal.inference.v1.inference_service_pb2_grpc import InferenceServiceServicer
from shoal_common.errors import InvalidArgument, SlowReader

from shoal_gateway.answer import Answer, Answers
from shoal_gateway.deltas import DeltaWriter, collect, is_empty
from shoal_gateway.edge.caller import Caller
from shoal_gateway.edge.edge import Edge
from shoal_gateway.edge.keys import secret_of
from shoal_gateway.encode import Encoder
from shoal_gateway.generation import PreparedGeneration, prepare
from shoal_gateway.journal import UNFINISHED
from shoal_gateway.metrics import GatewayMetrics
from shoal_gateway.output_reader import ChoiceOutput

Context = grpc.aio.ServicerContext[Any, Any]
_API = "grpc"


class InferenceServicer(InferenceServiceServicer):
    """The public service.

    keep_alive_s      wall clock between two messages of a stream at most, counted from acceptance
    write_timeout_s   a client that takes nothing for so long is cut
    """

    def __init__(
        self,
        encoder: Encoder,
        answers: Answers,
        edge: Edge,
        *,
        metrics: GatewayMetrics,
        keep_alive_s: float,
        write_timeout_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._encoder, self._answers, self._edge, self._metrics = encoder, answers, edge, metrics
        self._keep_alive_s, self._write_timeout_s, self._clock = keep_alive_s, write_timeout_s, clock

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        """The whole answer."""
        response = pb.GenerateResponse()
        async with contextlib.aclosing(self._events(request, context)) as events:
            async for event in events:
                collect(response, event)
        return response

    # Writes itself instead of yielding: only so can it see that the client takes nothing.
    async def GenerateStream(  # type: ignore[override]
        self, request: pb.GenerateStreamRequest, context: Context
    ) -> None:
        """The answer's events as they come."""
        async with contextlib.aclosing(self._events(request, context)) as events:
            async for event in events:
                try:
                    async with asyncio.timeout(self._write_timeout_s):
                        await context.write(event)
                except TimeoutError as error:
                    self._metrics.slow_readers.inc()
                    raise SlowReader(f"the client took nothing for {self._write_timeout_s:g} s") from error

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        """The one model."""
        self._edge.authenticate(_secret(context))
        model = self._encoder.model
        listed = pb.Model(
            id=model.name,
            aliases=model.aliases,
            create_time=Timestamp(seconds=model.created_s),
            max_context_tokens=self._encoder.context_tokens,
            vocab_size=model.vocab_size,
        )
        return pb.ListModelsResponse(models=[listed])

    async def _events(
        self, request: pb.GenerateRequest | pb.GenerateStreamRequest, context: Context
    ) -> AsyncGenerator[pb.GenerateStreamResponse, None]:
        began_s = time.perf_counter()
        key = self._edge.authenticate(_secret(context))
        with self._edge.enter(key, api=_API) as caller:
            prepared, opened = await self._open(request, caller)
            async with opened as answer:
                yield pb.GenerateStreamResponse(head=self._head(answer, prepared))
                async for event in self._pieces(answer, prepared, began_s):
                    yield event
                tail = generation_pb2.AnswerTail(usage=answer.usage(), exact=answer.is_exact)
                yield pb.GenerateStreamResponse(tail=tail)

    async def _pieces(
        self, answer: Answer, prepared: PreparedGeneration, began_s: float
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        writers = [DeltaWriter(index, has_tokens=prepared.has_tokens) for index in range(prepared.request.choice_count)]
        is_first, said_s = True, time.perf_counter()
        while not answer.is_finished:
            outputs = await answer.read(max(0.0, said_s + self._keep_alive_s - time.perf_counter()))
            if outputs and is_first:
                self._metrics.ttft.observe(time.perf_counter() - began_s)
                is_first = False
            # Output that is held back leaves a batch without events.
            events = [made for one in outputs if (made := _event(writers[one.choice_index], one)) is not None]
            if not events and time.perf_counter() - said_s >= self._keep_alive_s:
                events.append(pb.GenerateStreamResponse(progress=_progress(answer)))
            for event in events:
                yield event
            if events:
                said_s = time.perf_counter()

    async def _open(
        self, request: pb.GenerateRequest | pb.GenerateStreamRequest, caller: Caller
    ) -> tuple[PreparedGeneration, Answer]:
        if not request.HasField("generation"):
            raise InvalidArgument.at("generation", "is required")
        with self._answers.accepting():
            await self._answers.turn()
            prepared = await prepare(request.generation, self._encoder)
            answer = await self._answers.open(caller.admit(prepared.request))
        caller.follow(answer)
        return prepared, answer

    def _head(self, answer: Answer, prepared: PreparedGeneration) -> generation_pb2.AnswerHead:
        now_s = self._clock()
        return generation_pb2.AnswerHead(
            request_id=answer.request_id,
            model=prepared.model,
            create_time=Timestamp(seconds=int(now_s), nanos=int(now_s % 1 * 1e9)),
            seed=prepared.request.params.seed,
        )


def _event(writer: DeltaWriter, output: ChoiceOutput) -> pb.GenerateStreamResponse | None:
    delta = writer.delta(output)
    if output.finish_reason != UNFINISHED:
        finish = generation_pb2.Choice(output=delta, finish_reason=output.finish_reason)
        return pb.GenerateStreamResponse(finish=finish)
    return None if is_empty(delta) else pb.GenerateStreamResponse(delta=delta)


def _progress(answer: Answer) -> generation_pb2.Progress:
    return generation_pb2.Progress(queue_position=answer.queue_position)


def _secret(context: Context) -> bytes:
    shown = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    return secret_of(shown.get("authorization", ""), shown.get("x-api-key", ""))
