"""What a client puts together from a stream is what it would get whole, in every API, however the output is cut."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from deepseek_recipe import Tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shoal.common.v1 import sampling_pb2
from shoal.common.v1.tokens_pb2 import PositionLogprobs, TokenLogprob
from shoal_common.errors import Unavailable
from shoal_gateway.dialect import CHAT_DIALECT, MESSAGES_DIALECT, RESPONSES_DIALECT, Dialect
from shoal_gateway.encode import Encoder
from shoal_gateway.http.form import AnswerForm
from shoal_gateway.http.forms.chat import ChatForm
from shoal_gateway.http.forms.messages import MessagesForm
from shoal_gateway.http.forms.responses import ResponsesForm
from shoal_gateway.output_reader import ChoiceOutput, OutputReader
from shoal_gateway.text import ChoiceText, OutputRecipe

GOING, STOP, LENGTH = (
    sampling_pb2.FINISH_REASON_UNSPECIFIED,
    sampling_pb2.FINISH_REASON_STOP,
    sampling_pb2.FINISH_REASON_LENGTH,
)
EOS = 1
USAGE = sampling_pb2.Usage(prompt_tokens=9, completion_tokens=7, cached_prompt_tokens=4, reasoning_tokens=2)
APIS = ("chat", "messages", "responses")
SCHEMA = {"type": "object", "properties": {"K": {"type": "string"}}}
CALLS = (
    '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n'
    '<｜DSML｜ parameter name="K" string="true">V "é" 🙂\n</｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="J" string="false">[1, {"a": null}]</｜DSML｜ parameter>\n'
    '</｜DSML｜ invoke>\n<｜DSML｜ invoke name="g">\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
)
PIECES = [
    "ab",
    "abc",
    "a",
    "é",
    "🙂",
    "漢字",
    "</think>",
    "\n\n",
    "<｜DSML｜ calls>",
    '"}],"usage":null}',
    "x y",
    CALLS,
]
STOPS = ["ab", "abcd", "é🙂", "字"]


class Api:
    """Recipes and forms of one API."""

    def __init__(self, name: str, encoder: Encoder) -> None:
        self.name, self._encoder = name, encoder

    def recipe(self, *, is_thinking: bool, has_tools: bool, stops: Sequence[str] = ()) -> OutputRecipe:
        """How output is read; Responses knows no stops, whose recipe gets them all the same."""
        body: dict[str, Any] = {"model": "deepseek-flash"}
        user = [{"role": "user", "content": "x"}]
        dialect: Dialect
        if self.name == "chat":
            dialect = CHAT_DIALECT
            body |= {"messages": user, "thinking": {"type": "enabled" if is_thinking else "disabled"}}
            tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in "fg"]
        elif self.name == "messages":
            dialect = MESSAGES_DIALECT
            body |= {"messages": user, "thinking": {"type": "enabled" if is_thinking else "disabled"}}
            tools = [{"name": name, "input_schema": SCHEMA} for name in "fg"]
        else:
            dialect = RESPONSES_DIALECT
            body |= {"input": user, "reasoning": {"effort": "high" if is_thinking else "none"}}
            tools = [{"type": "function", "name": name, "parameters": SCHEMA} for name in "fg"]
        if has_tools:
            body["tools"] = tools
        output = self._encoder.chat_now(body, dialect).request.output
        assert output is not None
        output.parsing.stop_sequences = list(stops)
        return output

    def form(self, recipe: OutputRecipe) -> AnswerForm:
        """A form with seed 3."""
        tokenizer, extension = self._encoder.tokenizer, {"seed": 3}
        if self.name == "messages":
            return MessagesForm(extension=extension, tokenizer=tokenizer)
        if self.name == "responses":
            return ResponsesForm(
                opening=lambda: ChoiceText(recipe, tokenizer, "r").begin()[0].to_json(),
                echoed={"metadata": {"a": "b"}},
                extension=extension,
                tokenizer=tokenizer,
            )
        return ChatForm(
            answer_id="chatcmpl-r",
            model="m",
            created_s=7,
            choice_count=1,
            extension=extension,
            include_usage=True,
            is_thinking=True,
            tokenizer=tokenizer,
        )


@pytest.fixture(params=APIS, scope="module")
def api(request: pytest.FixtureRequest, encoder: Encoder) -> Api:
    return Api(request.param, encoder)


def cuts(ids: Sequence[int], at: Sequence[int]) -> list[Sequence[int]]:
    edges = [0, *sorted({one for one in at if 0 < one < len(ids)}), len(ids)]
    return [ids[begin:end] for begin, end in itertools.pairwise(edges)]


def batches(
    recipe: OutputRecipe, tokenizer: Tokenizer, pieces: Sequence[Sequence[int]], reason: Any = STOP
) -> list[list[ChoiceOutput]]:
    """What one choice says, one batch per piece."""
    reader = OutputReader(1, recipe, tokenizer, request_id="r", prompt_tokens=9)
    reader.cached_tokens = 4
    read = []
    for index, piece in enumerate(pieces):
        reader.add(0, piece, [], reason if index == len(pieces) - 1 else GOING)
        if outputs := reader.read()[0]:
            read.append(outputs)
    assert reader.is_finished
    return read


def events(raw: bytes) -> list[tuple[str, Any]]:
    """Name and data of each event; [DONE] left out."""
    read = []
    for one in raw.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in one.split("\n") if line)
        if fields.get("data", "[DONE]") != "[DONE]":
            read.append((fields.get("event", ""), json.loads(fields["data"])))
    return read


def of_chat(read: list[tuple[str, Any]]) -> dict[str, Any]:
    first, last = read[0][1], read[-1][1]
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    for _, event in read[:-1]:
        (choice,) = event["choices"]
        for key in ("content", "reasoning_content"):
            message[key] += choice["delta"].get(key) or ""
        for call in choice["delta"].get("tool_calls") or ():
            if call.get("id"):
                message["tool_calls"].append({**call, "function": {**call["function"], "arguments": ""}})
            message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"].get("arguments") or ""
        finish_reason = choice["finish_reason"]
    shared = {key: first[key] for key in ("id", "created", "model", "system_fingerprint", "shoal")}
    choices = [{"index": 0, "message": message, "finish_reason": finish_reason}]
    return {**shared, "choices": choices, "usage": last["usage"]}


def of_messages(read: list[tuple[str, Any]]) -> dict[str, Any]:
    assert [name for name, _ in read] == [event["type"] for _, event in read]
    assert (read[0][0], read[-2][0], read[-1][0]) == ("message_start", "message_delta", "message_stop")
    message: dict[str, Any] = read[0][1]["message"]
    assert message["usage"] == {**message["usage"], "input_tokens": 5, "cache_read_input_tokens": 4}
    is_open = False
    for name, event in read[1:-2]:
        if name == "content_block_start":
            assert (event["index"], is_open) == (len(message["content"]), False)
            is_open = True
            block = event["content_block"]
            message["content"].append(block)
            raw_input = ""
        elif name == "content_block_delta":
            assert (event["index"], is_open) == (len(message["content"]) - 1, True)
            delta = event["delta"]
            kind = delta["type"].removesuffix("_delta")
            if kind == "input_json":
                raw_input += delta["partial_json"]
            else:
                block[kind] += delta[kind]
        elif name == "content_block_stop":
            is_open = False
            if block["type"] == "tool_use":
                block["input"] = json.loads(raw_input)
        else:
            assert name == "ping"
    assert not is_open
    return {**message, **read[-2][1]["delta"], "usage": read[-2][1]["usage"]}


def of_responses(read: list[tuple[str, Any]]) -> dict[str, Any]:
    assert [name for name, _ in read] == [event["type"] for _, event in read]
    assert [event["sequence_number"] for _, event in read] == list(range(len(read)))
    assert [name for name, _ in read[:2]] == ["response.created", "response.in_progress"]
    response: dict[str, Any] = read[-1][1]["response"]
    assert read[-1][0] == f"response.{response['status']}"
    texts: dict[int, str] = {}
    for name, event in read:
        if name.endswith(".delta"):
            texts[event["output_index"]] = texts.get(event["output_index"], "") + event["delta"]
    done = [event["item"] for name, event in read if name == "response.output_item.done"]
    assert done == response["output"]
    for index, item in enumerate(done):
        said = item["arguments"] if item["type"] == "function_call" else "".join(one["text"] for one in item["content"])
        assert texts.get(index, "") == said
    return response


JOIN: dict[str, Callable[[list[tuple[str, Any]]], dict[str, Any]]] = {
    "chat": of_chat,
    "messages": of_messages,
    "responses": of_responses,
}


def without_drawn(value: Any) -> Any:
    """Ids of calls are drawn by the recipe, times are the clock's; what is absent and what is empty mean the same."""
    if isinstance(value, dict):
        dropped = ("created_at", "completed_at", "object", "logprobs")
        kept = {key: without_drawn(one) for key, one in value.items() if key not in dropped}
        return {key: one for key, one in kept.items() if one not in (None, "", [])}
    if isinstance(value, list):
        return [without_drawn(one) for one in value]
    return re.sub(r"^call_\w+", "call", value) if isinstance(value, str) else value


