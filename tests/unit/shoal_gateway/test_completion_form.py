"""The bytes of completions: streamed equals whole, tokens lie where their offsets say, prompts come first."""

from __future__ import annotations

import json
from typing import Any

import pytest
from deepseek_recipe import Tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from shoal.common.v1 import sampling_pb2
from shoal.common.v1.tokens_pb2 import PositionLogprobs, TokenLogprob
from shoal_gateway.echo import Echo
from shoal_gateway.http.forms.completions import CompletionForm
from shoal_gateway.http.forms.token_spellings import spelled, token_bytes
from shoal_gateway.output_reader import ChoiceOutput, OutputReader
from shoal_gateway.refusals import NoCapacity
from shoal_gateway.text import detokenize, plain_recipe

LENGTH = sampling_pb2.FINISH_REASON_LENGTH
GOING = sampling_pb2.FINISH_REASON_UNSPECIFIED
TEXTS = ["plain words", "naïve 🙂 end", "a</think>b <｜User｜>", "¿qué? 日本"]


def position(token_id: int) -> PositionLogprobs:
    other = (token_id + 1) % 504
    return PositionLogprobs(
        emitted=TokenLogprob(token_id=token_id, logprob=-0.5),
        top=[TokenLogprob(token_id=other, logprob=-0.25), TokenLogprob(token_id=token_id, logprob=-0.5)],
    )


def batches(
    tokenizer: Tokenizer,
    texts: list[str],
    width: int,
    *,
    stop: tuple[str, ...] = (),
    prompts: list[list[int]] | None = None,
    order: tuple[int, ...] | None = None,
) -> list[list[ChoiceOutput]]:
    """Choice k says text k, all in turns of `width` tokens; with `prompts`, choice k has the log-probabilities of k."""
    reader = OutputReader(len(texts), plain_recipe(stop, frozenset({1})), tokenizer)
    ids = [tokenizer.encode(text) for text in texts]
    read = []
    for start in range(0, max(map(len, ids)), width):
        for index in order or range(len(ids)):
            one = ids[index]
            if start < len(one):
                told = [position(token_id) for token_id in one[start : start + width]]
                prompt = [position(token_id) for token_id in prompts[index][1:]] if prompts and not start else []
                reader.add(
                    index, one[start : start + width], told, LENGTH if start + width >= len(one) else GOING, prompt
                )
            read.append(reader.read()[0])
    return read


def form(tokenizer: Tokenizer, **fields: Any) -> CompletionForm:
    given: dict[str, Any] = {
        "answer_id": "cmpl-1",
        "model": "m",
        "created_s": 7,
        "choice_count": 1,
        "prompt_count": 1,
        "echoes": (),
        "has_logprobs": False,
        "has_echo_logprobs": False,
        "extension": {"seed": 3},
        "include_usage": False,
    }
    return CompletionForm(**{**given, **fields}, tokenizer=tokenizer)


def whole(read: list[list[ChoiceOutput]], made: CompletionForm) -> list[dict[str, Any]]:
    for outputs in read:
        made.add(outputs)
    body = json.loads(made.body(sampling_pb2.Usage()))
    assert (body["id"], body["object"], body["shoal"]) == ("cmpl-1", "text_completion", {"seed": 3})
    choices: list[dict[str, Any]] = body["choices"]
    return choices


def events_of(read: list[list[ChoiceOutput]], made: CompletionForm) -> list[dict[str, Any]]:
    raw = b"".join(made.events(outputs) for outputs in read) + made.end(sampling_pb2.Usage(prompt_tokens=2))
    *events, done = [one.removeprefix("data: ") for one in raw.decode().split("\n\n") if one]
    assert done == "[DONE]"
    return [json.loads(one) for one in events]


