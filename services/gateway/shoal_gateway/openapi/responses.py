"""OpenAI Responses: what is accepted and answered. Pure."""

from __future__ import annotations

from shoal_common.sampling_limits import MAX_TOP_LOGPROBS

from shoal_gateway.chat_fields import MAX_SEED, MAX_TOKENS, MAX_USER_ID_BYTES
from shoal_gateway.openapi.answers import POSITIONS
from shoal_gateway.openapi.requests import EFFORT, MAX_MODEL_BYTES, TOOL_NAME
from shoal_gateway.openapi.schema import (
    BOOLEAN,
    COUNT,
    NULL,
    NUMBER,
    REFUSED,
    STRING,
    Schema,
    accepts,
    answers,
    any_of,
    array,
    enum,
    integer,
    nullable,
    number,
    positive_number,
    ref,
    text,
    typed_event,
)
from shoal_gateway.responses_fields import MAX_METADATA, MAX_METADATA_BYTES

_PART = accepts({}, {"type": enum("input_text", "output_text"), "text": STRING})
_ROLE = enum("user", "assistant", "system", "developer")
_THOUGHT = accepts({}, {"type": enum("reasoning_text"), "text": STRING})
_ITEM = any_of(
    accepts({}, {"role": _ROLE, "content": any_of(STRING, array(_PART))}),
    accepts({"content": array(_THOUGHT)}, {"type": enum("reasoning")}),
    accepts({}, {"type": enum("function_call"), "call_id": STRING, "name": STRING, "arguments": STRING}),
    accepts({}, {"type": enum("function_call_output"), "call_id": STRING, "output": any_of(STRING, array(_PART))}),
    {"type": "object", "description": "What is none of these is ignored, but an image or a part of a message."},
)
_FUNCTION = accepts(
    {"description": STRING, "parameters": {"type": "object"}, "strict": BOOLEAN},
    {"type": enum("function"), "name": TOOL_NAME},
)
_FORMAT = any_of(
    accepts({}, {"type": enum("text", "json_object")}),
    accepts(
        {"strict": BOOLEAN, "description": STRING},
        {"type": enum("json_schema"), "name": STRING, "schema": {"type": "object"}},
    ),
)
_CHOICE = any_of(enum("none", "auto", "required"), accepts({}, {"type": enum("function"), "name": STRING}))
_METADATA = {"type": "object", "additionalProperties": text(MAX_METADATA_BYTES), "maxProperties": MAX_METADATA}
REQUEST = accepts(
    {
        "instructions": STRING,
        "max_output_tokens": integer(1, MAX_TOKENS),
        "temperature": number(0, 2),
        "top_p": positive_number(1),
        "top_logprobs": integer(0, MAX_TOP_LOGPROBS),
        "stream": BOOLEAN,
        "reasoning": accepts({"effort": EFFORT, "summary": enum("auto", "concise", "detailed")}),
        "text": accepts({"format": _FORMAT, "verbosity": enum("low", "medium", "high")}),
        "tools": array(any_of(_FUNCTION, {"type": "object", "description": "Tools of other types are ignored."})),
        "tool_choice": _CHOICE,
        "parallel_tool_calls": BOOLEAN,
        "metadata": _METADATA,
        "safety_identifier": text(MAX_USER_ID_BYTES),
        "prompt_cache_key": text(MAX_USER_ID_BYTES),
        "user": STRING,
        "user_id": text(MAX_USER_ID_BYTES),
        "seed": integer(0, MAX_SEED),
        "ignore_eos": BOOLEAN,
        "shoal": ref("ShoalRequest"),
    },
    {"model": text(MAX_MODEL_BYTES), "input": any_of(STRING, array(_ITEM, low=1))},
    ignored=(
        "access_programs",
        "background_options",
        "context_management",
        "image",
        "include",
        "max_tool_calls",
        "moderation",
        "prompt_cache_options",
        "prompt_cache_retention",
        "service_tier",
        "store",
        "stream_options",
        "truncation",
    ),
    refused=("conversation", "previous_response_id", "prompt"),
)
REQUEST["properties"]["background"] = {
    "type": ["boolean", "null"],
    "enum": [False, None],
    "description": REFUSED,
}