def streamed(api: Api, recipe: OutputRecipe, read: list[list[ChoiceOutput]]) -> dict[str, Any]:
    form = api.form(recipe)
    raw = b"".join(form.events(outputs) for outputs in read) + form.end(USAGE)
    made: dict[str, Any] = without_drawn(JOIN[api.name](events(raw)))
    return made


def whole(api: Api, recipe: OutputRecipe, read: list[list[ChoiceOutput]]) -> dict[str, Any]:
    form = api.form(recipe)
    for outputs in read:
        form.add(outputs)
    made: dict[str, Any] = without_drawn(json.loads(form.body(USAGE)))
    for choice in made.get("choices", ()):
        for index, call in enumerate(choice["message"].get("tool_calls", ())):
            # Only a stream has to say which call a fragment belongs to.
            call["index"] = index
    return made


CASES: dict[str, tuple[dict[str, Any], str, Any]] = {
    "many alphabets": ({"is_thinking": False, "has_tools": False}, "naïve 漢字 🙂👩‍👩‍👧 и ещё", STOP),
    "cut off": ({"is_thinking": False, "has_tools": False}, "naïve 漢字", LENGTH),
    "cut off in the thought": ({"is_thinking": True, "has_tools": True}, "so é 🙂 then", LENGTH),
    "nothing but a thought": ({"is_thinking": True, "has_tools": False}, "so é 🙂 then</think>", STOP),
    "thinking": ({"is_thinking": True, "has_tools": False}, "so é 🙂 then</think>done 漢", STOP),
    "tool calls": ({"is_thinking": False, "has_tools": True}, "hi" + CALLS, STOP),
    "thought and tool calls": ({"is_thinking": True, "has_tools": True}, "hm</think>hi" + CALLS + "and more", STOP),
    "tool calls cut off": ({"is_thinking": True, "has_tools": True}, "hm</think>" + CALLS[:-60], LENGTH),
    "a stop": ({"is_thinking": False, "has_tools": False, "stops": STOPS}, "x🙂é🙂abcd", STOP),
    "a longer stop that begins with another": (
        {"is_thinking": True, "has_tools": True, "stops": ["abcd", "ab"]},
        "abcd</think>xabcd",
        STOP,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_streamed_in_single_tokens_or_at_once_is_the_whole_answer(api: Api, encoder: Encoder, name: str) -> None:
    fields, text, reason = CASES[name]
    recipe, ids = api.recipe(**fields), encoder.tokenizer.encode(text)
    want = whole(api, recipe, batches(recipe, encoder.tokenizer, [ids], reason))
    for pieces in ([ids], [[one] for one in ids], [[one] for one in [*ids, EOS]]):
        assert streamed(api, recipe, batches(recipe, encoder.tokenizer, pieces, reason)) == want
    assert want["shoal"] == {"seed": 3}


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_output_however_cut_is_streamed_as_the_whole_answer(
    api: Api, encoder: Encoder, data: st.DataObject
) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=8))) or "a"
    recipe = api.recipe(
        is_thinking=data.draw(st.booleans()),
        has_tools=data.draw(st.booleans()),
        stops=data.draw(st.lists(st.sampled_from(STOPS), unique=True, max_size=4)),
    )
    reason = data.draw(st.sampled_from([STOP, LENGTH]))
    ids = encoder.tokenizer.encode(text)
    at = data.draw(st.lists(st.integers(0, len(ids)), max_size=6))
    want = whole(api, recipe, batches(recipe, encoder.tokenizer, [ids], reason))
    assert streamed(api, recipe, batches(recipe, encoder.tokenizer, cuts(ids, at), reason)) == want


