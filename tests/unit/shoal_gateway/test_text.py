"""Text does not depend on how its tokens are cut into pushes, and ends exactly where a stop completes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from deepseek_recipe import Tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shoal.common.v1 import sampling_pb2, tokens_pb2
from shoal_gateway.encode import Encoder
from shoal_gateway.text import ChoiceText, OutputRecipe, detokenize, plain_recipe

EOS = 1
VOCABULARY = 512
STOP, LENGTH = sampling_pb2.FINISH_REASON_STOP, sampling_pb2.FINISH_REASON_LENGTH
CALLS = (
    '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n'
    '<｜DSML｜ parameter name="K" string="true">V "é" 🙂\n</｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="J" string="false">[1, {"a": null}]</｜DSML｜ parameter>\n'
    '</｜DSML｜ invoke>\n<｜DSML｜ invoke name="g">\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
)


def cuts(ids: Sequence[int], at: Sequence[int]) -> list[Sequence[int]]:
    edges = [0, *sorted({one for one in at if 0 < one < len(ids)}), len(ids)]
    return [ids[begin:end] for begin, end in itertools.pairwise(edges)]


def run(
    recipe: OutputRecipe, tokenizer: Tokenizer, pieces: Sequence[Sequence[int]], reason: Any = STOP
) -> dict[str, Any]:
    """Everything one choice says, joined; ids of calls, which are drawn, left out."""
    text = ChoiceText(recipe, tokenizer)
    chunks = text.begin()
    kept = 0
    for piece in pieces:
        progress = text.push(piece, [])
        chunks += progress.chunks
        kept += progress.kept_count
        if progress.has_ended:
            break
    else:
        chunks += text.finish(reason)
    said: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "kept": kept}
    for chunk in chunks:
        choice = orjson.loads(chunk.to_json())["choices"][0]
        said["content"] += choice["delta"].get("content") or ""
        said["reasoning"] += choice["delta"].get("reasoning_content") or ""
        for call in choice["delta"].get("tool_calls") or ():
            if call.get("id"):
                said["calls"].append([call["function"]["name"], ""])
            said["calls"][-1][1] += call["function"].get("arguments") or ""
        said["reason"] = choice["finish_reason"]
    said["reasoning_tokens"] = text.reasoning_tokens
    return said


def chat_recipe(encoder: Encoder, **fields: Any) -> OutputRecipe:
    body = {"model": "deepseek-flash", "messages": [{"role": "user", "content": "x"}], **fields}
    output = encoder.chat_now(body).request.output
    assert output is not None
    return output


TOOLS = [{"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "g"}}]
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "many alphabets": ({"thinking": {"type": "disabled"}}, "naïve 漢字 🙂👩‍👩‍👧 и ещё"),
    "thinking": ({}, "so é 🙂 then</think>done 漢"),
    "a stop": ({"thinking": {"type": "disabled"}, "stop": ["lo w"]}, "hello world"),
    "a stop of many bytes": ({"thinking": {"type": "disabled"}, "stop": ["🙂é"]}, "a🙂 🙂éb"),
    "a stop in the reasoning is none": ({"stop": ["bc"]}, "abcd</think>xbcy"),
    "tool calls": ({"thinking": {"type": "disabled"}, "tools": TOOLS}, "hi" + CALLS),
    "thought and tool calls": ({"tools": TOOLS}, "hm</think>hi" + CALLS + "and more"),
}


@pytest.mark.parametrize("name", CASES)
def test_any_two_pushes_say_the_same_as_one(encoder: Encoder, tokenizer: Tokenizer, name: str) -> None:
    fields, text = CASES[name]
    recipe = chat_recipe(encoder, **fields)
    ids = tokenizer.encode(text)
    whole = run(recipe, tokenizer, [ids])
    assert run(recipe, tokenizer, [[one] for one in ids]) == whole
    for cut in range(1, len(ids)):
        assert run(recipe, tokenizer, cuts(ids, [cut])) == whole


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_cut_of_any_text_says_the_same(encoder: Encoder, tokenizer: Tokenizer, data: st.DataObject) -> None:
    text = data.draw(st.text(max_size=30))
    stops = data.draw(st.lists(st.text(min_size=1, max_size=3), max_size=3))
    recipe = plain_recipe(stops, frozenset({EOS}))
    ids = tokenizer.encode(text)
    at = data.draw(st.lists(st.integers(0, 60), max_size=6))
    whole = run(recipe, tokenizer, [ids])
    assert run(recipe, tokenizer, cuts(ids, at)) == whole
    assert not any(stop in whole["content"] for stop in stops)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_cut_of_any_tokens_says_the_same_at_a_cut_off(
    encoder: Encoder, tokenizer: Tokenizer, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(2, VOCABULARY - 1), max_size=24))
    is_thinking = data.draw(st.booleans())
    recipe = chat_recipe(encoder, thinking={"type": "enabled" if is_thinking else "disabled"})
    if is_thinking and data.draw(st.booleans()):
        ids[len(ids) // 2 : len(ids) // 2] = tokenizer.encode("</think>")
    at = data.draw(st.lists(st.integers(0, 30), max_size=6))
    single = run(recipe, tokenizer, [[one] for one in ids], LENGTH)
    assert run(recipe, tokenizer, [ids], LENGTH) == single
    assert run(recipe, tokenizer, cuts(ids, at), LENGTH) == single


def test_tool_calls_are_parsed_and_end_the_choice(encoder: Encoder, tokenizer: Tokenizer) -> None:
    recipe = chat_recipe(encoder, tools=TOOLS)
    ids = tokenizer.encode("hm</think>hi" + CALLS)
    said = run(recipe, tokenizer, [ids, tokenizer.encode("and more")])
    assert said["calls"] == [["f", '{"K": "V \\"é\\" 🙂\\n", "J": [1, {"a": null}]}'], ["g", "{}"]]
    assert (said["content"], said["reasoning"], said["reason"]) == ("hi", "hm", "tool_calls")
    assert said["kept"] == len(ids)


def test_the_tag_of_calls_without_tools_ends_nothing(encoder: Encoder, tokenizer: Tokenizer) -> None:
    recipe = chat_recipe(encoder, thinking={"type": "disabled"})
    ids = tokenizer.encode("a </｜DSML｜ calls> b")
    assert run(recipe, tokenizer, [ids])["kept"] == len(ids)


def test_usage_counts_up_to_the_token_that_completed_the_stop(tokenizer: Tokenizer) -> None:
    recipe = plain_recipe(["b"], frozenset({EOS}))
    ids = [*tokenizer.encode("a"), *tokenizer.encode("b"), *tokenizer.encode("c")]
    said = run(recipe, tokenizer, [ids])
    assert (said["content"], said["kept"], said["reason"]) == ("a", 2, "stop")


@pytest.mark.parametrize("stops", [["ab", "abcd"], ["abcd", "ab"]])
def test_of_two_stops_the_one_that_completes_first_counts(tokenizer: Tokenizer, stops: list[str]) -> None:
    ids = [one for letter in "xabcde" for one in tokenizer.encode(letter)]
    said = run(plain_recipe(stops, frozenset({EOS})), tokenizer, [[one] for one in ids])
    assert (said["content"], said["kept"]) == ("x", 3)


def test_a_stop_that_only_began_is_given_out_at_the_end(tokenizer: Tokenizer) -> None:
    said = run(plain_recipe(["abcX"], frozenset({EOS})), tokenizer, [tokenizer.encode("zabc")], LENGTH)
    assert (said["content"], said["reason"]) == ("zabc", "length")


def test_half_a_character_at_the_cut_off_leaves_no_replacement(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x🙂")
    said = run(plain_recipe([], frozenset({EOS})), tokenizer, [ids[:-1]], LENGTH)
    assert said["content"] == "x"


def test_the_end_of_sentence_is_counted_and_not_shown(tokenizer: Tokenizer) -> None:
    said = run(plain_recipe([], frozenset({EOS})), tokenizer, [[*tokenizer.encode("ok"), EOS]])
    assert (said["content"], said["kept"]) == ("ok", len(tokenizer.encode("ok")) + 1)


def test_reasoning_tokens_are_counted_to_the_end_of_the_thought(encoder: Encoder, tokenizer: Tokenizer) -> None:
    thought = tokenizer.encode("so it is</think>")
    said = run(chat_recipe(encoder), tokenizer, [[*thought, *tokenizer.encode("yes")]])
    assert 0 < said["reasoning_tokens"] <= len(thought)


def test_minus_infinity_can_be_reported(tokenizer: Tokenizer) -> None:
    text = ChoiceText(plain_recipe([], frozenset({EOS})), tokenizer)
    text.begin()
    (token_id,) = tokenizer.encode("a")
    inf = float("-inf")
    logprob = tokens_pb2.PositionLogprobs(
        emitted=tokens_pb2.TokenLogprob(token_id=token_id, logprob=-0.5),
        top=[tokens_pb2.TokenLogprob(token_id=token_id, logprob=inf)],
    )
    (chunk,) = text.push([token_id], [logprob]).chunks
    content = orjson.loads(chunk.to_json())["choices"][0]["logprobs"]["content"][0]
    assert content["logprob"] == -0.5
    assert content["top_logprobs"][0]["logprob"] < -1000


def test_detokenising_is_the_inverse_of_tokenising(tokenizer: Tokenizer) -> None:
    text = "naïve 漢字 🙂 <｜User｜> x"
    assert detokenize(tokenizer.encode(text), tokenizer) == text
