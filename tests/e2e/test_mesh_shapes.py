"""Meshes of different shapes give one answer: that of the offline model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from shoal_client import Client
from shoal_engine import LLM
from support.asking import Question, ask, ask_offline
from support.mesh import Settings, mesh
from support.worker_pair import prompt_of

# Each shape is a mesh of its own.
pytestmark = [pytest.mark.timeout(300), pytest.mark.long]

REMOTE = {"REMOTE_PREFILL_TOKENS": "0", "REPLAY_TOKENS": "28"}
SHAPES: dict[str, Settings] = {
    "all remote, in chunks of 7": {
        "scheduler": REMOTE,
        "decode_worker": {"LOCAL_PREFILL_TOKENS": "0"},
        "prefill_worker": {"STEP_TOKENS": "7"},
    },
    "remote, rows by the stream": {
        "scheduler": REMOTE,
        "decode_worker": {"LOCAL_PREFILL_TOKENS": "0"},
        "prefill_worker": {"ARENA_BYTES": "0"},
    },
    "remote, rows by gRPC": {
        "scheduler": REMOTE,
        "decode_worker": {"LOCAL_PREFILL_TOKENS": "0"},
        "prefill_worker": {"ARENA_BYTES": "0", "STREAM_LISTEN_ADDRESS": "off"},
    },
    "all local, no drafts, steps of 33": {
        "scheduler": {"REMOTE_PREFILL_TOKENS": "1000000"},
        "decode_worker": {"VERIFY_WIDTH": "0", "STEP_TOKENS": "33"},
    },
    "two drafts, two threads, few slots": {
        "scheduler": REMOTE,
        "decode_worker": {"VERIFY_WIDTH": "2", "THREADS": "2", "SLOT_COUNT": "3"},
    },
    "widths planned by measured costs": {
        "scheduler": REMOTE,
        "decode_worker": {"VERIFY": "planned", "PROFILE_S": "1", "COST_DIRECTORY": "{folder}/costs"},
    },
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_mesh_of_any_shape_gives_the_answer_of_the_offline_model(tmp_path: Path, offline: LLM, shape: str) -> None:
    questions = [
        Question(prompt=tuple(prompt_of(length, seed=length)), temperature=temperature, seed=length)
        for length in (3, 31, 130, 157, 385, 700)
        for temperature in (0.0, 1.0)
    ]
    wanted = ask_offline(offline, questions)
    settings = {
        name: {key: value.format(folder=tmp_path) for key, value in one.items()} for name, one in SHAPES[shape].items()
    }
    with mesh(tmp_path, settings) as started, Client(started.grpc, timeout_s=120) as client:
        assert [ask(client, question).tokens for question in questions] == wanted
        # Again, now together and from the cache.
        with ThreadPoolExecutor(len(questions)) as pool:
            told = list(pool.map(lambda question: ask(client, question), questions))
        assert [one.tokens for one in told] == wanted
        assert any(one.cached for one in told)
        # One step is the warm-up.
        assert (started.numbers("prefill_worker")["step_count"] > 1) == ("local" not in shape)