def test_usage_is_exact_in_the_words_of_each_api(api: Api, encoder: Encoder) -> None:
    recipe = api.recipe(is_thinking=False, has_tools=False)
    usage = whole(api, recipe, batches(recipe, encoder.tokenizer, [encoder.tokenizer.encode("hi")]))["usage"]
    # The recipe counted two tokens or so; what counts is what was used.
    if api.name == "messages":
        assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (5, 4, 7)
    elif api.name == "responses":
        assert usage == {
            "input_tokens": 9,
            "input_tokens_details": {"cached_tokens": 4},
            "output_tokens": 7,
            "output_tokens_details": {"reasoning_tokens": 2},
            "total_tokens": 16,
        }
    else:
        assert (usage["prompt_cache_hit_tokens"], usage["prompt_cache_miss_tokens"]) == (4, 5)


def test_the_stop_string_that_ended_a_message_is_named(encoder: Encoder) -> None:
    api = Api("messages", encoder)
    recipe = api.recipe(is_thinking=False, has_tools=False, stops=["abcd", "ab"])
    said = streamed(
        api, recipe, batches(recipe, encoder.tokenizer, [[one] for one in encoder.tokenizer.encode("xabcd")])
    )
    assert (said["stop_reason"], said["stop_sequence"]) == ("stop_sequence", "ab")
    assert said["content"] == [{"type": "text", "text": "x"}]


