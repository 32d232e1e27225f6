"""Processes die, stop, leave and come back in the middle of an answer: its tokens stay the same."""

from __future__ import annotations

import json
import secrets
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from shoal_client import Client
from shoal_common.constraints import ConstraintKind, normalise
from shoal_engine import LLM
from support.asking import Question, ask, ask_offline
from support.mesh import Mesh, is_ready, mesh, wait_for
from support.worker_pair import prompt_of

# Each of these starts processes anew.
pytestmark = [pytest.mark.timeout(300), pytest.mark.long]


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """A mesh with two decode workers, where all but the shortest prompts are prefilled remotely."""
    settings = {
        "scheduler": {"REMOTE_PREFILL_TOKENS": "32", "REPLAY_TOKENS": "28"},
        "prefill_worker": {"STEP_TOKENS": "64"},
        "decode_worker": {"LOCAL_PREFILL_TOKENS": "0"},
        "decode_worker_2": {"LOCAL_PREFILL_TOKENS": "0", "VERIFY_WIDTH": "0"},
    }
    with mesh(tmp_path_factory.mktemp("pack"), settings, decode_workers=2) as started:
        yield started


@pytest.fixture
def client(pack: Mesh) -> Iterator[Client]:
    with Client(pack.grpc, timeout_s=60) as connected:
        yield connected
    pack.wait_idle()


def question(seed: int, **fields: Any) -> Question:
    return Question(
        prompt=tuple(prompt_of(fields.pop("length", 300), seed=seed)),
        seed=seed,
        user_id=secrets.token_hex(8),
        **{"max_tokens": 150, **fields},
    )


def disturbed(client: Client, asked: Question, disturb: Callable[[], None], *, after: int = 10) -> list[list[int]]:
    """The tokens per choice of an answer; `disturb` is called once the first choice has `after` of them."""
    tokens: list[list[int]] = [[] for _ in range(asked.n)]
    is_due = True
    for event in client.stream(asked.generation()):
        delta = event.finish.output if event.HasField("finish") else event.delta
        tokens[delta.choice_index].extend(delta.tokens.ids)
        if is_due and len(tokens[0]) >= after:
            is_due = False
            disturb()
    assert not is_due, "the answer was too short to be disturbed"
    return tokens


def runner(pack: Mesh) -> str:
    """The decode worker that runs something."""
    names = [name for name in pack.processes if name.startswith("decode_worker")]
    return next(name for name in names if pack.numbers(name)["running"])


def again(pack: Mesh, name: str, **settings: str) -> None:
    """Start a process that is gone, and wait until requests are placed on it."""
    address = pack.start(name, settings).address
    wait_for(lambda: address in pack.fleet(), what=lambda: f"{name} in the fleet", timeout_s=60)


def as_lists(tokens: tuple[tuple[int, ...], ...]) -> list[list[int]]:
    return [list(one) for one in tokens]


@pytest.mark.parametrize("n", [1, 2])
def test_a_decode_worker_killed_in_mid_answer_costs_no_token(pack: Mesh, client: Client, offline: LLM, n: int) -> None:
    asked = question(1 + n, n=n)
    killed: list[str] = []

    def kill() -> None:
        killed.append(runner(pack))
        pack.kill(killed[0])

    told = disturbed(client, asked, kill, after=40)
    assert told == as_lists(ask_offline(offline, [asked])[0])
    again(pack, killed[0], LOCAL_PREFILL_TOKENS="0")


def test_json_that_is_interrupted_in_mid_object_goes_on_where_it_was(pack: Mesh, client: Client, offline: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "integer"}, "minItems": 40}},
        "required": ["a"],
        "additionalProperties": False,
    }
    asked = replace(question(9), constraint=normalise(ConstraintKind.JSON_SCHEMA, json.dumps(schema)))
    killed: list[str] = []

    def kill() -> None:
        killed.append(runner(pack))
        pack.kill(killed[0])

    told = disturbed(client, asked, kill, after=40)
    assert told == as_lists(ask_offline(offline, [asked])[0])
    text = offline.get_tokenizer().decode(told[0], skip_special_tokens=True)
    assert text.count("{") == 1
    assert text.lstrip("{ \n\r\t").startswith('"a"')
    again(pack, killed[0], LOCAL_PREFILL_TOKENS="0")


