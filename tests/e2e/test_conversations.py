"""Chats, tool loops and shared system prompts through the whole mesh: what is computed again, and the same tokens."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
from google.protobuf.message import Message
from shoal_client import Client
from shoal_engine import LLM
from shoal_engine.replay import default_replay_length
from support.asking import Question, ask, ask_offline
from support.conversation import Conversation, wait_written
from support.mesh import Mesh, mesh

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

BLOCK = 128
K = default_replay_length(128, 6)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    settings = {name: {"MODEL": "nano"} for name in ("prefill_worker", "decode_worker")} | {"gateway": {"MODEL": ""}}
    with mesh(tmp_path_factory.mktemp("nano"), settings) as started:
        yield started


@pytest.fixture
def client(running: Mesh) -> Iterator[Client]:
    with Client(running.grpc, timeout_s=60) as one:
        yield one


def test_a_tool_loop_computes_less_than_k_and_a_block_of_what_is_old(
    running: Mesh, client: Client, nano: LLM, text: list[int]
) -> None:
    talk = Conversation(client, secrets.token_hex(8), max_tokens=20)
    told = [talk.turn(text[:700])]
    computed_again = []
    for turn, more in enumerate((30, 150, 5, 128)):
        wait_written(running)
        old_tokens = len(talk.said)
        told.append(talk.turn(text[1000 + turn : 1000 + turn + more]))
        computed_again.append(old_tokens - told[-1].cached)
    assert max(computed_again) < K + BLOCK, computed_again
    assert [one.tokens for one in told] == ask_offline(nano, talk.turns)


@pytest.mark.parametrize("system_tokens", [512, 700])
def test_the_third_visitor_of_a_system_prompt_computes_no_block_of_it(
    running: Mesh, client: Client, nano: LLM, text: list[int], system_tokens: int
) -> None:
    user_id = secrets.token_hex(8)
    questions = [
        Question(
            prompt=(*text[:system_tokens], *text[800 + 7 * visitor : 1100 + 7 * visitor]),
            seed=visitor,
            user_id=user_id,
            max_tokens=8,
        )
        for visitor in range(3)
    ]
    told = []
    for question in questions:
        told.append(ask(client, question))
        wait_written(running)
    assert told[0].cached == 0
    assert told[2].cached == system_tokens // BLOCK * BLOCK
    assert [one.tokens for one in told] == ask_offline(nano, questions)


def test_another_users_identical_prompt_is_answered_as_if_nobody_had_asked(
    running: Mesh, client: Client, nano: LLM, text: list[int]
) -> None:
    questions = [Question(prompt=tuple(text[:700]), user_id=secrets.token_hex(8), max_tokens=8) for _ in range(2)]
    answers = []
    for question in questions:
        answers.append(client.generate(question.generation()))
        wait_written(running)
    assert ask(client, questions[0]).cached > 0
    assert [one.tail.usage.cached_prompt_tokens for one in answers] == [0, 0]
    first, second = (set(described(one.tail)) for one in answers)
    assert first == second
    assert [one.choices[0].output.tokens.ids for one in answers] == [list(ask_offline(nano, questions)[0][0])] * 2


def described(message: Message) -> Iterator[str]:
    """Names of the fields that are set, all the way down."""
    for field, value in message.ListFields():
        yield field.full_name
        if isinstance(value, Message):
            yield from described(value)