def test_a_thinking_block_has_a_signature(encoder: Encoder) -> None:
    api = Api("messages", encoder)
    recipe = api.recipe(is_thinking=True, has_tools=False)
    said = streamed(api, recipe, batches(recipe, encoder.tokenizer, [encoder.tokenizer.encode("hm</think>hi")]))
    assert said["content"][0] == {"type": "thinking", "thinking": "hm", "signature": "msg_r"}


@pytest.mark.parametrize("has_begun", [False, True])
def test_an_error_after_the_first_byte_ends_the_stream_as_the_protocol_says(
    api: Api, encoder: Encoder, has_begun: bool
) -> None:
    recipe = api.recipe(is_thinking=True, has_tools=False)
    form = api.form(recipe)
    raw = b""
    if has_begun:
        raw = form.events(batches(recipe, encoder.tokenizer, [encoder.tokenizer.encode("hm</think>hi"), [EOS]])[0])
    before = events(raw)
    ((name, said),) = events(form.error(Unavailable("gone", reason="NO_CAPACITY")))
    if api.name == "chat":
        assert (name, said["error"]["code"]) == ("", "no_capacity")
    elif api.name == "messages":
        assert (name, said["type"]) == ("error", "error")
        assert (said["error"]["type"], said["error"]["code"]) == ("overloaded_error", "no_capacity")
    else:
        assert (name, said["type"], said["sequence_number"]) == ("response.failed", "response.failed", len(before))
        response = said["response"]
        assert (response["status"], response["error"]) == ("failed", {"code": "no_capacity", "message": "gone"})
        assert [item["type"] for item in response["output"]] == (["reasoning"] if has_begun else [])
        assert response["shoal"] == {"seed": 3}


def test_what_is_said_of_the_prompt_comes_with_the_first_event(api: Api, encoder: Encoder) -> None:
    recipe = api.recipe(is_thinking=False, has_tools=False)
    (token_id,) = encoder.tokenizer.encode("a")
    logprob = PositionLogprobs(emitted=TokenLogprob(token_id=token_id, logprob=-0.5))
    ids = encoder.tokenizer.encode("hello you")
    both = []
    for _ in range(2):
        read = batches(recipe, encoder.tokenizer, [ids[:2], ids[2:]])
        read[0][0].prompt_logprobs = [logprob]
        both.append(read)
    want = [{"token_id": token_id, "token": "a", "logprob": -0.5}]
    assert streamed(api, recipe, both[0])["shoal"]["prompt_logprobs"] == want
    assert whole(api, recipe, both[1])["shoal"]["prompt_logprobs"] == want


def bytes_by(api: Api, recipe: OutputRecipe, tokenizer: Tokenizer, pieces: list[Sequence[int]], short: bool) -> bytes:
    """A stream of one choice; `short`: whatever can goes the short way of plain entries. Bytes without the time."""
    form, reader = api.form(recipe), OutputReader(1, recipe, tokenizer, request_id="r", prompt_tokens=9)
    raw, taken = b"", 0
    for index, piece in enumerate([*pieces, [EOS]]):
        is_last = index == len(pieces)
        chunks = reader.plain(0, list(piece)) if short and not is_last else None
        if chunks is None:
            reader.add(0, piece, [], STOP if is_last else GOING)
            raw += form.events(reader.read()[0])
        else:
            taken += 1
            raw += form.pieces(0, chunks) if chunks else b""
        if reader.is_finished:
            break
    # The first one begins the choice; where it can end by itself, none may be taken so.
    assert taken == (len(pieces) - 1 if short and not recipe.parsing.stop_sequences else 0)
    return re.sub(rb'"(created|created_at|completed_at)":\d+', b"", raw + form.end(USAGE)) + str(reader.counts).encode()


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_the_short_way_of_plain_entries_writes_the_same_bytes(api: Api, encoder: Encoder, data: st.DataObject) -> None:
    recipe = api.recipe(
        is_thinking=data.draw(st.booleans()),
        has_tools=False,
        stops=data.draw(st.sampled_from([[], [], [], ["ab"]])),
    )
    ids = encoder.tokenizer.encode("".join(data.draw(st.lists(st.sampled_from(PIECES), max_size=8))) or "a")
    ids = [one for token_id in ids for one in ([token_id, EOS] if data.draw(st.booleans()) else [token_id])]
    pieces = cuts(ids, data.draw(st.lists(st.integers(0, len(ids)), max_size=len(ids))))
    short, long = (bytes_by(api, recipe, encoder.tokenizer, pieces, short) for short in (True, False))
    assert short == long
