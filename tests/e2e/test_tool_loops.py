"""Conversations with tools over several turns, by the `openai` and `anthropic` packages, in all three shapes."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator

import jsonschema
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
