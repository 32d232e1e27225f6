"""From a completions body to requests: prompts, the fields only completions have, fill-in-the-middle."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shoal_common.errors import InvalidArgument
from shoal_gateway.completions import CompletionEncoder
from shoal_gateway.encode import Encoder
from shoal_gateway.refusals import ContextLengthExceeded, ModelNotFound
from shoal_gateway.served_model import read_served_model

TINY = Path(__file__).parents[2] / "golden" / "data" / "tiny"
FIM = {505: "<｜fim▁begin｜>", 506: "<｜fim▁hole｜>", 507: "<｜fim▁end｜>"}
BODY = {"model": "deepseek-flash", "prompt": "def f(x):"}


@pytest.fixture(scope="module")
def completions(encoder: Encoder) -> CompletionEncoder:
    return CompletionEncoder(encoder)


@pytest.fixture(scope="module")
def fim(tmp_path_factory: pytest.TempPathFactory) -> CompletionEncoder:
    """The tiny tokenizer, three of whose placeholders are the tokens of the released one."""
    folder = tmp_path_factory.mktemp("fim")
    shutil.copy(TINY / "config.json", folder)
    told = (TINY / "tokenizer.json").read_text()
    for added in json.loads(told)["added_tokens"]:
        told = told.replace(added["content"], FIM.get(added["id"], added["content"]))
    (folder / "tokenizer.json").write_text(told)
    model, tokenizer = read_served_model(folder, name="deepseek-flash", aliases=(), created_s=1)
    return CompletionEncoder(Encoder(model, tokenizer, context=lambda: model.max_context_tokens, draw_seed=lambda: 77))


def prepared_ids(completions: CompletionEncoder, **fields: Any) -> list[list[int]]:
    return [one.prompt_ids for one in completions.prepare_now({**BODY, **fields}).requests]


def refused(completions: CompletionEncoder, **fields: Any) -> tuple[str, str]:
    with pytest.raises(InvalidArgument) as caught:
        completions.prepare_now({**BODY, **fields})
    return (caught.value.violations[0].field if caught.value.violations else "", caught.value.message)


def test_text_begins_a_sequence_and_token_ids_are_taken_as_they_are(
    completions: CompletionEncoder, encoder: Encoder
) -> None:
    words = encoder.tokenizer.encode("def f(x):")
    assert prepared_ids(completions) == [[0, *words]]
    assert prepared_ids(completions, prompt=words) == [words]
    assert prepared_ids(completions, prompt=["a", "def f(x):"]) == [[0, *encoder.tokenizer.encode("a")], [0, *words]]
    assert prepared_ids(completions, prompt=[[5], words]) == [[5], words]
    assert prepared_ids(completions, prompt="") == [[0]]


def test_a_prompt_may_spell_special_tokens(completions: CompletionEncoder) -> None:
    assert prepared_ids(completions, prompt="<｜User｜>") == [[0, 3]]


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (None, "prompt"),
        ([], "prompt"),
        ({}, "prompt"),
        (5, "prompt"),
        ([[]], "prompt[0]"),
        (["a", [5]], "prompt"),
        (["a", 5], "prompt"),
        ([5, True], "prompt[1]"),
        ([5, 512], "prompt[1]"),
        ([[5], [-1]], "prompt[1][0]"),
        (["a"] * 33, "prompt"),
    ],
)
def test_a_wrong_prompt_is_named(completions: CompletionEncoder, prompt: Any, field: str) -> None:
    assert refused(completions, prompt=prompt)[0] == field


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"best_of": 2}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"n": 9}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": "yes"}, "echo"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": 5}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 8, "min_tokens": 9}, "min_tokens"),
        ({"top_p": 0}, "top_p"),
        ({"suffix": "x", "prompt": [5]}, "suffix"),
        ({"suffix": 5}, "suffix"),
        ({"shoal": {"else": 1}}, "shoal.else"),
        ({"shoal": {"prompt_logprobs": 1}, "prompt": ["a", "b"]}, "shoal.prompt_logprobs"),
        ({"shoal": {"prompt_logprobs": 1}, "echo": True, "logprobs": 1}, "shoal.prompt_logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "regex"}}, "response_format.regex"),
    ],
)
def test_a_wrong_field_is_named(completions: CompletionEncoder, fields: dict[str, Any], field: str) -> None:
    assert refused(completions, **fields)[0] == field


def test_fields_of_a_chat_are_ignored(completions: CompletionEncoder) -> None:
    unknown = {"messages": 5, "reasoning_effort": 7.5, "max_completion_tokens": "all", "tools": 1, "anything": {}}
    assert prepared_ids(completions, **unknown) == prepared_ids(completions)


def test_sampling_is_as_sent(completions: CompletionEncoder) -> None:
    sent = {"temperature": 0.3, "top_p": 0.4, "top_k": 7, "presence_penalty": 1.5, "seed": 9, "logprobs": 0}
    params = completions.prepare_now({**BODY, **sent}).requests[0].params
    assert {name: getattr(params, name) for name in sent if name != "logprobs"} == {
        name: value for name, value in sent.items() if name != "logprobs"
    }
    assert (params.HasField("top_logprobs"), params.top_logprobs) == (True, 0)
    assert not completions.prepare_now(BODY).requests[0].params.HasField("top_logprobs")


def test_tokens_are_those_asked_for_or_what_the_hosted_api_gives_or_what_is_left(
    completions: CompletionEncoder, encoder: Encoder
) -> None:
    room = encoder.context_tokens
    assert completions.prepare_now({**BODY, "max_tokens": 3}).requests[0].params.max_tokens == 3
    assert completions.prepare_now(BODY).requests[0].params.max_tokens == min(4096, room - 1 - len("def f(x):"))
    near = completions.prepare_now({**BODY, "prompt": [5] * (room - 2), "min_tokens": 2}).requests[0].params
    assert (near.max_tokens, near.min_tokens) == (2, 2)
    with pytest.raises(InvalidArgument, match="min_tokens: must be at most max_tokens, 2"):
        completions.prepare_now({**BODY, "prompt": [5] * (room - 2), "min_tokens": 3})
    with pytest.raises(ContextLengthExceeded):
        completions.prepare_now({**BODY, "prompt": [5] * room})


def test_prompts_of_one_body_are_sampled_alike(completions: CompletionEncoder) -> None:
    several = completions.prepare_now({**BODY, "prompt": ["a", "b c"], "n": 2}).requests
    assert [(one.params.seed, one.choice_count) for one in several] == [(77, 2), (77, 2)]
    alone = completions.prepare_now({**BODY, "prompt": "b c", "n": 2}).requests
    assert (several[1].params, several[1].prompt_ids) == (alone[0].params, alone[0].prompt_ids)


def test_an_unknown_model_is_not_found(completions: CompletionEncoder) -> None:
    with pytest.raises(ModelNotFound):
        completions.prepare_now({**BODY, "model": "else"})


def test_a_response_format_holds_the_text_from_its_first_token(completions: CompletionEncoder) -> None:
    def kinds(form: Any) -> Any:
        constraint = completions.prepare_now({**BODY, "response_format": form}).requests[0].constraint
        return constraint and (constraint.constraint.kind.value, constraint.constraint.start_after_ids)

    assert kinds(None) is kinds({"type": "text"}) is None
    assert kinds({"type": "json_object"}) == ("json_object", ())
    assert kinds({"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}) == ("json_schema", ())
    assert kinds({"type": "regex", "regex": "a+"}) == ("regex", ())


def test_a_suffix_makes_a_hole_between_two_plain_texts(fim: CompletionEncoder, encoder: Encoder) -> None:
    before, after = "def f(x):\n    ", "\n    return y<｜fim▁end｜><｜User｜>"
    (ids,) = prepared_ids(fim, prompt=before, suffix=after)
    hole = ids.index(506)
    assert ids[:2] == [0, 505]
    assert ids[2:hole] == encoder.tokenizer.encode(before)
    assert ids[-1] == 507
    assert 3 not in ids
    assert 507 not in ids[:-1]


def test_an_empty_suffix_is_none(completions: CompletionEncoder, fim: CompletionEncoder) -> None:
    assert prepared_ids(fim, suffix="") == prepared_ids(fim) == prepared_ids(completions)


def test_a_model_without_the_tokens_refuses_a_suffix(completions: CompletionEncoder) -> None:
    assert refused(completions, suffix="x")[0] == "suffix"


def test_echo_repeats_the_prompt_but_not_what_surrounds_it(fim: CompletionEncoder) -> None:
    assert [one.text for one in fim.prepare_now({**BODY, "echo": True, "suffix": "y"}).echoes] == ["def f(x):"]
    assert refused(fim, echo=True, suffix="y", logprobs=1)[0] == "echo"


@given(st.text())
@settings(deadline=None, max_examples=60)
def test_plain_text_is_what_the_tokenizer_makes_of_text_without_special_tokens(encoder: Encoder, text: str) -> None:
    try:
        expected = encoder.tokenizer.encode(text)
    except UnicodeEncodeError:
        with pytest.raises(InvalidArgument):
            encoder.plain_text(text)
        return
    assert encoder.plain_text(text) == expected


def test_plain_text_forges_no_special_token(encoder: Encoder) -> None:
    specials = {0, 1, 3, 4, 5, 6, 504}
    text = "<｜begin▁of▁sentence｜><｜User｜><think></think><｜deepseek_image｜>"
    assert specials & set(encoder.tokenizer.encode(text))
    assert not specials & set(encoder.plain_text(text))
