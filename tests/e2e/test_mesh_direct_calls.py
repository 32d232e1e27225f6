"""Direct calls change no answer: with them, without them, and where only some processes have them."""

from __future__ import annotations

import secrets
import urllib.request
from pathlib import Path

import pytest
from shoal_client import Client
from shoal_engine import LLM
from support.asking import Question, ask, ask_offline
from support.mesh import Mesh, mesh
from support.worker_pair import prompt_of

pytestmark = pytest.mark.timeout(300)

SERVERS = ("scheduler", "decode_worker", "prefill_worker")
OFF = {"SHOAL_DIRECT_CALLS": "off"}
WITHOUT = {
    "no process": ("scheduler", "decode_worker", "prefill_worker", "kv_cache", "gateway"),
    "no caller of the decode worker": ("gateway",),
    "no decode worker": ("decode_worker",),
}


def questions() -> list[Question]:
    """One prompt that is prefilled where it is decoded, one that is not."""
    user_id = secrets.token_hex(8)
    return [Question(prompt=tuple(prompt_of(size, seed=size)), seed=size, user_id=user_id, n=2) for size in (40, 300)]


def direct_connections(running: Mesh, name: str) -> float:
    """How many callers of a process are connected directly."""
    with urllib.request.urlopen(f"http://{running[name].admin}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith("shoal_rpc_direct_connections "))


def test_answers_come_by_direct_calls_and_are_those_of_the_offline_model(
    whole: Mesh, client: Client, offline: LLM
) -> None:
    asked = questions()
    assert [ask(client, one).tokens for one in asked] == ask_offline(offline, asked)
    connected = {name: direct_connections(whole, name) for name in SERVERS}
    assert all(connected.values()), connected


@pytest.mark.long
@pytest.mark.parametrize("who", WITHOUT)
def test_answers_without_direct_calls_are_the_same(tmp_path: Path, offline: LLM, who: str) -> None:
    settings: dict[str, dict[str, str]] = {
        "scheduler": {"REMOTE_PREFILL_TOKENS": "200", "REPLAY_TOKENS": "28"},
        "decode_worker": {"LOCAL_PREFILL_TOKENS": "64"},
    }
    for name in WITHOUT[who]:
        settings[name] = settings.get(name, {}) | OFF
    asked = questions()
    with mesh(tmp_path, settings) as running, Client(running.grpc) as client:
        assert [ask(client, one).tokens for one in asked] == ask_offline(offline, asked)
        assert direct_connections(running, "decode_worker") == 0
        assert (direct_connections(running, "prefill_worker") > 0) == (who == "no caller of the decode worker")
