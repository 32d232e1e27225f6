"""Conversations with tools over several turns, by the `openai` and `anthropic` packages, in all three shapes."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import httpx
import jsonschema
import openai
import pydantic
import pytest
from support.conversation import wait_written
from support.mesh import NANO, Mesh, mesh
from support.tool_talk import ADD, SHAPES, Said, ToolTalk

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

QUESTIONS = ("Call the tool add with 3 and 4", "Call the tool add with 20 and 9", "Call the tool add with 5 and 6")
BLOCK, REPLAY = 128, 140


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    with mesh(tmp_path_factory.mktemp("nano"), NANO) as running:
        yield running


@pytest.fixture
def nano(served: Mesh) -> Iterator[Mesh]:
    """Nothing is held after a test."""
    yield served
    served.wait_idle()


def talk_of(nano: Mesh, shape: str, *, seed: int = 5, temperature: float = 1.0, is_thinking: bool = False) -> ToolTalk:
    """A new conversation of a user whose cache is empty."""
    user = secrets.token_hex(8)
    return SHAPES[shape](nano.http, seed=seed, temperature=temperature, is_thinking=is_thinking, user=user)


def looped(nano: Mesh, talk: ToolTalk, choice: str, *, is_streamed: bool) -> list[Said]:
    """Every question: a call that must come, its result, the answer to it."""
    answers = []
    for question in QUESTIONS:
        talk.ask(question)
        called = talk.answer(choice, is_streamed=is_streamed)
        assert called.end == "calls"
        [(call_id, name, arguments)] = called.calls
        assert name == "add"
        jsonschema.validate(arguments, ADD)
        talk.result(call_id, str(arguments["a"] + arguments["b"]))
        wait_written(nano)
        answered = talk.answer("none", is_streamed=is_streamed)
        assert (answered.end, answered.calls) == ("stop", ())
        assert answered.text
        wait_written(nano)
        answers += [called, answered]
    ids = [call_id for one in answers for call_id, _, _ in one.calls]
    assert len(set(ids)) == len(ids) == len(QUESTIONS)
    return answers


def test_three_turns_of_a_named_tool_are_the_same_in_all_shapes_streamed_or_not(nano: Mesh) -> None:
    told = {
        (shape, is_streamed): looped(nano, talk_of(nano, shape), "add", is_streamed=is_streamed)
        for shape in SHAPES
        for is_streamed in (False, True)
    }
    wanted = told["chat", False]
    for answers in told.values():
        assert [one.content for one in answers] == [one.content for one in wanted]
        assert [(one.prompt_tokens, one.output_tokens) for one in answers] == [
            (one.prompt_tokens, one.output_tokens) for one in wanted
        ]
        # All that was said before, but for what is replayed. The answers without tools have another beginning.
        calls = answers[::2]
        assert calls[0].cached_tokens == 0
        for before, after in itertools.pairwise(calls):
            assert after.cached_tokens >= (before.prompt_tokens - REPLAY) // BLOCK * BLOCK > 0


@pytest.mark.parametrize("shape", SHAPES)
def test_some_tool_is_called_where_any_must_be(nano: Mesh, shape: str) -> None:
    whole = looped(nano, talk_of(nano, shape), "any", is_streamed=False)
    streamed = looped(nano, talk_of(nano, shape), "any", is_streamed=True)
    assert [one.content for one in streamed] == [one.content for one in whole]


def test_thoughts_come_along_with_calls_and_are_taken_back_in_all_shapes(nano: Mesh) -> None:
    told = {}
    for shape in SHAPES:
        for is_streamed in (False, True):
            talk = talk_of(nano, shape, is_thinking=True)
            talk.ask(QUESTIONS[0])
            called = talk.answer("auto", is_streamed=is_streamed)
            assert called.thinking
            assert called.calls, "nano calls what it is told to call"
            for call_id, _, _ in called.calls:
                talk.result(call_id, "7")
            answered = talk.answer("auto", is_streamed=is_streamed)
            assert answered.text
            told[shape, is_streamed] = [called, answered]
    for answers in told.values():
        assert [one.content for one in answers] == [one.content for one in told["chat", False]]
        assert [one.prompt_tokens for one in answers] == [one.prompt_tokens for one in told["chat", False]]


class Order(pydantic.BaseModel):
    """An order. No bounds: Anthropic's package takes them out of what it sends, and checks them all the same."""

    colour: Literal["red", "green"]
    is_urgent: bool


def test_the_packages_parse_an_answer_into_a_class_in_all_shapes(nano: Mesh) -> None:
    talk: list[Any] = [{"role": "user", "content": "An order as json"}]
    known: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 60}
    off = {"thinking": {"type": "disabled"}}
    named: dict[str, Any] = {"model": "deepseek-flash"}
    by_openai: Any = openai.OpenAI(base_url=f"{nano.http}/v1", **known)
    chat = by_openai.chat.completions.parse(**named, messages=talk, response_format=Order, seed=2, n=2, extra_body=off)
    response = by_openai.responses.parse(**named, input=talk, text_format=Order, reasoning={"effort": "none"})
    by_anthropic: Any = anthropic.Anthropic(base_url=nano.http, **known)
    message = by_anthropic.messages.parse(**named, messages=talk, output_format=Order, max_tokens=90, **off)
    parsed = [one.message.parsed for one in chat.choices] + [response.output_parsed, message.parsed_output]
    assert [type(one) for one in parsed] == [Order] * 4


def call_of_add(a: int, b: int) -> str:
    """As V4.1 writes it."""
    parameters = "".join(
        f'<｜DSML｜ parameter name="{name}" string="false">{value}</｜DSML｜ parameter>\n'
        for name, value in (("a", a), ("b", b))
    )
    return f'<｜DSML｜ invoke name="add">\n{parameters}</｜DSML｜ invoke>\n'


@pytest.mark.parametrize("is_streamed", [False, True])
def test_two_calls_in_one_answer_are_two_and_both_results_are_taken(nano: Mesh, is_streamed: bool) -> None:
    text = call_of_add(3, 4) + call_of_add(20, 9) + "</｜DSML｜ calls>"
    # The first token is the begin of the sequence.
    forced = httpx.post(f"{nano.http}/tokenize", json={"prompt": text}).json()["tokens"][1:]
    for shape in SHAPES:
        talk = SHAPES[shape](
            nano.http, seed=5, temperature=0, is_thinking=False, user=secrets.token_hex(8), forced_ids=forced
        )
        talk.ask("Call the tool add twice")
        called = talk.answer("add", is_streamed=is_streamed)
        assert called.end == "calls"
        assert called.content == ("", "", [("add", {"a": 3, "b": 4}), ("add", {"a": 20, "b": 9})])
        ids = [call_id for call_id, _, _ in called.calls]
        assert len(set(ids)) == 2
        for call_id, result in zip(ids, ("7", "29"), strict=True):
            talk.result(call_id, result)
        talk.forced_no_more()
        assert talk.answer("none", is_streamed=is_streamed).text
