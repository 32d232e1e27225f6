"""Which field a refusal names: the one that was made wrong, wherever in the body it stands."""

from __future__ import annotations

import asyncio
import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest
from shoal.common.v1 import sampling_pb2
from shoal.inference.v1 import chat_pb2, generation_pb2
from shoal_common.errors import InvalidArgument
from shoal_gateway.completions import CompletionEncoder
from shoal_gateway.dialect import CHAT_DIALECT, MESSAGES_DIALECT, RESPONSES_DIALECT, Dialect
from shoal_gateway.encode import Encoder
from shoal_gateway.generation import prepare
from shoal_gateway.text import detokenize

MODEL = "deepseek-flash"
HI = {"role": "user", "content": "Hi"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"type": "function", "function": {"name": "f", "description": "?", "parameters": SCHEMA, "strict": False}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}], "name": "ann"},
        {"role": "assistant", "content": None, "reasoning_content": "Hm", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
        HI,
    ],
    "tools": [FUNCTION],
    "tool_choice": "auto",
    "response_format": {"type": "text"},
    "thinking": {"type": "enabled"},
    "reasoning_effort": "high",
    "stop": ["a", "b"],
    "logprobs": True,
    "top_logprobs": 2,
    "max_tokens": 4,
}
MESSAGES: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 4,
    "system": [{"type": "text", "text": "Be brief."}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": ""},
                {"type": "tool_use", "id": "1", "name": "f", "input": {}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "x"}]},
    ],
    "tools": [{"name": "f", "description": "?", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto"},
    "stop_sequences": ["a", "b"],
    "thinking": {"type": "enabled", "budget_tokens": 9},
    "output_config": {"effort": "high"},
}
RESPONSES: dict[str, Any] = {
    "model": MODEL,
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
    ],
    "tools": [{"type": "function", "name": "f", "description": "?", "parameters": SCHEMA, "strict": False}],
    "tool_choice": "auto",
    "text": {"format": {"type": "text"}},
    "reasoning": {"effort": "high"},
    "top_logprobs": 2,
    "max_output_tokens": 4,
}
THOUGHTLESS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
ANSWER = {"role": "tool", "tool_call_id": "1", "content": "x"}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]}
SAID = {"role": "assistant", "content": "x"}
GOOD: dict[str, tuple[dict[str, Any], Dialect]] = {
    "chat": (CHAT, CHAT_DIALECT),
    "messages": (MESSAGES, MESSAGES_DIALECT),
    "responses": (RESPONSES, RESPONSES_DIALECT),
}


