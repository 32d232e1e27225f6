"""Chats, tool loops and shared system prompts through the whole mesh: what is computed again, and the same tokens."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence

import httpx
import pytest
from google.protobuf.message import Message
from shoal_client import Client
from shoal_engine import LLM
from shoal_engine.replay import default_replay_length
from shoal_engine.snapshots import floor_to_block
from support.asking import Question, ask, ask_offline
from support.conversation import Conversation, wait_written
from support.mesh import Mesh, mesh

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

BLOCK = 128
K = default_replay_length(128, 6)
REPLAYED = 4 * 128
"""Tokens that nano runs again where it has blocks and no snapshot: encoder layers times window."""


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


def test_a_question_about_a_document_loads_all_of_it_where_a_cache_point_was_set(running: Mesh) -> None:
    system, document = {"role": "system", "content": lines(40)}, {"role": "user", "content": lines(45, "lamp")}
    questions = [{"role": "user", "content": lines(30, word)} for word in ("stone", "river")]
    same = {"thinking": {"type": "disabled"}, "seed": 7}

    def encoded(*messages: dict[str, str]) -> list[int]:
        answer = httpx.post(f"{running.http}/tokenize", json={"messages": messages, **same}).raise_for_status()
        ids: list[int] = answer.json()["tokens"]
        return ids

    def asked(user_id: str, *messages: dict[str, str], points: Sequence[int] = ()) -> tuple[int, str]:
        """Cached tokens and the answer."""
        extension = {"user_id": user_id, "max_tokens": 8, "shoal": {"cache_points": list(points), "ignore_eos": True}}
        body = {"model": "deepseek-flash", "messages": messages, **same, **extension}
        answer = httpx.post(f"{running.http}/v1/chat/completions", json=body, timeout=60).raise_for_status().json()
        wait_written(running)
        text: str = answer["choices"][0]["message"]["content"]
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"], text

    def told(points: Sequence[int]) -> tuple[int, str]:
        user_id = secrets.token_hex(8)
        asked(user_id, system)
        asked(user_id, system, document, questions[0], points=points)
        return asked(user_id, system, document, questions[1])

    # What went before keeps a snapshot at the end of the system prompt, where the first document branched off. From
    # there the end of the document is nearer than by replay.
    begun = floor_to_block(shared_tokens(encoded(system), encoded(system, document)))
    shared = floor_to_block(shared_tokens(*(encoded(system, document, one) for one in questions)))
    assert 0 < begun < shared <= begun + REPLAYED
    without, plain = told([])
    with_point, same_answer = told([1])
    assert (without, with_point) == (begun, shared)
    assert same_answer == plain


def lines(count: int, word: str = "harbour") -> str:
    return "\n".join(f"{word} = {number * 7919 % 1009}" for number in range(count))


def shared_tokens(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(left), len(right)))


def described(message: Message) -> Iterator[str]:
    """Names of the fields that are set, all the way down."""
    for field, value in message.ListFields():
        yield field.full_name
        if isinstance(value, Message):
            yield from described(value)