def streamed(read: list[list[ChoiceOutput]], made: CompletionForm) -> list[dict[str, Any]]:
    """What a client puts together."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events_of(read, made):
        for choice in event["choices"]:
            one = choices.setdefault(choice["index"], {"text": "", "index": choice["index"], "logprobs": None})
            one["text"] += choice["text"]
            if choice["logprobs"] is not None:
                lists = one["logprobs"] = one["logprobs"] or {key: [] for key in choice["logprobs"]}
                for key, values in choice["logprobs"].items():
                    lists[key] += values
            assert one.get("finish_reason") is None
            one["finish_reason"] = choice["finish_reason"]
    return [choices[index] for index in sorted(choices)]


@given(texts=st.lists(st.sampled_from(TEXTS), min_size=1, max_size=3), width=st.integers(1, 7), logprobs=st.booleans())
@settings(deadline=None, max_examples=40)
def test_streamed_and_whole_choices_are_the_same(
    tokenizer: Tokenizer, texts: list[str], width: int, logprobs: bool
) -> None:
    fields = {"choice_count": len(texts), "has_logprobs": logprobs}
    by_one = whole(batches(tokenizer, texts, 1), form(tokenizer, **fields))
    assert streamed(batches(tokenizer, texts, width), form(tokenizer, **fields)) == by_one
    assert [one["text"] for one in by_one] == texts
    assert all(one["finish_reason"] == "length" for one in by_one)


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_lie_where_their_offsets_say(tokenizer: Tokenizer, text: str) -> None:
    (choice,) = whole(batches(tokenizer, [text], 3), form(tokenizer, has_logprobs=True))
    told = choice["logprobs"]
    assert len({len(values) for values in told.values()}) == 1
    assert len(told["tokens"]) == len(tokenizer.encode(text))
    for name, offset in zip(told["tokens"], told["text_offset"], strict=True):
        if name.startswith("bytes:"):
            part = bytes(int(one, 16) for one in name.split("\\x")[1:])
            assert part in text[offset].encode()
        else:
            assert text[offset:].startswith(name)


def test_the_emitted_token_is_among_the_best_ones(tokenizer: Tokenizer) -> None:
    (choice,) = whole(batches(tokenizer, ["a"], 1), form(tokenizer, has_logprobs=True))
    (other,) = [token_bytes([one + 1], tokenizer)[one + 1].decode() for one in tokenizer.encode("a")]
    assert choice["logprobs"]["token_logprobs"] == [-0.5]
    assert choice["logprobs"]["top_logprobs"] == [{other: -0.25, "a": -0.5}]


def test_no_token_is_reported_that_begins_behind_a_stop_string(tokenizer: Tokenizer) -> None:
    made = form(tokenizer, has_logprobs=True)
    (choice,) = whole(batches(tokenizer, ["good bye then"], 1, stop=("bye",)), made)
    assert (choice["text"], choice["finish_reason"]) == ("good ", "stop")
    assert max(choice["logprobs"]["text_offset"]) < len("good ")


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_repeated_comes_first_in_every_choice(tokenizer: Tokenizer, stream: bool) -> None:
    read = batches(tokenizer, ["one", "two", "six", "ten"], 2)
    echoes = [Echo(text="p ", prompt_ids=(0, 5), first=1), Echo(text="q ", prompt_ids=(0, 6), first=1)]
    made = form(tokenizer, choice_count=2, prompt_count=2, echoes=echoes)
    assert [one["text"] for one in (streamed if stream else whole)(read, made)] == ["p one", "p two", "q six", "q ten"]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_repeated_prompts_carry_their_log_probabilities(
    tokenizer: Tokenizer, first: int, order: tuple[int, ...]
) -> None:
    prompt = "naïve "
    ids = [0, *tokenizer.encode(prompt)]
    text = prompt if first else detokenize(ids, tokenizer)
    fields: dict[str, Any] = {
        "choice_count": 2,
        "echoes": [Echo(text=text, prompt_ids=ids, first=first)],
        "has_logprobs": True,
        "has_echo_logprobs": True,
    }

    def read() -> list[list[ChoiceOutput]]:
        # Only the prompt's first choice has them.
        return batches(tokenizer, ["yes", "no"], 1, prompts=[ids, [0]], order=order)

    choices = whole(read(), form(tokenizer, **fields))
    assert streamed(read(), form(tokenizer, **fields)) == choices
    assert [one["text"] for one in choices] == [text + "yes", text + "no"]
    for choice in choices:
        told = choice["logprobs"]
        assert len(told["tokens"]) == len(ids) - first + (3 if choice["text"].endswith("yes") else 2)
        assert (told["token_logprobs"][0], told["top_logprobs"][0] is None) == (
            (-0.5, False) if first else (None, True)
        )
        assert told["text_offset"][-1] == len(choice["text"]) - 1
        last = told["tokens"][-1]
        assert choice["text"].endswith(last)


def test_events_have_the_shape_of_the_protocol(tokenizer: Tokenizer) -> None:
    made = form(tokenizer, include_usage=True)
    *chunks, tail = events_of(batches(tokenizer, ["some text"], 2), made)
    assert "shoal" in chunks[0]
    assert not any("shoal" in one for one in chunks[1:])
    assert all((one["id"], one["object"], one["created"]) == ("cmpl-1", "text_completion", 7) for one in chunks)
    assert all(one["usage"] is None for one in chunks)
    assert (tail["choices"], tail["usage"]["prompt_tokens"], tail["shoal"]) == ([], 2, {"seed": 3})
    assert [one["choices"][0]["finish_reason"] for one in chunks] == [None] * (len(chunks) - 1) + ["length"]


def test_a_batch_without_text_is_no_event(tokenizer: Tokenizer) -> None:
    made = form(tokenizer)
    reader = OutputReader(1, plain_recipe((), frozenset({1})), tokenizer)
    half = tokenizer.encode("ï")[:1]
    reader.add(0, half, [], GOING)
    assert made.events(reader.read()[0]) == b""


def test_the_report_on_a_prompt_comes_with_the_extension(tokenizer: Tokenizer) -> None:
    read = batches(tokenizer, ["ab", "cd"], 1, prompts=[[0, 5], [0]], order=(1, 0))
    events = events_of(read, form(tokenizer, choice_count=2))
    reports = [one["shoal"] for one in events if "prompt_logprobs" in one.get("shoal", {})]
    assert [len(one["prompt_logprobs"]) for one in reports] == [1]


def test_an_error_ends_a_stream_without_done(tokenizer: Tokenizer) -> None:
    raw = form(tokenizer).error(NoCapacity("full"))
    assert json.loads(raw.removeprefix(b"data: "))["error"]["code"] == "no_capacity"


def test_every_token_is_spelled_as_it_is_written(tokenizer: Tokenizer) -> None:
    ids = list(range(512))
    raw = token_bytes(ids, tokenizer)
    text = "naïve 🙂 <｜User｜>日本"
    assert b"".join(raw[one] for one in tokenizer.encode(text)).decode() == text
    assert len(raw) == 512
    assert spelled(raw[3]) == "<｜User｜>"
    assert spelled(b"\xc3") == "bytes:\\xc3"
