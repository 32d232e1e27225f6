"""What the `openai` and `anthropic` packages do by themselves: retries, time-outs, classes of errors, leaving early."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import grpc
import httpx
import openai
import pytest
from shoal.admin.v1 import admin_service_pb2 as admin
from shoal.admin.v1 import admin_service_pb2_grpc as admin_rpc
from support.gateway_mesh import GatewayMesh, gateway_mesh
from support.mesh import wait_for

PLAIN: dict[str, Any] = {
    "model": "deepseek-flash",
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 12,
    "seed": 5,
    "extra_body": {"thinking": {"type": "disabled"}, "ignore_eos": True},
}
LONG: dict[str, Any] = {**PLAIN, "max_tokens": 3000, "stream": True}
SLOTS = 8


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayMesh]:
    """A rank of 2 ms a token with few places."""
    rank = {"SHOAL_MOCK_RANK_MS_PER_TOKEN": "2", "SHOAL_MOCK_RANK_SLOT_COUNT": str(SLOTS)}
    with gateway_mesh(tmp_path_factory.mktemp("mesh"), rank=rank) as made:
        yield made


@pytest.fixture
def asked(mesh: GatewayMesh) -> Iterator[Callable[..., Any]]:
    """`chat.completions.create` with the client's own settings first; nothing is held after the test."""

    def create(fields: dict[str, Any], **settings: Any) -> Any:
        settings = {"max_retries": 0, "timeout": 20, **settings}
        client: Any = openai.OpenAI(base_url=mesh.url, api_key="none", **settings)
        return client.chat.completions.create(**{**PLAIN, **fields})

    yield create
    wait_for(lambda: held(mesh) == 0, what=lambda: f"{held(mesh)} places are held")


def held(mesh: GatewayMesh) -> float:
    """Places taken at the rank."""
    with grpc.insecure_channel(mesh.ranks[0].address) as channel:
        stub: Any = admin_rpc.AdminServiceStub(channel)
        return SLOTS - float(stub.GetStatus(admin.GetStatusRequest(), timeout=5).numbers["free_slots"])


def test_async_streams_side_by_side_are_the_answers_asked_alone(mesh: GatewayMesh, asked: Callable[..., Any]) -> None:
    async def said(client: openai.AsyncOpenAI, seed: int) -> str:
        stream: Any = await client.chat.completions.create(**{**PLAIN, "seed": seed, "stream": True})
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_said() -> list[str]:
        async with openai.AsyncOpenAI(base_url=mesh.url, api_key="none", timeout=20) as client:
            return list(await asyncio.gather(*(said(client, seed) for seed in range(6))))

    together = asyncio.run(all_said())
    assert together == [asked({"seed": seed}).choices[0].message.content for seed in range(6)]
    assert len(set(together)) == 6


def test_the_stream_helper_puts_the_whole_answer_together(mesh: GatewayMesh, asked: Callable[..., Any]) -> None:
    client: Any = openai.OpenAI(base_url=mesh.url, api_key="none", timeout=20)
    # The helper takes an answer that ends by length for a failure.
    ended = {"max_tokens": 60, "stop": asked({"max_tokens": 60}).choices[0].message.content[30:33]}
    whole = asked(ended)
    with client.chat.completions.stream(**PLAIN | ended, stream_options={"include_usage": True}) as stream:
        kinds = [event.type for event in stream]
        made = stream.get_final_completion()
    assert made.choices[0].message.content == whole.choices[0].message.content
    assert made.usage.completion_tokens == whole.usage.completion_tokens
    assert made.choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    assert kinds.count("content.delta") > 2
    assert kinds.count("content.done") == 1


@pytest.mark.parametrize("leave", ["close", "cancel"])
def test_a_stream_that_is_left_frees_its_place(mesh: GatewayMesh, asked: Callable[..., Any], leave: str) -> None:
    async def cancelled() -> None:
        async with openai.AsyncOpenAI(base_url=mesh.url, api_key="none", timeout=20) as client:

            async def read() -> None:
                stream: Any = await client.chat.completions.create(**LONG)
                async for _ in stream:
                    begun.set()

            begun = asyncio.Event()
            task = asyncio.create_task(read())
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    began_s = time.monotonic()
    if leave == "cancel":
        asyncio.run(cancelled())
    else:
        stream = asked(LONG)
        next(iter(stream))
        stream.close()
    wait_for(lambda: held(mesh) == 0, what=lambda: "the place is still held", timeout_s=2.0)
    assert time.monotonic() - began_s < 4.0


def test_a_timeout_is_the_sdks_own_and_frees_the_place(asked: Callable[..., Any]) -> None:
    with pytest.raises(openai.APITimeoutError):
        asked({"max_tokens": 3000}, timeout=0.3)


