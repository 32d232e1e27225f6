"""LangChain's ChatOpenAI against a gateway that serves nano: chains that people write, unchanged."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
import pytest
from langchain_core.messages import AIMessageChunk, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

SORT = "Sort these numbers: 42 7 19 3"


class Order(BaseModel):
    """An order."""

    colour: Literal["red", "green"]
    count: int = Field(ge=0, le=99)


@tool  # type: ignore[untyped-decorator]
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@pytest.fixture
def model(http: str) -> ChatOpenAI:
    return made(http)


def made(http: str, **fields: Any) -> ChatOpenAI:
    defaults = {
        "model": "deepseek-flash",
        "base_url": f"{http}/v1",
        "api_key": "none",
        "seed": 1,
        "temperature": 0,
        "max_retries": 0,
        "timeout": 60,
        "max_tokens": 200,
        "extra_body": {"thinking": {"type": "disabled"}},
    }
    return ChatOpenAI(**{**defaults, **fields})


def test_streamed_pieces_add_up_to_the_whole_answer_and_its_usage(http: str) -> None:
    model = made(http, stream_usage=True)
    whole = model.invoke(SORT)
    pieces = list(model.stream(SORT))
    together = pieces[0]
    for piece in pieces[1:]:
        together += piece
    assert isinstance(together, AIMessageChunk)
    assert len(pieces) > 2
    assert together.text == whole.text == "3 7 19 42"
    assert together.response_metadata["finish_reason"] == whole.response_metadata["finish_reason"] == "stop"
    counted = {"input_tokens", "output_tokens", "total_tokens"}
    assert together.usage_metadata is not None
    assert whole.usage_metadata is not None
    assert {name: together.usage_metadata[name] for name in counted} == {
        name: whole.usage_metadata[name] for name in counted
    }


def test_async_batches_are_answered_as_alone(model: ChatOpenAI) -> None:
    questions = [SORT, "Sort these numbers: 9 1", "Sort these numbers: 5 4 3"]
    together = asyncio.run(model.abatch(questions))
    assert [one.text for one in together] == [model.invoke(question).text for question in questions]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_bound_tool_is_called_and_its_result_answered(model: ChatOpenAI, is_streamed: bool) -> None:
    caller = model.bind_tools([add], tool_choice="add", strict=True)
    talk: list[BaseMessage] = [SystemMessage("You are a calculator."), HumanMessage("Add 3 and 4")]
    for _ in range(2):
        if is_streamed:
            pieces = list(caller.stream(talk))
            called = pieces[0]
            for piece in pieces[1:]:
                called += piece
        else:
            called = caller.invoke(talk)
        assert called.tool_calls
        assert not called.invalid_tool_calls
        talk.append(called)
        for call in called.tool_calls:
            assert call["name"] == "add"
            assert {type(value) for value in call["args"].values()} == {int}
            talk.append(ToolMessage(str(add.invoke(call["args"])), tool_call_id=call["id"]))
    ids = [one.tool_call_id for one in talk if isinstance(one, ToolMessage)]
    assert len(set(ids)) == len(ids)
    last = model.bind_tools([add], tool_choice="none").invoke(talk)
    assert last.text
    assert not last.tool_calls


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_an_object_of_the_class(model: ChatOpenAI, method: Any) -> None:
    answer = model.with_structured_output(Order, method=method, strict=True).invoke("An order as json")
    assert isinstance(answer, Order)


def test_structured_output_comes_by_pieces_too(model: ChatOpenAI) -> None:
    pieces = list(model.with_structured_output(Order, method="json_schema").stream("An order as json"))
    assert isinstance(pieces[-1], Order)


def test_logprobs_are_in_the_metadata(model: ChatOpenAI) -> None:
    answer = model.bind(logprobs=True, top_logprobs=2, max_tokens=3).invoke(SORT)
    content = answer.response_metadata["logprobs"]["content"]
    assert [len(token["top_logprobs"]) for token in content] == [2, 2, 2]
    assert content[0]["token"] == content[0]["top_logprobs"][0]["token"]


def test_the_responses_api_answers_the_same(http: str, model: ChatOpenAI) -> None:
    fields = {"extra_body": None, "reasoning": {"effort": "none"}, "seed": None, "use_responses_api": True}
    responses = made(http, **fields)
    assert responses.invoke(SORT).text == model.invoke(SORT).text
    called = responses.bind_tools([add], tool_choice="add", strict=True).invoke("Add 3 and 4")
    [call] = called.tool_calls
    talk = [HumanMessage("Add 3 and 4"), called, ToolMessage("7", tool_call_id=call["id"])]
    assert responses.bind_tools([add], tool_choice="none").invoke(talk).text


def test_a_bad_request_is_the_sdks_error(http: str) -> None:
    with pytest.raises(openai.NotFoundError, match="nobody"):
        made(http, model="nobody").invoke(SORT)
    with pytest.raises(openai.BadRequestError, match="context"):
        made(http).invoke("word " * 20_000)