def test_a_decode_worker_that_leaves_moves_its_answer(pack: Mesh, client: Client, offline: LLM) -> None:
    asked = question(5, max_tokens=1200)
    left: list[str] = []

    def leave() -> None:
        left.append(runner(pack))
        pack[left[0]].popen.send_signal(signal.SIGTERM)

    told = disturbed(client, asked, leave)
    assert pack[left[0]].popen.wait(20) == 0
    assert told == as_lists(ask_offline(offline, [asked])[0])
    pack.processes.pop(left[0])
    again(pack, left[0], LOCAL_PREFILL_TOKENS="0")


def test_a_prefill_worker_killed_during_an_answer_costs_no_token(pack: Mesh, client: Client, offline: LLM) -> None:
    answers = [question(6), question(7, length=900)]
    wanted = [as_lists(one) for one in ask_offline(offline, answers)]
    told = [disturbed(client, answers[0], lambda: pack.kill("prefill_worker"))]
    # Its presence has not lapsed: this one is sent there, and prefilled elsewhere.
    told.append(as_lists(ask(client, answers[1]).tokens))
    assert told == wanted
    again(pack, "prefill_worker", STEP_TOKENS="64")


def test_a_kv_cache_killed_during_an_answer_costs_no_token(pack: Mesh, client: Client, offline: LLM) -> None:
    asked = question(8)
    wanted = as_lists(ask_offline(offline, [asked])[0])
    ask(client, asked)
    assert disturbed(client, asked, lambda: pack.kill("kv_cache")) == wanted
    assert as_lists(ask(client, asked).tokens) == wanted
    again(pack, "kv_cache")
    wait_for(lambda: ask(client, asked).cached > 0, what=lambda: "a hit in the new kv_cache", timeout_s=20)


def test_a_scheduler_killed_during_an_answer_costs_no_token(pack: Mesh, client: Client, offline: LLM) -> None:
    asked = question(9, max_tokens=400)
    assert disturbed(client, asked, lambda: pack.kill("scheduler")) == as_lists(ask_offline(offline, [asked])[0])
    pack.start("scheduler", {"REMOTE_PREFILL_TOKENS": "32"})
    pack.wait_ready("scheduler", "gateway")
    assert as_lists(ask(client, asked).tokens) == as_lists(ask_offline(offline, [asked])[0])


def test_nats_that_goes_and_comes_back_costs_nothing_and_all_join_again(
    pack: Mesh, client: Client, offline: LLM
) -> None:
    asked = question(10, max_tokens=40)
    wanted = as_lists(ask_offline(offline, [asked])[0])
    pack.nats.stop()
    assert as_lists(ask(client, asked).tokens) == wanted
    assert all(is_ready(process) for process in pack.processes.values())
    pack.nats.start()
    wait_for(lambda: pack.addresses() <= pack.on_bus(), what=lambda: "all on the bus", timeout_s=30)
    assert as_lists(ask(client, asked).tokens) == wanted
    # What comes now is found too.
    gone = "decode_worker"
    pack.kill(gone)
    again(pack, gone, LOCAL_PREFILL_TOKENS="0")


def test_a_gateway_that_is_told_to_leave_finishes_its_answer_first(pack: Mesh, client: Client, offline: LLM) -> None:
    asked = question(11, max_tokens=200)
    gateway = pack["gateway"].popen
    told = disturbed(client, asked, lambda: gateway.send_signal(signal.SIGTERM))
    assert told == as_lists(ask_offline(offline, [asked])[0])
    assert gateway.wait(20) == 0
    pack.processes.pop("gateway")
