"""LiteLLM against a gateway that serves nano, by each of the names under which people route to it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import litellm
import pytest

SORT = [{"role": "user", "content": "Sort these numbers: 42 7 19 3"}]
OFF = {"extra_body": {"thinking": {"type": "disabled"}}}
# LiteLLM knows by their names which models think.
ANTHROPIC_OFF = {"thinking": {"type": "disabled"}, "allowed_openai_params": ["thinking"]}
# Name for LiteLLM, path after the gateway's base, fields that switch thinking off.
ROUTES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "openai": ("openai/deepseek-flash", "/v1", OFF),
    "deepseek": ("deepseek/deepseek-flash", "", OFF),
    "deepseek with v1": ("deepseek/deepseek-chat", "/v1", OFF),
    "anthropic": ("anthropic/deepseek-flash", "", ANTHROPIC_OFF),
    "anthropic's own name": ("anthropic/claude-sonnet-4-5", "/anthropic", ANTHROPIC_OFF),
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(params=sorted(ROUTES))
def route(request: pytest.FixtureRequest, http: str) -> dict[str, Any]:
    name, path, fields = ROUTES[request.param]
    return {"model": name, "api_base": http + path, **KNOWN, **fields}


@pytest.fixture
def openai_route(http: str) -> dict[str, Any]:
    return {"model": "openai/deepseek-flash", "api_base": f"{http}/v1", "seed": 1, **KNOWN, **OFF}


KNOWN: dict[str, Any] = {"api_key": "none", "temperature": 0, "num_retries": 0, "timeout": 60, "max_tokens": 200}


def test_every_route_answers_whole_and_streamed_alike(route: dict[str, Any]) -> None:
    whole = litellm.completion(messages=SORT, **route)
    assert whole.choices[0].message.content == "3 7 19 42"
    assert whole.choices[0].finish_reason == "stop"
    pieces = list(litellm.completion(messages=SORT, stream=True, stream_options={"include_usage": True}, **route))
    said = "".join(one.choices[0].delta.content or "" for one in pieces if one.choices)
    assert said == whole.choices[0].message.content
    [usage] = [one.usage for one in pieces if getattr(one, "usage", None)]
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


def test_every_route_calls_tools_in_two_turns(route: dict[str, Any]) -> None:
    talk: list[Any] = [{"role": "user", "content": "Add 3 and 4"}]
    asked = {"tools": [ADD], "tool_choice": "required", "parallel_tool_calls": False}
    first = litellm.completion(messages=talk, **asked, **route).choices[0]
    assert first.finish_reason == "tool_calls"
    talk.append(first.message.model_dump(exclude_none=True))
    [call] = first.message.tool_calls
    assert call.function.name == "add"
    arguments = json.loads(call.function.arguments)
    # On its way to Messages LiteLLM leaves out that a tool is strict: any arguments may come.
    if not route["model"].startswith("anthropic/"):
        assert {name: type(value) for name, value in arguments.items()} == {"a": int, "b": int}
    talk.append({"role": "tool", "tool_call_id": call.id, "content": "7"})
    last = litellm.completion(messages=talk, tools=[ADD], tool_choice="none", **route).choices[0]
    assert last.message.content
    assert not last.message.tool_calls


def test_async_streams_are_the_whole_answer(openai_route: dict[str, Any]) -> None:
    async def said() -> str:
        answer = await litellm.acompletion(messages=SORT, stream=True, **openai_route)
        return "".join([one.choices[0].delta.content or "" async for one in answer])

    assert asyncio.run(said()) == "3 7 19 42"


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_comes_as_reasoning_content(http: str, stream: bool) -> None:
    route = {"model": "deepseek/deepseek-flash", "api_base": http, "seed": 1, **KNOWN}
    answer = litellm.completion(messages=SORT, stream=stream, **route)
    parts = [one.choices[0].delta for one in answer] if stream else [answer.choices[0].message]
    assert "".join(getattr(one, "reasoning_content", None) or "" for one in parts) == "Smallest first: 3."
    assert "".join(one.content or "" for one in parts) == "3 7 19 42"


def test_a_schema_holds_the_answer(openai_route: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = litellm.completion(
        messages=[{"role": "user", "content": "A number as json"}], response_format=form, **openai_route
    )
    assert isinstance(json.loads(answer.choices[0].message.content)["n"], int)


def test_plain_completions_go_on_with_the_text(http: str) -> None:
    answer = litellm.text_completion(
        model="text-completion-openai/deepseek-flash",
        api_base=f"{http}/v1",
        prompt="def add(a, b):",
        **{**KNOWN, "max_tokens": 8},
    )
    assert answer.choices[0].text
    assert answer.usage.completion_tokens <= 8


def test_responses_are_answered_as_chat(http: str, openai_route: dict[str, Any]) -> None:
    answer = litellm.responses(
        model="openai/deepseek-flash",
        api_base=f"{http}/v1",
        api_key="none",
        input=SORT[0]["content"],
        reasoning={"effort": "none"},
        temperature=0,
        timeout=60,
    )
    said = [part.text for item in answer.output if item.type == "message" for part in item.content]
    assert "".join(said) == litellm.completion(messages=SORT, **openai_route).choices[0].message.content


def test_errors_are_litellms_own_classes(http: str, openai_route: dict[str, Any]) -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=SORT, **{**openai_route, "model": "openai/nobody"})
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": "word " * 20_000}], **openai_route)
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(messages=SORT, **{**openai_route, "temperature": 9})
    claude = {**KNOWN, "temperature": 9}
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(model="anthropic/deepseek-flash", api_base=http, messages=SORT, **claude)
