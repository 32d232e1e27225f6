"""shoal.inference.v1: the same answers by gRPC, in text or in tokens."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
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

Context = grpc.aio.ServicerContext[Any, Any]
_WAIT_S = 60.0
_API = "grpc"


class InferenceServicer(InferenceServiceServicer):
    """The public service."""

    def __init__(
        self,
        encoder: Encoder,
        answers: Answers,
        edge: Edge,
        *,
        metrics: GatewayMetrics,
        write_timeout_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._encoder, self._answers, self._edge, self._metrics = encoder, answers, edge, metrics
        self._write_timeout_s, self._clock = write_timeout_s, clock

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
                writers = [
                    DeltaWriter(index, has_tokens=prepared.has_tokens) for index in range(prepared.request.choice_count)
                ]
                is_first = True
                while not answer.is_finished:
                    for output in await answer.read(_WAIT_S):
                        if is_first:
                            self._metrics.ttft.observe(time.perf_counter() - began_s)
                            is_first = False
                        delta = writers[output.choice_index].delta(output)
                        if output.finish_reason != UNFINISHED:
                            finish = generation_pb2.Choice(output=delta, finish_reason=output.finish_reason)
                            yield pb.GenerateStreamResponse(finish=finish)
                        elif not is_empty(delta):
                            yield pb.GenerateStreamResponse(delta=delta)
                tail = generation_pb2.AnswerTail(usage=answer.usage(), exact=answer.is_exact)
                yield pb.GenerateStreamResponse(tail=tail)

    async def _open(
        self, request: pb.GenerateRequest | pb.GenerateStreamRequest, caller: Caller
    ) -> tuple[PreparedGeneration, Answer]:
        if not request.HasField("generation"):
            raise InvalidArgument.at("generation", "is required")
        with self._answers.accepting():
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


def _secret(context: Context) -> bytes:
    shown = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    return secret_of(shown.get("authorization", ""), shown.get("x-api-key", ""))
