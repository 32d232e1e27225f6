"""The shipped nano model through the whole mesh: the tokens of the offline model, and answers that are right."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from shoal_client import Client, SamplingParams, generation
from shoal_engine import LLM
from shoal_nano.tasks import check, held_out_items
from support.asking import Question, ask, ask_offline
from support.mesh import Mesh, mesh, wait_for

pytestmark = pytest.mark.timeout(300)

# Around the window (128), the replay length (140), two blocks + replay, and a prompt that is prefilled remotely.
LENGTHS = (5, 128, 141, 269, 700)
TEXT = "def harbour(lamp, stone):\n    return [river for river in lamp if river not in stone]\n\n\n" * 40


@pytest.fixture(scope="module")
def nano() -> Iterator[LLM]:
    with LLM("nano", threads=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def nano_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    settings = {name: {"MODEL": "nano"} for name in ("prefill_worker", "decode_worker")} | {"gateway": {"MODEL": ""}}
    with mesh(tmp_path_factory.mktemp("nano"), settings) as running:
        yield running


@pytest.fixture
def asked(nano_mesh: Mesh) -> Iterator[Client]:
    with Client(nano_mesh.grpc, timeout_s=60) as client:
        yield client
    nano_mesh.wait_idle()


def prompt(nano: LLM, length: int) -> tuple[int, ...]:
    """`length` tokens of Python-like text, told apart by their beginning."""
    ids: list[int] = nano.get_tokenizer().encode(f"# {length}\n{TEXT}").ids
    assert len(ids) >= length
    return tuple(ids[:length])


def test_every_length_and_temperature_alone_and_together(nano: LLM, asked: Client) -> None:
    questions = [
        Question(prompt=prompt(nano, length), temperature=temperature, seed=length, n=1 + length % 2)
        for length in LENGTHS
        for temperature in (0.0, 1.0)
    ]
    wanted = ask_offline(nano, questions)
    with ThreadPoolExecutor(len(questions)) as pool:
        together = list(pool.map(lambda question: ask(asked, question).tokens, questions))
    assert together == wanted
    assert [ask(asked, question).tokens for question in questions[::3]] == wanted[::3]


def test_a_second_visit_hits_and_says_the_same(nano: LLM, asked: Client) -> None:
    question = Question(prompt=prompt(nano, 700), seed=3, user_id=secrets.token_hex(8))
    [wanted] = ask_offline(nano, [question])
    told = [ask(asked, question)]

    def has_hit() -> bool:
        told.append(ask(asked, question))
        return told[-1].cached == 512

    wait_for(has_hit, what=lambda: f"a hit of 512 tokens, cached were {[one.cached for one in told]}")
    assert {one.tokens for one in told} == {wanted}


def test_short_tasks_are_answered_right(asked: Client) -> None:
    items = [item for family in ("copy", "json") for item in held_out_items(family, 4, 7)]
    items = [item for item in items if not item.dialogue.is_thinking and len(item.dialogue.turns) == 1]
    right = 0
    for item in items:
        talk = [{"role": "user", "content": item.wanted.user}]
        if item.dialogue.system:
            talk.insert(0, {"role": "system", "content": item.dialogue.system})
        sampling = SamplingParams(temperature=0, max_tokens=256)
        answer = asked.generate(generation(talk, sampling=sampling, reasoning_effort=0))
        right += check(item, answer.choices[0].output.text)
    assert items
    assert right >= len(items) - 1
