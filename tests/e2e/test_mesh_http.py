"""The mesh as clients of the hosted API see it: chat by the `openai` client and by plain HTTP."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from shoal.inference.v1 import generation_pb2
from shoal_client import Client, SamplingParams
from shoal_client import generation as generation_of
from shoal_engine import LLM
from shoal_engine import SamplingParams as OfflineParams
from shoal_engine.snapshots import stored_snapshots
from support.mesh import Mesh, wait_for

pytestmark = pytest.mark.timeout(300)

MODEL = "deepseek-flash"
REPLAY_TOKENS = 28
"""Of the tiny model: the encoder's layers times their window."""
LONG = "The cat sat on the mat, and the dog saw the cat. " * 6


@pytest.fixture
def api(whole: Mesh, client: Client) -> Iterator[openai.OpenAI]:
    """The `openai` client; pools are checked after the test by `client`."""
    with openai.OpenAI(base_url=f"{whole.http}/v1", api_key="none", timeout=60, max_retries=0) as connected:
        yield connected


def chat(api: openai.OpenAI, text: str | list[dict[str, str]], **fields: Any) -> Any:
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
    extra = {"ignore_eos": True, "thinking": {"type": "disabled"}, **fields.pop("extra_body", {})}
    create: Any = api.chat.completions.create
    return create(model=MODEL, messages=messages, extra_body=extra, **{"seed": 3, "max_tokens": 20, **fields})


def text_of(answer: Any) -> str:
    message = answer.choices[0].message
    return (getattr(message, "reasoning_content", None) or "") + (message.content or "")


def test_a_streamed_answer_is_the_whole_answer_in_pieces(api: openai.OpenAI) -> None:
    whole_answer = chat(api, "Say something.")
    events = list(chat(api, "Say something.", stream=True, stream_options={"include_usage": True}))
    text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert whole_answer.choices[0].message.content
    assert text == whole_answer.choices[0].message.content
    assert events[0].choices[0].delta.role == "assistant"
    assert [event.choices[0].finish_reason for event in events if event.choices][-1] == "length"
    assert len({(event.id, event.created) for event in events}) == 1
    # What was drafted is up to the moment.
    assert events[-1].usage.model_dump(exclude={"shoal"}) == whole_answer.usage.model_dump(exclude={"shoal"})
    assert whole_answer.usage.completion_tokens == 20
    assert whole_answer.usage.total_tokens == whole_answer.usage.prompt_tokens + 20


def test_plain_http_streams_server_sent_events_that_end_with_done(whole: Mesh, client: Client) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "stream": True}
    with httpx.stream("POST", f"{whole.http}/v1/chat/completions", json=body, timeout=60) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert "seed" in json.loads(events[0])["shoal"]


def test_a_drawn_seed_is_reported_and_replays_the_answer(api: openai.OpenAI) -> None:
    first = chat(api, "Anything?", seed=None, temperature=1.0, max_tokens=40)
    again = chat(api, "Anything?", seed=first.shoal["seed"], temperature=1.0, max_tokens=40)
    other = chat(api, "Anything?", seed=first.shoal["seed"] ^ 1, temperature=1.0, max_tokens=40)
    assert text_of(again) == text_of(first)
    assert text_of(other) != text_of(first)


def test_two_choices_differ_and_both_count(api: openai.OpenAI) -> None:
    answer = chat(api, "Two ways?", n=2, temperature=1.0, max_tokens=30)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.content != answer.choices[1].message.content
    assert answer.usage.completion_tokens == 60