def test_the_sdk_waits_out_a_full_mesh_as_retry_after_says(mesh: GatewayMesh, asked: Callable[..., Any]) -> None:
    streams = [asked({**LONG, "seed": seed}) for seed in range(SLOTS)]
    wait_for(lambda: held(mesh) == SLOTS, what=lambda: f"{held(mesh)} places are held")
    with pytest.raises(openai.InternalServerError) as caught:
        asked({})
    assert caught.value.status_code == 503
    assert caught.value.type == "service_unavailable_error"
    assert float(caught.value.response.headers["retry-after"]) >= 1
    statuses: list[int] = []
    refused = threading.Event()

    def heard(response: httpx.Response) -> None:
        statuses.append(response.status_code)
        refused.set()

    def free() -> None:
        refused.wait(10)
        for stream in streams:
            stream.close()

    freeing = threading.Thread(target=free)
    freeing.start()
    with httpx.Client(event_hooks={"response": [heard]}) as http:
        answer = asked({}, max_retries=2, http_client=http)
    freeing.join()
    assert statuses == [503, 200]
    assert answer.usage.completion_tokens == 12


@pytest.mark.parametrize(
    ("change", "error", "code", "param"),
    [
        ({"model": "nobody"}, openai.NotFoundError, "model_not_found", None),
        ({"temperature": 9}, openai.BadRequestError, "invalid_argument", "temperature"),
        (
            {"messages": [{"role": "user", "content": "word " * 9000}]},
            openai.BadRequestError,
            "context_length_exceeded",
            "messages",
        ),
        ({"n": 99}, openai.BadRequestError, "invalid_argument", "n"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refused_request_raises_the_sdks_class_with_code_and_field(
    asked: Callable[..., Any],
    change: dict[str, Any],
    error: type[openai.APIStatusError],
    code: str,
    param: str,
    stream: bool,
) -> None:
    with pytest.raises(error) as caught:
        asked({**change, "stream": stream})
    assert (caught.value.code, caught.value.param) == (code, param)
    assert caught.value.type == "invalid_request_error"


@pytest.fixture
def claude(mesh: GatewayMesh) -> Iterator[Any]:
    """Anthropic's client; nothing is held after the test."""
    with anthropic.Anthropic(base_url=f"http://{mesh.http}", api_key="none", max_retries=0, timeout=20) as client:
        yield client
    wait_for(lambda: held(mesh) == 0, what=lambda: f"{held(mesh)} places are held")


def asked_of(seed: int = 5, **fields: Any) -> dict[str, Any]:
    """A request of Messages."""
    plain = {"model": "deepseek-flash", "max_tokens": 12, "messages": PLAIN["messages"]}
    return {**plain, "thinking": {"type": "disabled"}, **fields, "extra_body": {"seed": seed, "ignore_eos": True}}


@pytest.mark.parametrize("is_thinking", [False, True])
def test_the_stream_of_messages_puts_the_whole_message_together(claude: Any, is_thinking: bool) -> None:
    fields = asked_of(thinking={"type": "enabled", "budget_tokens": 1024}) if is_thinking else asked_of()
    whole = claude.messages.create(**fields)
    with claude.messages.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        made = stream.get_final_message()
    [block], [built] = whole.content, made.content
    kind = "thinking" if is_thinking else "text"
    assert (block.type, getattr(block, kind)) == (built.type, getattr(built, kind))
    assert getattr(block, kind)
    assert (made.stop_reason, made.usage.output_tokens) == (whole.stop_reason, 12) == ("max_tokens", 12)
    assert made.usage == whole.usage
    assert kinds.count(kind) > 2
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


def test_messages_are_counted_as_they_are_used_and_answered_as_chat(asked: Callable[..., Any], claude: Any) -> None:
    answer = claude.messages.create(**asked_of())
    counted = claude.messages.count_tokens(
        model="claude-of-no-year", messages=PLAIN["messages"], thinking={"type": "disabled"}
    )
    assert counted.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    assert answer.content[0].text == asked({}).choices[0].message.content


def test_a_stop_sequence_is_named(claude: Any) -> None:
    text = claude.messages.create(**asked_of(max_tokens=60)).content[0].text
    stop = text[30:33]
    answer = claude.messages.create(**asked_of(max_tokens=60, stop_sequences=["no such text", stop]))
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].text == text[: text.index(stop)]


def test_a_stream_of_messages_that_is_left_frees_its_place(mesh: GatewayMesh, claude: Any) -> None:
    with claude.messages.stream(**asked_of(max_tokens=3000)) as stream:
        next(stream.text_stream)
        assert held(mesh) == 1
    wait_for(lambda: held(mesh) == 0, what=lambda: "the place is still held", timeout_s=2.0)


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"model": "nobody"}, "model_not_found", "model"),
        ({"top_p": 7}, "invalid_argument", "top_p"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, "context_length_exceeded", "messages"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refused_message_raises_the_class_of_anthropics_sdk(
    claude: Any, change: dict[str, Any], code: str, param: str | None, stream: bool
) -> None:
    fields = asked_of()
    fields["extra_body"] = {**fields["extra_body"], **change}
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(**fields, stream=stream)
    error = caught.value.body["error"]  # type: ignore[index]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", code, param)
