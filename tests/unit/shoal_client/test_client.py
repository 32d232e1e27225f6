"""Both clients against a real server whose answers tell what was asked."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import shoal_client
from shoal.common.v1.sampling_pb2 import FinishReason, SamplingParams
from shoal.common.v1.tokens_pb2 import TokenIds
from shoal.inference.v1 import inference_service_pb2 as pb
from shoal.inference.v1.generation_pb2 import AnswerTail, Choice, ChoiceDelta, Generation, Progress
from shoal.inference.v1.inference_service_pb2_grpc import (
    InferenceServiceServicer,
    add_InferenceServiceServicer_to_server,
)
from shoal_client import AioClient, Client, InvalidRequest, ModelNotFound, Text, Unavailable, generation
from shoal_common.errors import InvalidArgument, NotFound, OutOfCapacity
from shoal_common.errors import Unavailable as MeshUnavailable
from shoal_common.rpc import Readiness, RpcServer, Service
from shoal_common.telemetry import Metrics


class Parrot(InferenceServiceServicer):
    """Answers tokens with themselves and text with itself; some models fail."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        _fail_by_model(request.generation)
        asked = request.generation
        delta = ChoiceDelta(text=asked.text or asked.chat.messages[0].content if not asked.HasField("tokens") else "")
        delta.tokens.CopyFrom(asked.tokens)
        done = Choice(output=delta, finish_reason=FinishReason.FINISH_REASON_LENGTH)
        return pb.GenerateResponse(choices=[done], tail=AnswerTail(exact=True))

    async def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: Any
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        try:
            # What has to be passed over: a sign of life, and an event of a newer server.
            yield pb.GenerateStreamResponse(progress=Progress(queue_position=2))
            yield pb.GenerateStreamResponse.FromString(b"\xfa\x01\x00")
            for one in request.generation.tokens.ids:
                yield pb.GenerateStreamResponse(delta=ChoiceDelta(tokens=TokenIds(ids=[one])))
                if request.generation.model == "stuck":
                    await asyncio.Event().wait()
            _fail_by_model(request.generation)
            yield pb.GenerateStreamResponse(tail=AnswerTail(exact=True))
        finally:
            self.cancelled.set()

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[pb.Model(id="shoal-nano")])


def _fail_by_model(asked: Generation) -> None:
    if asked.model == "none":
        raise NotFound("no model none", reason="MODEL_NOT_FOUND", model="none")
    if asked.model == "bad":
        raise InvalidArgument.at("generation.n", "must be 1 to 8, got 9")
    if asked.model == "full":
        raise MeshUnavailable("no room", reason=OutOfCapacity.reason, retry_after_s=2.5)


@pytest.fixture
async def parrot() -> AsyncIterator[tuple[str, Parrot]]:
    servicer = Parrot()
    service = Service("shoal.inference.v1.InferenceService", add_InferenceServiceServicer_to_server, servicer)
    server = RpcServer([service], listen_address="127.0.0.1:0", readiness=Readiness(), metrics=Metrics())
    yield await server.start(), servicer
    await server.stop(0)


async def test_the_blocking_client_generates_streams_and_lists(parrot: tuple[str, Parrot]) -> None:
    def work() -> tuple[str, list[int], list[str]]:
        with Client(parrot[0]) as client:
            text = client.generate(generation("hello")).choices[0].output.text
            events = list(client.stream(generation([5, 6], sampling=SamplingParams(temperature=0))))
            assert [event.WhichOneof("event") for event in events] == ["delta", "delta", "tail"]
            tokens = [token for event in events for token in event.delta.tokens.ids]
            return text, tokens, [model.id for model in client.models()]

    assert await asyncio.to_thread(work) == ("hello", [5, 6], ["shoal-nano"])


async def test_the_aio_client_generates_streams_and_lists(parrot: tuple[str, Parrot]) -> None:
    async with AioClient(parrot[0]) as client:
        assert (await client.generate(generation(Text("raw")))).choices[0].output.text == "raw"
        events = [event async for event in client.stream(generation([7]))]
        assert [event.WhichOneof("event") for event in events] == ["delta", "tail"]
        assert [model.id for model in await client.models()] == ["shoal-nano"]


async def test_failures_are_typed_with_reason_metadata_and_delay(parrot: tuple[str, Parrot]) -> None:
    async with AioClient(parrot[0]) as client:
        with pytest.raises(ModelNotFound) as missing:
            await client.generate(generation("x", model="none"))
        assert (missing.value.reason, missing.value.metadata) == ("MODEL_NOT_FOUND", {"model": "none"})
        with pytest.raises(InvalidRequest, match=r"generation\.n"):
            await client.generate(generation("x", model="bad"))
        with pytest.raises(Unavailable) as full:
            async for _ in client.stream(generation([1], model="full")):
                pass
        assert full.value.retry_after_s == 2.5


async def test_leaving_a_stream_cancels_the_request(parrot: tuple[str, Parrot]) -> None:
    address, servicer = parrot
    async with AioClient(address) as client:
        stream = client.stream(generation([1, 2], model="stuck"))
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        await asyncio.wait_for(servicer.cancelled.wait(), 5)


async def test_no_server_is_unavailable() -> None:
    async with AioClient("127.0.0.1:1") as client:
        with pytest.raises(Unavailable) as caught:
            await client.models(timeout_s=5)
    assert caught.value.reason == ""


def test_prompts_of_every_shape_become_their_message() -> None:
    assert generation("hi").chat.messages[0].content == "hi"
    assert generation(Text("once")).text == "once"
    assert list(generation([1, 2]).tokens.ids) == [1, 2]
    talk = generation(
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}], reasoning_effort=0
    )
    assert [message.content for message in talk.chat.messages] == ["be brief", "hi"]
    assert talk.chat.HasField("reasoning_effort")


@pytest.mark.parametrize(
    "messages", [[{"role": "robot", "content": "x"}], [{"role": "user", "name": "x"}], [1, {"role": "user"}]]
)
def test_a_prompt_of_no_known_shape_is_refused(messages: Any) -> None:
    with pytest.raises(ValueError, match=r"role|fields|mixture"):
        generation(messages)


def test_importing_the_client_loads_grpcio_and_protobuf_only() -> None:
    program = f"""
import sys
import {shoal_client.__name__}
tops = {{name.partition('.')[0] for name in sys.modules}}
print(sorted(tops & {{'nats', 'opentelemetry', 'shoal_common', 'torch', 'httpx', 'prometheus_client', 'numpy'}}))
print('google.rpc' in sys.modules)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.split("\n")[:2] == ["[]", "False"]