def test_a_stop_string_ends_the_answer_before_it_streamed_or_not(api: openai.OpenAI) -> None:
    text = chat(api, "Talk on.", temperature=0, max_tokens=60).choices[0].message.content
    position = next(at for at in range(len(text) // 2, len(text) - 2) if text.find(text[at : at + 2]) == at)
    stop = text[position : position + 2]
    stopped = chat(api, "Talk on.", temperature=0, max_tokens=60, stop=[stop])
    assert stopped.choices[0].message.content == text[:position]
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.usage.completion_tokens < 60
    events = list(chat(api, "Talk on.", temperature=0, max_tokens=60, stop=[stop], stream=True))
    assert "".join(event.choices[0].delta.content or "" for event in events) == text[:position]


def test_logprobs_come_with_every_token_and_name_the_emitted_one(api: openai.OpenAI) -> None:
    # Letters only: bytes of a character that is cut off at the end have no text and no entry.
    letters = {str(token_id): 100 for token_id in range(74, 100)}
    fields = {"temperature": 0, "max_tokens": 8, "logprobs": True, "top_logprobs": 3, "logit_bias": letters}
    content = chat(api, "How likely?", **fields).choices[0].logprobs.content
    assert len(content) == 8
    for token in content:
        assert len(token.top_logprobs) == 3
        assert token.logprob <= 0
        # Greedy: what was emitted is the best.
        assert token.token == token.top_logprobs[0].token
        assert token.logprob == token.top_logprobs[0].logprob == max(top.logprob for top in token.top_logprobs)


def test_the_extension_forces_bans_reports_the_prompt_and_counts_drafts(whole: Mesh, api: openai.OpenAI) -> None:
    fields = {"forced_ids": [80, 81, 82], "bad_words": ["zz", [90, 91]], "prompt_logprobs": 1, "determinism": "exact"}
    answer = chat(api, "Hi", temperature=0, extra_body={"shoal": fields})
    spelled = httpx.post(f"{whole.http}/detokenize", json={"tokens": fields["forced_ids"]}).json()["prompt"]
    assert answer.choices[0].message.content.startswith(spelled)
    report = answer.shoal["prompt_logprobs"]
    assert len(report) == answer.usage.prompt_tokens - 1
    assert all(len(one["top_logprobs"]) == 1 and one["logprob"] <= one["top_logprobs"][0]["logprob"] for one in report)
    assert sum(answer.usage.shoal["drafted_by_position"]) >= sum(answer.usage.shoal["verified_by_position"])
    events = list(chat(api, "Hi", temperature=0, extra_body={"shoal": fields}, stream=True))
    assert [event.shoal["prompt_logprobs"] for event in events if getattr(event, "shoal", None)] == [report]
    assert "".join(event.choices[0].delta.content or "" for event in events) == answer.choices[0].message.content


def test_a_prompt_too_long_to_be_reported_is_a_client_error_even_for_a_stream(api: openai.OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            chat(api, LONG, extra_body={"shoal": {"prompt_logprobs": 0}}, stream=stream)
        assert caught.value.code == "prompt_logprobs_need_full_replay"
        assert caught.value.param == "shoal.prompt_logprobs"


def test_the_second_turn_of_a_conversation_hits_the_cache_and_answers_as_without_it(
    api: openai.OpenAI, client: Client
) -> None:
    user = {"user_id": secrets.token_hex(8)}
    first = chat(api, LONG, extra_body=user)
    assert first.usage.prompt_cache_hit_tokens == 0
    turns = [
        {"role": "user", "content": LONG},
        {"role": "assistant", "content": text_of(first)},
        {"role": "user", "content": "And then?"},
    ]
    answers: list[Any] = []

    def is_hit() -> bool:
        answers.append(chat(api, turns, extra_body=user))
        return bool(answers[-1].usage.prompt_cache_hit_tokens >= 128)

    wait_for(is_hit, what=lambda: f"a hit; the usage is {answers[-1].usage}")
    usage = answers[-1].usage
    assert usage.prompt_cache_hit_tokens + usage.prompt_cache_miss_tokens == usage.prompt_tokens
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_cache_hit_tokens
    stranger = chat(api, turns, extra_body={"user_id": secrets.token_hex(8)})
    assert stranger.usage.prompt_cache_hit_tokens == 0
    assert {text_of(one) for one in answers} == {text_of(stranger)}


def test_a_chat_in_text_is_the_offline_answer_to_the_tokens_of_its_prompt(
    whole: Mesh, client: Client, offline: LLM
) -> None:
    messages = [{"role": "user", "content": "Which one?"}]
    encoded = httpx.post(f"{whole.http}/tokenize", json={"messages": messages}).json()["tokens"]
    asked = generation_of(
        messages,
        sampling=SamplingParams(temperature=1.0, seed=8, max_tokens=30, ignore_eos=True),
        output_form=generation_pb2.OUTPUT_FORM_TEXT_AND_TOKENS,
    )
    answer = client.generate(asked)
    params = OfflineParams(temperature=1.0, seed=8, max_tokens=30, ignore_eos=True)
    [output] = offline.generate(prompt_token_ids=[encoded], sampling_params=params, decode_sequence=False)
    assert tuple(answer.choices[0].output.tokens.ids) == output.outputs[0].token_ids
    assert answer.tail.usage.prompt_tokens == len(encoded)


def test_a_cache_point_keeps_the_snapshots_at_its_message_s_end(whole: Mesh, api: openai.OpenAI) -> None:
    system, user = {"role": "system", "content": LONG * 3}, {"role": "user", "content": "One thing. " * 40}
    shape = {"thinking": {"type": "disabled"}}

    def encoded(messages: list[dict[str, str]]) -> list[int]:
        answer = httpx.post(f"{whole.http}/tokenize", json={"messages": messages, **shape})
        ids: list[int] = answer.json()["tokens"]
        return ids

    def entries(points: list[int]) -> float:
        """Blocks and snapshots that one conversation leaves behind."""
        before = whole.numbers("kv_cache")["entries"]
        own = {"user_id": secrets.token_hex(8), "shoal": {"cache_points": points}}
        chat(api, [system, user], extra_body=own, max_tokens=1)
        whole.wait_idle()
        return whole.numbers("kv_cache")["entries"] - before

    ids = encoded([system, user])
    alone = encoded([system])
    point = next((at for at, pair in enumerate(zip(ids, alone, strict=False)) if pair[0] != pair[1]), len(alone))
    kept = stored_snapshots(len(ids), REPLAY_TOKENS, (point,)) - stored_snapshots(len(ids), REPLAY_TOKENS)
    assert kept
    without = entries([])
    wait_for(lambda: entries([0]) == without + len(kept), what=lambda: f"{len(kept)} snapshots more than {without}")