_STATUS = enum("in_progress", "completed", "incomplete")
_TEXT_PART = answers({"type": enum("output_text"), "text": STRING, "annotations": array({}), "logprobs": POSITIONS})
_REASONING_PART = answers({"type": enum("reasoning_text"), "text": STRING})
_OUTPUT = any_of(
    answers(
        {
            "type": enum("reasoning"),
            "id": STRING,
            "status": _STATUS,
            "content": array(_REASONING_PART),
            "summary": array({}),
            "encrypted_content": nullable(STRING),
        }
    ),
    answers(
        {
            "type": enum("message"),
            "id": STRING,
            "status": _STATUS,
            "role": enum("assistant"),
            "content": array(_TEXT_PART),
        },
        {"phase": nullable(enum("commentary", "final_answer"))},
    ),
    answers(
        {
            "type": enum("function_call"),
            "id": STRING,
            "status": _STATUS,
            "call_id": STRING,
            "name": STRING,
            "arguments": STRING,
        },
        {"namespace": STRING},
    ),
)
_USAGE = answers(
    {
        "input_tokens": COUNT,
        "input_tokens_details": answers({"cached_tokens": COUNT}),
        "output_tokens": COUNT,
        "output_tokens_details": answers({"reasoning_tokens": COUNT}),
        "total_tokens": COUNT,
    }
)
_REPEATED: dict[str, Schema] = {
    "background": {"const": False},
    "content_filters": NULL,
    "frequency_penalty": NUMBER,
    "instructions": nullable(STRING),
    "max_output_tokens": nullable(COUNT),
    "max_tool_calls": NULL,
    "metadata": {"type": ["object", "null"], "additionalProperties": nullable(STRING)},
    "moderation": NULL,
    "parallel_tool_calls": BOOLEAN,
    "presence_penalty": NUMBER,
    "previous_response_id": NULL,
    "prompt_cache_key": nullable(STRING),
    "prompt_cache_retention": NULL,
    "reasoning": {"type": "object"},
    "safety_identifier": nullable(STRING),
    "service_tier": STRING,
    "store": {"const": False},
    "temperature": NUMBER,
    "text": {"type": "object"},
    "tool_choice": {"type": ["string", "object"]},
    "tools": array({"type": "object"}),
    "top_logprobs": COUNT,
    "top_p": NUMBER,
    "truncation": enum("disabled"),
    "user": nullable(STRING),
}


def _response(status: Schema, usage: Schema, error: Schema = NULL) -> Schema:
    return answers(
        {
            "id": STRING,
            "object": enum("response"),
            "created_at": COUNT,
            "completed_at": nullable(COUNT),
            "status": status,
            "error": error,
            "incomplete_details": nullable(answers({"reason": enum("max_output_tokens", "content_filter")})),
            "model": STRING,
            "output": array(_OUTPUT),
            "usage": usage,
            "shoal": ref("ShoalAnswer"),
            **_REPEATED,
        }
    )


ANSWER = _response(enum("completed", "incomplete"), _USAGE)
_BEGUN = _response(enum("in_progress"), NULL)
_FAILED = _response(enum("failed"), NULL, answers({"code": STRING, "message": STRING}))


def _event(name: str, fields: dict[str, Schema]) -> Schema:
    return typed_event(name, {"sequence_number": COUNT, **fields})


_IN_ITEM = {"item_id": STRING, "output_index": COUNT}
_IN_PART = {**_IN_ITEM, "content_index": COUNT}
_PARTS = any_of(_TEXT_PART, _REASONING_PART)
EVENT = any_of(
    _event("response.created", {"response": _BEGUN}),
    _event("response.in_progress", {"response": _BEGUN}),
    _event("response.output_item.added", {"item": _OUTPUT, "output_index": COUNT}),
    _event("response.output_item.done", {"item": _OUTPUT, "output_index": COUNT}),
    _event("response.content_part.added", {**_IN_PART, "part": _PARTS}),
    _event("response.content_part.done", {**_IN_PART, "part": _PARTS}),
    _event("response.reasoning_text.delta", {**_IN_PART, "delta": STRING}),
    _event("response.reasoning_text.done", {**_IN_PART, "text": STRING}),
    _event("response.output_text.delta", {**_IN_PART, "delta": STRING, "logprobs": POSITIONS}),
    _event("response.output_text.done", {**_IN_PART, "text": STRING, "logprobs": POSITIONS}),
    _event("response.function_call_arguments.delta", {**_IN_ITEM, "delta": STRING}),
    _event("response.function_call_arguments.done", {**_IN_ITEM, "arguments": STRING}),
    _event("response.completed", {"response": _response(enum("completed"), _USAGE)}),
    _event("response.incomplete", {"response": _response(enum("incomplete"), _USAGE)}),
    _event("response.failed", {"response": _FAILED}),
)
