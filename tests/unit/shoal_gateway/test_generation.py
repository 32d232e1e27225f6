"""What a gRPC Generation means, field by field."""

from __future__ import annotations

import contextlib

import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shoal.common.v1 import sampling_pb2, tokens_pb2
from shoal.inference.v1 import chat_pb2, generation_pb2
from shoal_common.errors import InvalidArgument, MeshError
from shoal_gateway.encode import Encoder
from shoal_gateway.generation import prepare_now
from shoal_gateway.refusals import ContextLengthExceeded, ModelNotFound
from shoal_gateway.text import detokenize

Generation = generation_pb2.Generation
Params = sampling_pb2.SamplingParams


def tokens(*ids: int) -> tokens_pb2.TokenIds:
    return tokens_pb2.TokenIds(ids=ids)


def chat(*contents: str, **fields: object) -> chat_pb2.ChatPrompt:
    messages = [chat_pb2.ChatMessage(role=chat_pb2.CHAT_ROLE_USER, content=one) for one in contents]
    return chat_pb2.ChatPrompt(messages=messages, **fields)  # type: ignore[arg-type]


def test_tokens_are_used_as_they_stand_and_answered_in_tokens(encoder: Encoder) -> None:
    prepared = prepare_now(Generation(tokens=tokens(5, 6, 7)), encoder)
    assert prepared.request.prompt_ids == [5, 6, 7]
    assert (prepared.has_text, prepared.has_tokens, prepared.request.output) == (False, True, None)


def test_text_gets_the_begin_of_sequence_in_front(encoder: Encoder) -> None:
    prepared = prepare_now(Generation(text="ab"), encoder)
    assert detokenize(prepared.request.prompt_ids, encoder.tokenizer) == "<｜begin▁of▁sentence｜>ab"
    assert prepared.has_text


@pytest.mark.parametrize(("effort", "end"), [(0, "</think>"), (60, "<think>"), (None, "<think>")])
def test_a_conversation_is_encoded_with_its_effort(encoder: Encoder, effort: int | None, end: str) -> None:
    prompt = chat("Hello", reasoning_effort=effort) if effort is not None else chat("Hello")
    text = detokenize(prepare_now(Generation(chat=prompt), encoder).request.prompt_ids, encoder.tokenizer)
    assert text.endswith(end)
    assert (f"Effort: {75 if effort is None else effort} " in text) is (effort != 0)


def test_sampling_is_never_rewritten(encoder: Encoder) -> None:
    params = Params(temperature=0.2, top_p=0.3, top_k=4, seed=9, max_tokens=11)
    made = prepare_now(Generation(chat=chat("Hello"), sampling=params), encoder).request.params
    assert made == params


def test_absent_bounds_are_filled_in(encoder: Encoder) -> None:
    made = prepare_now(Generation(tokens=tokens(5, 6)), encoder).request.params
    assert (made.seed, made.max_tokens) == (77, 4094)


def test_a_tool_result_goes_back_with_its_call(encoder: Encoder) -> None:
    call = chat_pb2.ToolCall(id="c1", name="f", arguments_json='{"a": 1}')
    prompt = chat(
        "Hello", reasoning_effort=0, tools=[chat_pb2.Tool(name="f", parameters_json_schema='{"type":"object"}')]
    )
    prompt.messages.add(role=chat_pb2.CHAT_ROLE_ASSISTANT, tool_calls=[call])
    prompt.messages.add(role=chat_pb2.CHAT_ROLE_TOOL, content="42", tool_call_id="c1")
    text = detokenize(prepare_now(Generation(chat=prompt), encoder).request.prompt_ids, encoder.tokenizer)
    assert "<tool_result>42</tool_result>" in text
    assert '<｜DSML｜ invoke name="f">' in text


