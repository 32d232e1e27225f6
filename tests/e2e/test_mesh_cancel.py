"""A client that leaves, in any phase, leaves nothing behind in any process."""

from __future__ import annotations

import contextlib
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from shoal_client import Client, SamplingParams, ShoalError, generation
from support.asking import Question, ask
from support.mesh import Mesh, wait_for
from support.worker_pair import prompt_of

pytestmark = pytest.mark.timeout(300)

# From before the placement over remote prefill and the pull of its rows to decoding.
AFTER_S = (0.001, 0.01, 0.03, 0.06, 0.12, 0.25, 0.5)
LONG_ANSWER = SamplingParams(temperature=1.0, max_tokens=2500, ignore_eos=True)


@pytest.mark.parametrize("after_s", AFTER_S)
def test_a_grpc_call_given_up_in_any_phase_leaves_nothing_behind(whole: Mesh, after_s: float) -> None:
    asked = generation(prompt_of(1200, seed=round(after_s * 1000)), sampling=LONG_ANSWER, user_id=secrets.token_hex(8))
    with Client(whole.grpc) as client, pytest.raises(ShoalError):
        client.generate(asked, timeout_s=after_s)
    whole.wait_idle()


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("after_s", AFTER_S[1::2])
def test_a_connection_closed_in_any_phase_leaves_nothing_behind(whole: Mesh, after_s: float, is_streamed: bool) -> None:
    text = f"{after_s} {is_streamed} " + "the cat saw the mat and the rain; " * 25
    body = chat_body(text, stream=is_streamed)
    give_up = time.monotonic() + after_s
    with (
        contextlib.suppress(httpx.ReadTimeout),
        httpx.Client(timeout=httpx.Timeout(10, read=after_s)) as http,
        http.stream("POST", f"{whole.http}/v1/chat/completions", json=body) as response,
    ):
        for _ in response.iter_raw():
            if time.monotonic() > give_up:
                break
    assert time.monotonic() >= give_up, "the answer was over before the client left"
    whole.wait_idle()


def test_many_that_leave_while_they_wait_for_a_slot_leave_nothing_behind(whole: Mesh) -> None:
    """More choices than the worker has slots, so that some leave from the queue."""

    def leave(index: int) -> None:
        asked = generation(prompt_of(50 + index, seed=index), sampling=LONG_ANSWER, n=8)
        with Client(whole.grpc) as client, pytest.raises(ShoalError):
            client.generate(asked, timeout_s=1.0 + index / 50)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(8)))
    whole.wait_idle()


def test_after_a_client_left_the_next_request_is_served_at_once(whole: Mesh, client: Client) -> None:
    question = Question(prompt=tuple(prompt_of(30, seed=5)))
    wanted = ask(client, question)
    events = client.stream(generation(prompt_of(30, seed=6), sampling=LONG_ANSWER))
    next(events)
    next(events)
    steps = whole.numbers("decode_worker")["step_count"]
    wait_for(lambda: whole.numbers("decode_worker")["step_count"] > steps, what=lambda: "decoding")
    events.close()  # type: ignore[attr-defined]
    assert ask(client, question).tokens == wanted.tokens


def chat_body(text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "deepseek-flash", "messages": messages, "max_tokens": 2500, "ignore_eos": True, **fields}
