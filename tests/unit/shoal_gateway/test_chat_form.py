"""The bytes of Chat Completions: splicing the recipe's JSON changes nothing but what it should."""

from __future__ import annotations

import json
from typing import Any

import pytest
from deepseek_recipe import Tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shoal.common.v1 import sampling_pb2
from shoal.common.v1.tokens_pb2 import PositionLogprobs, TokenLogprob
from shoal.inference.v1 import generation_pb2, inference_service_pb2
from shoal_gateway.deltas import DeltaWriter, collect
from shoal_gateway.encode import Encoder
from shoal_gateway.http.forms.chat import ChatForm, usage_object
from shoal_gateway.output_reader import ChoiceOutput, OutputReader
from shoal_gateway.text import OutputRecipe

LENGTH = sampling_pb2.FINISH_REASON_LENGTH
GOING = sampling_pb2.FINISH_REASON_UNSPECIFIED
TOOLS = [{"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "g"}}]
CALLS = (
    '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n'
    '<｜DSML｜ parameter name="K" string="true">V</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n'
    '<｜DSML｜ invoke name="g">\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
)
TEXTS = ["plain words", '}],"usage":null}', '"choices":[{"index":0,', "naïve 🙂", "a</think>b", "hm</think>hi" + CALLS]


def recipe_of(encoder: Encoder) -> OutputRecipe:
    body = {"model": "deepseek-flash", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS}
    output = encoder.chat_now(body).request.output
    assert output is not None
    return output


def batches(encoder: Encoder, tokenizer: Tokenizer, texts: list[str], width: int) -> list[list[ChoiceOutput]]:
    """Choice k says text k, all in turns of `width` tokens."""
    reader = OutputReader(len(texts), recipe_of(encoder), tokenizer)
    ids = [tokenizer.encode(text) for text in texts]
    read = []
    for start in range(0, max(map(len, ids)), width):
        for index, one in enumerate(ids):
            if start < len(one):
                finish = LENGTH if start + width >= len(one) else GOING
                reader.add(index, one[start : start + width], [], finish)
        read.append(reader.read()[0])
    assert reader.is_finished
    return read


def form_of(tokenizer: Tokenizer, count: int) -> ChatForm:
    return ChatForm(
        answer_id="chatcmpl-1",
        model="m",
        created_s=7,
        choice_count=count,
        extension={"seed": 3},
        include_usage=True,
        is_thinking=True,
        tokenizer=tokenizer,
    )


def streamed(read: list[list[ChoiceOutput]], count: int, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """What a client makes of the events: one message per choice."""
    form = form_of(tokenizer, count)
    raw = b"".join(form.events(outputs) for outputs in read)
    messages: list[dict[str, Any]] = [{"content": "", "reasoning_content": "", "calls": []} for _ in range(count)]
    events = [json.loads(one.removeprefix("data: ")) for one in raw.decode().split("\n\n") if one]
    assert "shoal" in events[0]
    assert not any("shoal" in one for one in events[1:])
    for event in events:
        assert (event["id"], event["model"], event["created"], event["usage"]) == ("chatcmpl-1", "m", 7, None)
        (choice,) = event["choices"]
        message, delta = messages[choice["index"]], choice["delta"]
        assert ("role" in delta) == ("role" not in message)
        if "role" in delta:
            message["role"] = delta["role"]
        for key in ("content", "reasoning_content"):
            message[key] += delta.get(key) or ""
        for call in delta.get("tool_calls") or ():
            if call.get("id"):
                message["calls"].append({"name": call["function"]["name"], "arguments": ""})
            message["calls"][call["index"]]["arguments"] += call["function"].get("arguments") or ""
        assert "finish_reason" not in message
        if choice["finish_reason"]:
            message["finish_reason"] = choice["finish_reason"]
    return messages


@pytest.mark.parametrize("width", [1, 3, 1000])
def test_streamed_whole_and_grpc_say_the_same(encoder: Encoder, tokenizer: Tokenizer, width: int) -> None:
    want = streamed(batches(encoder, tokenizer, TEXTS, width), len(TEXTS), tokenizer)
    whole = form_of(tokenizer, len(TEXTS))
    response = inference_service_pb2.GenerateResponse()
    writers = [DeltaWriter(index, has_tokens=False) for index in range(len(TEXTS))]
    for outputs in batches(encoder, tokenizer, TEXTS, width):
        for output in outputs:
            choice = generation_pb2.Choice(
                output=writers[output.choice_index].delta(output), finish_reason=output.finish_reason
            )
            collect(response, inference_service_pb2.GenerateStreamResponse(finish=choice))
        # Last, as accumulating uses a chunk up.
        whole.add(outputs)
    body = json.loads(whole.body(sampling_pb2.Usage()))
    assert [choice["index"] for choice in body["choices"]] == list(range(len(TEXTS)))
    for one, choice, remote in zip(want, body["choices"], response.choices, strict=True):
        message = choice["message"]
        assert (message["content"] or "", message.get("reasoning_content") or "") == (
            one["content"],
            one["reasoning_content"],
        )
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        assert calls == one["calls"]
        assert choice["finish_reason"] == one["finish_reason"]
        assert (remote.output.text, remote.output.reasoning_text) == (one["content"], one["reasoning_content"])
        assert [(call.name, call.arguments_json) for call in remote.output.tool_calls] == [
            (call["name"], call["arguments"]) for call in calls
        ]
    assert want[-1]["calls"] == [{"name": "f", "arguments": '{"K": "V"}'}, {"name": "g", "arguments": "{}"}]
    assert want[-1]["finish_reason"] == "tool_calls"


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(max_size=30))
def test_any_text_survives_the_splicing(encoder: Encoder, tokenizer: Tokenizer, text: str) -> None:
    (message,) = streamed(batches(encoder, tokenizer, ["x" + text], 1), 1, tokenizer)
    assert ("x" + text).startswith(message["reasoning_content"] or "x")


def test_hits_and_misses_add_up_to_the_prompt() -> None:
    usage = sampling_pb2.Usage(
        prompt_tokens=10,
        completion_tokens=4,
        cached_prompt_tokens=3,
        reasoning_tokens=2,
        decode_step_count=3,
        drafted_by_position=[3, 2],
        verified_by_position=[2, 1],
        accepted_by_position=[1],
    )
    assert usage_object(usage, is_thinking=True) == {
        "prompt_tokens": 10,
        "completion_tokens": 4,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 2},
        "prompt_cache_hit_tokens": 3,
        "prompt_cache_miss_tokens": 7,
        "shoal": {
            "decode_steps": 3,
            "drafted_by_position": [3, 2],
            "verified_by_position": [2, 1],
            "accepted_by_position": [1],
        },
    }


def test_what_is_said_of_the_prompt_comes_once_with_the_next_event(encoder: Encoder, tokenizer: Tokenizer) -> None:
    form = form_of(tokenizer, 1)
    first, second = batches(encoder, tokenizer, ["Hello to all of you"], 1)[:2]
    (token_id,) = tokenizer.encode("a")
    first[0].prompt_logprobs = [PositionLogprobs(emitted=TokenLogprob(token_id=token_id, logprob=-0.5))]
    raw = form.events(first) + form.events(second) + form.end(sampling_pb2.Usage())
    *events, done = [each.removeprefix("data: ") for each in raw.decode().split("\n\n") if each]
    assert done == "[DONE]"
    said = [json.loads(each).get("shoal") for each in events]
    one = {"token_id": token_id, "token": "a", "logprob": -0.5, "top_logprobs": []}
    assert said[0] == {"seed": 3, "prompt_logprobs": [one]}
    assert said[1:-1] == [None] * (len(events) - 2)
    assert said[-1] == {"seed": 3}


@pytest.mark.parametrize("text", ["hm", "hm</think>hi", "</think>hi", '"logprobs":{"reasoning_content":</think>x'])
def test_logprobs_have_content_even_if_all_is_reasoning(encoder: Encoder, tokenizer: Tokenizer, text: str) -> None:
    def read() -> list[ChoiceOutput]:
        reader = OutputReader(1, recipe_of(encoder), tokenizer)
        ids = tokenizer.encode(text)
        said = [PositionLogprobs(emitted=TokenLogprob(token_id=one, logprob=-0.5)) for one in ids]
        reader.add(0, ids, said, LENGTH)
        return reader.read()[0]

    thought, _, answer = text.partition("</think>")
    form = form_of(tokenizer, 1)
    form.add(read())
    whole = json.loads(form.body(sampling_pb2.Usage()))["choices"][0]
    counts = [len(whole["logprobs"].get(part) or ()) for part in ("content", "reasoning_content")]
    assert counts == [len(tokenizer.encode(part)) for part in (answer, thought)]
    assert "content" in whole["logprobs"]
    raw = form_of(tokenizer, 1).events(read()).decode()
    choices = [json.loads(one.removeprefix("data: "))["choices"][0] for one in raw.split("\n\n") if one]
    told = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
    assert all("content" in one for one in told)
    assert sum(len(one["content"] or ()) for one in told) == counts[0]
    assert "".join(choice["delta"].get("reasoning_content") or "" for choice in choices) == thought