@pytest.mark.parametrize(
    ("generation", "field"),
    [
        (Generation(), "generation.prompt"),
        (Generation(tokens=tokens()), "generation.tokens.ids"),
        (Generation(tokens=tokens(1, 512)), "generation.tokens.ids[1]"),
        (Generation(chat=chat_pb2.ChatPrompt()), "generation.chat.messages"),
        (Generation(chat=chat_pb2.ChatPrompt(messages=[chat_pb2.ChatMessage()])), "generation.chat.messages[0].role"),
        (Generation(chat=chat("x", reasoning_effort=101)), "generation.chat.reasoning_effort"),
        (
            Generation(chat=chat("x", tools=[chat_pb2.Tool(name="f", parameters_json_schema="{")])),
            "generation.chat.tools[0].parameters_json_schema",
        ),
        (Generation(text="x", n=0), "generation.n"),
        (Generation(text="x", n=9), "generation.n"),
        (Generation(text="x", stop=[""]), "generation.stop[0]"),
        (Generation(text="x", stop=["a"] * 17), "generation.stop"),
        (Generation(tokens=tokens(1), stop=["a"]), "generation.stop"),
        (Generation(text="x", user_id="x" * 513), "generation.user_id"),
        (Generation(text="x", output_form=9), "generation.output_form"),  # type: ignore[arg-type]
        (Generation(text="x", sampling=Params(max_tokens=0)), "generation.sampling.max_tokens"),
        (Generation(text="x", sampling=Params(temperature=float("nan"))), "generation.sampling.temperature"),
        (Generation(text="x", sampling=Params(top_p=0)), "generation.sampling.top_p"),
        (Generation(text="x", sampling=Params(top_logprobs=21)), "generation.sampling.top_logprobs"),
        (Generation(text="x", sampling=Params(stop_token_ids=[1, 512])), "generation.sampling.stop_token_ids[1]"),
        (Generation(text="x", sampling=Params(logit_bias={512: 1})), "generation.sampling.logit_bias"),
        (Generation(text="x", sampling=Params(prompt_logprobs=21)), "generation.sampling.prompt_logprobs"),
        (Generation(text="x", sampling=Params(bad_words=[tokens()])), "generation.sampling.bad_words[0]"),
        (Generation(text="x", sampling=Params(bad_words=[tokens(1, 512)])), "generation.sampling.bad_words[0]"),
        (Generation(text="x", sampling=Params(bad_words=[tokens(1)] * 129)), "generation.sampling.bad_words"),
        (Generation(text="x", sampling=Params(forced_ids=[1, 512])), "generation.sampling.forced_ids[1]"),
        (Generation(text="x", determinism=7), "generation.determinism"),  # type: ignore[arg-type]
        (Generation(text="x", sampling=Params(min_tokens=3, max_tokens=2)), "generation.sampling.min_tokens"),
    ],
)
def test_a_wrong_value_is_refused_by_the_path_of_its_field(
    encoder: Encoder, generation: generation_pb2.Generation, field: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        prepare_now(generation, encoder)
    assert caught.value.violations[0].field == field


def test_the_context_and_the_model_are_checked(encoder: Encoder) -> None:
    with pytest.raises(ContextLengthExceeded):
        prepare_now(Generation(tokens=tokens(*[5] * 4096)), encoder)
    with pytest.raises(ContextLengthExceeded):
        prepare_now(Generation(tokens=tokens(5), sampling=Params(max_tokens=2**32 - 1)), encoder)
    with pytest.raises(ModelNotFound):
        prepare_now(Generation(tokens=tokens(5), model="other"), encoder)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=60))
def test_any_message_is_taken_or_refused_but_never_a_bug(encoder: Encoder, raw: bytes) -> None:
    generation = Generation()
    with contextlib.suppress(DecodeError):
        generation.MergeFromString(raw)
    code = "OK"
    try:
        prepare_now(generation, encoder)
    except MeshError as error:
        code = error.code
    assert code in ("OK", "INVALID_ARGUMENT", "NOT_FOUND")