def called(call_id: str) -> list[dict[str, Any]]:
    return [
        {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": call_id, "output": "x"},
    ]


def leaves(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, one in value.items():
            yield from leaves(one, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield from leaves(one, f"{path}[{index}]")
    if path:
        yield path


def changed(body: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    made = copy.deepcopy(body)
    inner: Any = made
    *way, last = [int(step[1:-1]) if step[0] == "[" else step for step in re.findall(r"\[\d+\]|[^.\[\]]+", path)]
    for step in way:
        inner = inner[step]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return made


def refused(encoder: Encoder, body: dict[str, Any], dialect: Dialect) -> str | None:
    try:
        encoder.chat_now(body, dialect)
    except InvalidArgument as error:
        refusal = error
    else:
        return None
    assert len(refusal.violations) == 1, refusal.message
    field = refusal.violations[0].field
    assert field in refusal.message or refusal.reason == "CONTEXT_LENGTH_EXCEEDED"
    # The message names the field once: nothing of a path is in what is told of it.
    assert not re.search(r"\w\[\d+\]", refusal.violations[0].description)
    return field


@pytest.mark.parametrize("api", GOOD)
def test_a_value_of_the_wrong_kind_is_named_wherever_it_stands(encoder: Encoder, api: str) -> None:
    body, dialect = GOOD[api]
    assert refused(encoder, body, dialect) is None
    named = 0
    for path in leaves(body):
        got = refused(encoder, changed(body, path, -5), dialect)
        # In a schema the recipe names the schema; what no API reads may be anything.
        schema, inside, _ = path.partition(".properties")
        assert got in (None, path) or got == schema.removesuffix(".type"), (path, inside)
        named += got is not None
    assert named > 35


@pytest.mark.parametrize(
    ("api", "path"),
    [
        ("chat", "messages"),
        ("chat", "messages[1].role"),
        ("chat", "messages[1].content"),
        ("chat", "messages[1].content[1].text"),
        ("chat", "messages[1].content[1].type"),
        ("chat", "messages[2].tool_calls[0].function"),
        ("chat", "messages[2].tool_calls[0].function.name"),
        ("chat", "messages[3].tool_call_id"),
        ("chat", "tools[0].type"),
        ("chat", "tools[0].function.name"),
        ("chat", "response_format.type"),
        ("chat", "thinking.type"),
        ("messages", "messages"),
        ("messages", "system[0].text"),
        ("messages", "messages[1].content[1].name"),
        ("messages", "messages[2].content[0].tool_use_id"),
        ("messages", "tools[0].name"),
        ("messages", "tools[0].input_schema"),
        ("messages", "tool_choice.type"),
        ("responses", "input[0].content[0].type"),
        ("responses", "input[0].content[0].text"),
        ("responses", "input[2].arguments"),
        ("responses", "input[3].output"),
        ("responses", "tools[0].name"),
        ("responses", "text.format.type"),
    ],
)
def test_a_field_that_is_missing_is_named(encoder: Encoder, api: str, path: str) -> None:
    body, dialect = GOOD[api]
    assert refused(encoder, changed(body, path, ...), dialect) == path


@pytest.mark.parametrize(
    ("api", "change", "field"),
    [
        ("chat", {"messages": []}, "messages"),
        ("chat", {"messages": [HI, {"role": "assistant"}]}, "messages[1].content"),
        ("chat", {"messages": [HI, {"role": "assistant", "tool_calls": [CALL]}, HI]}, "messages[1].tool_calls"),
        ("chat", {"messages": [HI, {"role": "tool", "tool_call_id": "1", "content": "x"}]}, "messages[1].tool_call_id"),
        ("chat", {"messages": [{"role": "assistant", "content": "x", "prefix": True}, HI]}, "messages[0].prefix"),
        (
            "chat",
            {"messages": [HI, THOUGHTLESS, ANSWER, HI, THOUGHTLESS, ANSWER]},
            "messages[4].reasoning_content",
        ),
        ("chat", {"tools": [FUNCTION, FUNCTION]}, "tools[1]"),
        ("chat", {"tools": [changed(FUNCTION, "function.name", "a b")]}, "tools[0].function.name"),
        ("chat", {"tools": [changed(FUNCTION, "function.parameters", 5)]}, "tools[0].function.parameters"),
        ("chat", {"tool_choice": "required"}, "tool_choice"),
        ("chat", {"tools": [], "response_format": {"type": "json_object"}}, "response_format"),
        ("chat", {"stop": ["a", ""]}, "stop[1]"),
        ("chat", {"stop": ["a"] * 17}, "stop"),
        ("chat", {"top_p": 0}, "top_p"),
        ("chat", {"logprobs": False}, "top_logprobs"),
        ("chat", {"max_tokens": 4096}, "max_tokens"),
        ("chat", {"max_completion_tokens": 4096}, "max_completion_tokens"),
        ("chat", {"messages": [{"role": "user", "content": "the cat " * 4096}]}, "messages"),
        ("messages", {"messages": []}, "messages"),
        ("messages", {"messages": MESSAGES["messages"][:2]}, "messages[1]"),
        ("messages", {"messages": changed(MESSAGES, "messages[1].content[0]", ...)["messages"]}, "messages[1].content"),
        ("messages", {"stop_sequences": ["a", ""]}, "stop_sequences[1]"),
        ("messages", {"tools": [{"type": "web_search", "name": "f"}]}, "tools[0]"),
        ("messages", {"max_tokens": 4096}, "max_tokens"),
        ("responses", {"input": []}, "input"),
        ("responses", {"input": RESPONSES["input"][:3]}, "input[2].call_id"),
        ("responses", {"input": changed(RESPONSES, "input[1]", ...)["input"]}, "input[1]"),
        (
            "responses",
            {"input": [{"type": "custom_tool_call", "call_id": "1", "name": "f", "input": ""}]},
            "input[0].call_id",
        ),
        ("responses", {"input": [{"type": "input_text", "text": "Hi"}]}, "input[0].type"),
        ("responses", {"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ("responses", {"input": [{"type": None, "id": "msg_1"}]}, "input[0]"),
        ("responses", {"tools": [{"type": "custom", "name": "f"}]}, "tools[0]"),
        ("responses", {"top_logprobs": 21}, "top_logprobs"),
        ("responses", {"max_output_tokens": 4096}, "max_output_tokens"),
    ],
)
def test_what_does_not_go_together_is_named(encoder: Encoder, api: str, change: dict[str, Any], field: str) -> None:
    body, dialect = GOOD[api]
    assert refused(encoder, {**body, **change}, dialect) == field


def in_result(block: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "1", "content": [block]}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
IN_DOCUMENTS = (
    (".source.content[0]", {"type": "document", "source": {"type": "content", "content": [IMAGE]}}),
    (".source.content[1]", {"type": "document", "source": {"type": "content", "content": [{}, {"type": "image"}]}}),
    (".source", {"type": "document", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}),
    (".source", {"type": "document", "source": {"type": "image"}}),
)


@pytest.mark.parametrize(
    ("api", "field", "messages"),
    [
        ("chat", "messages[1].content[1]", [HI, {**HI, "content": [{"type": "text", "text": "x"}, {"type": kind}]}])
        for kind in ("image_url", "image", "input_image")
    ]
    + [
        ("chat", "messages[0].content[0]", [{"role": role, "content": [{"type": "image_url", "image_url": url}]}, HI])
        for role in ("system", "user", "assistant", "tool")
        for url in ({"url": "http://a/b.png"}, {"url": "data:image/png;base64,AAAA"}, {}, 5)
    ]
    + [
        ("messages", "messages[0].content[0]", [{"role": role, "content": [{"type": "image", "source": source}]}])
        for role in ("user", "assistant")
        for source in ({"type": "url", "url": "http://a"}, {"type": "base64", "data": "A"}, {"type": "file"}, None)
    ]
    + [
        ("messages", "messages[0].content[0].content[0]", [{"role": "user", "content": [result]}])
        for result in [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}]
    ]
    + [
        ("responses", "input[0].content[0]", [{"role": role, "content": [{"type": "input_image", **image}]}])
        for role in ("user", "assistant", "system", "developer")
        for image in ({"image_url": "http://a"}, {"file_id": "f"}, {"image_url": 5}, {})
    ]
    + [
        ("responses", "input[0].output[0]", [{"type": kind, "call_id": "1", "output": [image]}])
        for kind in ("function_call_output", "custom_tool_call_output", "shell_call_output", "whatever")
        for image in ({"type": "input_image"}, {"type": "input_file", "file_data": "data:image/png;base64,AA"})
    ]
    + [
        ("messages", f"messages[0].content[0]{path}", [{"role": "user", "content": [document]}])
        for path, document in IN_DOCUMENTS
    ]
    + [
        ("messages", f"messages[0].content[0].content[0]{path}", [{"role": "user", "content": [in_result(document)]}])
        for path, document in IN_DOCUMENTS
    ]
    + [
        ("responses", "input[0].output", [{"type": "computer_call_output", "output": {"type": "computer_screenshot"}}]),
        ("responses", "input[0].summary[0]", [{"type": "reasoning", "summary": [{"type": "input_image"}]}]),
        ("responses", "input[0].output", [{"type": "computer_call_output", "output": {"type": "input_image"}}]),
        ("responses", "input[0].outputs[1]", [{"type": "code_interpreter_call", "outputs": [{}, {"type": "image"}]}]),
        ("responses", "input[1]", [HI, {"type": "image_generation_call", "result": "AAAA"}]),
        (
            "chat",
            "messages[0].content[0]",
            [{**HI, "content": [{"type": "file", "file": {"file_data": "data:image/png;"}}]}],
        ),
        (
            "chat",
            "messages[0].content[0]",
            [{**HI, "content": [{"type": "file", "file_data": "data:image/png;base64,A"}]}],
        ),
    ],
)
def test_an_image_is_refused_by_one_code_whatever_else_is_wrong_with_it(
    encoder: Encoder, api: str, field: str, messages: list[Any]
) -> None:
    body, dialect = GOOD[api]
    with pytest.raises(InvalidArgument) as caught:
        encoder.chat_now({**body, dialect.prompt_field: messages}, dialect)
    assert (caught.value.reason, caught.value.violations[0].field) == ("IMAGES_UNSUPPORTED", field)


def file_at(item: dict[str, Any]) -> list[Any]:
    return [HI, {**item, "content": [{"type": "input_text", "text": "x"}, {"type": "input_file", "file_id": "f"}]}]


@pytest.mark.parametrize(
    ("api", "field", "messages"),
    [
        ("chat", "messages[0].content[0]", [{"role": role, "content": [{"type": "file", **file}]}])
        for role in ("system", "user", "assistant", "tool")
        for file in ({"file": {"file_id": "f"}}, {"file_id": "f"}, {"file_data": "data:application/pdf;base64,AA"}, {})
    ]
    + [("responses", "input[1].content[1]", file_at(item)) for item in (HI, {"type": "whatever"})]
    + [("responses", "input[0]", [{"type": "input_file", "file_id": "f"}])],
)
def test_a_file_that_would_be_left_out_is_refused_by_one_code(
    encoder: Encoder, api: str, field: str, messages: list[Any]
) -> None:
    body, dialect = GOOD[api]
    with pytest.raises(InvalidArgument) as caught:
        encoder.chat_now({**body, dialect.prompt_field: messages}, dialect)
    assert (caught.value.reason, caught.value.violations[0].field) == ("FILES_UNSUPPORTED", field)


@pytest.mark.parametrize(
    ("api", "place", "unseen", "told"),
    [
        (
            "messages",
            "messages[0].content[0]",
            {"type": "document", "source": source},
            f"[Unsupported document type: {kind}]",
        )
        for kind, source in (
            ("text/plain", {"type": "text", "media_type": "text/plain", "data": "x"}),
            ("application/pdf", {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}),
            ("unknown", {"type": "content", "content": [{"type": "text", "text": "x"}]}),
            ("unknown", {"type": "file", "file_id": "f"}),
        )
    ]
    + [
        (
            "messages",
            "messages[2].content[0].content",
            [{"type": "document", "source": {"type": "url", "url": "http://a/b.pdf"}}],
            "[Unsupported document type: unknown]",
        ),
        ("responses", "input[3].output", [{"type": "input_file", "file_id": "f"}], "[Unsupported Document]"),
    ],
)
def test_the_model_is_told_of_a_document_that_it_cannot_see(
    encoder: Encoder, api: str, place: str, unseen: Any, told: str
) -> None:
    body, dialect = GOOD[api]
    prepared = encoder.chat_now(changed(body, place, unseen), dialect)
    assert told in detokenize(prepared.request.prompt_ids, encoder.tokenizer)


def nested(levels: int) -> Any:
    made: Any = "x"
    for _ in range(levels):
        made = {"a": made}
    return made


DEEP = nested(900)


@pytest.mark.parametrize("api", GOOD)
def test_fields_that_no_api_reads_may_be_as_deep_as_json_is_read(encoder: Encoder, api: str) -> None:
    body, dialect = GOOD[api]
    plain = encoder.chat_now(body, dialect).request
    metadata = {} if api == "messages" else {"metadata": DEEP}
    deep = encoder.chat_now({**body, **metadata, "whatever": DEEP, "store": DEEP}, dialect).request
    assert (deep.prompt_ids, deep.params) == (plain.prompt_ids, plain.params)


LOST: tuple[dict[str, Any], ...] = (
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm"}]},
    {"type": "reasoning", "summary": [], "content": []},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": ""}]},
)


@pytest.mark.parametrize(
    ("api", "path"), [("messages", "tools[0].type"), ("responses", "input[0].type"), ("responses", "text.format")]
)
def test_null_means_what_leaving_a_field_out_does(encoder: Encoder, api: str, path: str) -> None:
    body, dialect = GOOD[api]
    plain = encoder.chat_now(body, dialect).request
    assert encoder.chat_now(changed(body, path, None), dialect).request.prompt_ids == plain.prompt_ids


@pytest.mark.parametrize("lost", LOST)
@pytest.mark.parametrize(
    ("before", "after", "at"),
    [
        ([], called("1"), 0),
        ([HI], called("1"), 1),
        ([HI, THOUGHT, *called("1")], called("2"), 4),
        ([HI, *called("0"), HI], [*called("1"), THOUGHT, *called("2")], 4),
        ([HI], [{"type": "web_search_call"}, *called("1"), {"role": "system", "content": "x"}], 1),
        ([HI], [SAID, *called("1")], 1),
        ([HI], [SAID], 1),
        ([HI, THOUGHT, *called("1")], [SAID], 4),
    ],
)
def test_a_thought_that_lost_its_text_is_named(
    encoder: Encoder, lost: dict[str, Any], before: list[Any], after: list[Any], at: int
) -> None:
    assert refused(encoder, {**RESPONSES, "input": [*before, THOUGHT, *after]}, RESPONSES_DIALECT) is None
    assert refused(encoder, {**RESPONSES, "input": [*before, lost, *after]}, RESPONSES_DIALECT) == f"input[{at}]"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt": "the cat " * 4096}, "prompt"),
        ({"prompt": ["Hi", "the cat " * 4096]}, "prompt[1]"),
        ({"max_tokens": 4096}, "max_tokens"),
    ],
)
def test_a_completion_that_is_too_long_names_what_is(encoder: Encoder, change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        CompletionEncoder(encoder).prepare_now({"model": MODEL, "prompt": "Hi", **change})
    assert (caught.value.reason, caught.value.violations[0].field) == ("CONTEXT_LENGTH_EXCEEDED", field)


def test_what_is_counted_only_is_refused_as_well(encoder: Encoder) -> None:
    body = {**MESSAGES, "output_config": {"format": {"type": "json_schema"}}}
    with pytest.raises(InvalidArgument) as caught:
        asyncio.run(encoder.count_tokens(body, 100, MESSAGES_DIALECT))
    assert caught.value.violations[0].field == "output_config.format.schema"


CHAT_CALL = chat_pb2.ToolCall(id="1", name="f", arguments_json="{}")
USER, ASSISTANT = chat_pb2.CHAT_ROLE_USER, chat_pb2.CHAT_ROLE_ASSISTANT


@pytest.mark.parametrize(
    ("generation", "field"),
    [
        ({"chat": {"messages": [{"role": USER}], "tools": [{"name": "a b"}]}}, "generation.chat.tools[0].name"),
        (
            {"chat": {"messages": [{"role": USER}], "tools": [{"name": "f", "parameters_json_schema": "5"}]}},
            "generation.chat.tools[0].parameters_json_schema",
        ),
        (
            {"chat": {"messages": [{"role": USER}, {"role": ASSISTANT, "tool_calls": [CHAT_CALL]}]}},
            "generation.chat.messages[1].tool_calls",
        ),
        ({"chat": {"messages": [{"role": USER}]}, "stop": ["x"] * 16 + [""]}, "generation.stop"),
        ({"text": "the cat " * 4096}, "generation.text"),
        ({"tokens": {"ids": [5] * 4096}}, "generation.tokens"),
        ({"text": "Hi", "sampling": sampling_pb2.SamplingParams(max_tokens=4096)}, "generation.sampling.max_tokens"),
    ],
)
def test_over_grpc_fields_are_named_as_they_are_called_there(
    encoder: Encoder, generation: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        asyncio.run(prepare(generation_pb2.Generation(**generation), encoder))
    (wrong,) = caught.value.violations
    assert wrong.field == field
    # The path once, and only in the spelling of this API.
    assert not re.search(r"messages\[|tools\[|function\.", wrong.description)
    if caught.value.reason != "CONTEXT_LENGTH_EXCEEDED":
        assert caught.value.message == f"{field}: {wrong.description}"
